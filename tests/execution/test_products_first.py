"""A product that nothing waits for is made before the next product reads what it reads."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.execution.products_first import products_first
from autoshard.planner.decisions import EquationShardings


def gradients(gradient, x, weight):
    """Of the weight and of x, in `y = x @ weight`, as JAX's backward pass makes them."""
    return jnp.einsum("bi,bo->io", x, gradient), jnp.einsum("bo,io->bi", gradient, weight)


def added(gradient, x, weight):
    """The gradient of the weight is added to an earlier one, here the weight."""
    of_weight, of_x = gradients(gradient, x, weight)
    return of_weight + weight, of_x


def awaited(gradient, x, weight):
    """The gradient of the weight is needed for another product."""
    of_weight, of_x = gradients(gradient, x, weight)
    return of_x @ of_weight


@pytest.fixture(scope="module")
def traced():
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 4), (8, 6), (6, 4))]
    return {f: jax.make_jaxpr(f)(*shapes).jaxpr for f in (gradients, added, awaited)}


def found(jaxpr, shardings):
    """(variables that the first product's operands and later readers are tied by, all that was found)."""
    products = [k for k, e in enumerate(jaxpr.eqns) if e.primitive.name == "dot_general"]
    tied = products_first(jaxpr.eqns, range(len(jaxpr.eqns)), shardings)
    assert set(tied) <= set(products[:1]), "only the gradient of the weight is early and read by nobody"
    return tied.get(products[0])


def test_the_gradient_of_a_weight_is_made_before_that_of_the_input(traced):
    jaxpr = traced[gradients]
    assert found(jaxpr, {}) == [jaxpr.invars[0]], "the gradient of y, which both products read"


@pytest.mark.parametrize("program", [added, awaited])
def test_a_product_that_is_added_to_or_awaited_is_left_alone(traced, program):
    assert found(traced[program], {}) is None


def test_partial_sums_are_left_alone(traced):
    """The batch is dimension 0 of x and of the gradient, the output features dimension 1 of the gradient."""
    jaxpr = traced[gradients]
    product = next(k for k, e in enumerate(jaxpr.eqns) if e.primitive.name == "dot_general")
    of_gradient = jaxpr.eqns[product].invars.index(jaxpr.invars[0])
    layouts = {"batch": (("data",), ()), "output": ((), ("data",))}
    read = {k: {product: EquationShardings(operands=((of_gradient, (l,)),))} for k, l in layouts.items()}
    assert found(jaxpr, read["batch"]) is None
    assert found(jaxpr, read["output"]) == [jaxpr.invars[0]]

"""A product that nothing waits for is made before the next product reads what it reads."""

import jax
import jax.numpy as jnp
import pytest
from planned import planned

from autoshard.compiler.early_products import products_first
from autoshard.graph.equation_plan import EquationPlan

WORKSPACE_BYTES = 32 * 2**20
SHAPES = [(8, 4), (8, 6), (6, 4)]


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


def products_of(program, shapes=SHAPES):
    """The equations of the products of a program."""
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return [k for k, e in enumerate(jax.make_jaxpr(program)(*given).eqns) if e.primitive.name == "dot_general"]


def found(program, plans, shapes=SHAPES):
    """What later readers of an operand of the first product wait for: the argument that this operand is."""
    graph, products = planned(program, shapes, plans, {"data": 4}), products_of(program, shapes)
    tied = products_first(graph, graph.entry, WORKSPACE_BYTES)
    assert set(tied) <= set(products[:1]), "only the gradient of the weight is early and read by nobody"
    if products[0] not in tied:
        return None
    (product,) = (i for i in graph.entry if i.equation == products[0])
    return [a.value for a in graph.graph.arguments].index(product.operands[tied[products[0]]])


def test_the_gradient_of_a_weight_is_made_before_that_of_the_input():
    assert found(gradients, {}) == 0, "the gradient of y, which both products read"


@pytest.mark.parametrize("program", [added, awaited])
def test_a_product_that_is_added_to_or_awaited_is_left_alone(program):
    assert found(program, {}) is None


def test_partial_sums_are_left_alone():
    """The batch is dimension 0 of x and of the gradient, the output features dimension 1 of the gradient."""
    product = products_of(gradients)[0]
    graph = planned(gradients, SHAPES, {}, {})
    (operands,) = (i.operands for i in graph.entry if i.equation == product)
    of_gradient = operands.index(graph.graph.arguments[0].value)
    layouts = {"batch": (("data",), ()), "output": ((), ("data",))}
    read = {k: {product: EquationPlan(operands=((of_gradient, (l,)),))} for k, l in layouts.items()}
    assert found(gradients, read["batch"]) is None
    assert found(gradients, read["output"]) == 0


@pytest.mark.parametrize(("batch", "is_tied"), [(2**21, False), (2**22, True)])
def test_a_partial_sum_that_takes_less_than_what_ends_with_it_is_made_first(batch, is_tied):
    """Each of 4 devices holds batch x 10 / 4 floats of x and of the gradient: 20 MiB of 2**21, 40 MiB of 2**22. The
    workspace is 32 MiB, the partial sum 96 bytes."""
    shapes = (batch, 4), (batch, 6), (6, 4)
    split = (("data",), ())
    plan = EquationPlan(operands=((0, (split,)), (1, (split,))), results=((0, ((), ())),))
    assert found(gradients, {products_of(gradients, shapes)[0]: plan}, shapes) == (0 if is_tied else None)


@pytest.mark.parametrize(("outputs", "is_tied"), [(960, False), (961, True)])
def test_a_partial_sum_that_takes_more_than_xla_joins_is_reduced_first(outputs, is_tied):
    """Of a weight (8192, 960) in float32 it takes 30 MiB, though each of four devices keeps a quarter of it. The rows
    of which it is the gradient, and that of its input, lie on 4 devices."""
    shapes = (64, outputs), (64, 8192), (8192, outputs)
    split = (("data",), ())
    plan = EquationPlan(operands=((0, (split,)), (1, (split,))), results=((0, split),), scatters=(("data", 0),))
    assert (found(gradients, {products_of(gradients, shapes)[0]: plan}, shapes) is not None) == is_tied

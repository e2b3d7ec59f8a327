"""A product that nothing waits for is made before the next product reads what it reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.execution.apply import Evaluator
from autoshard.execution.by_shards import run_by_shards
from autoshard.execution.products_first import products_first
from autoshard.graph.equation_plan import EquationPlan
from autoshard.trace.rules.leaf import leaf_of
from autoshard.trace.rules.table import table_rule


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
    tied = products_first(jaxpr.eqns, range(len(jaxpr.eqns)), shardings, {"data": 4})
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
    read = {k: {product: EquationPlan(operands=((of_gradient, (l,)),))} for k, l in layouts.items()}
    assert found(jaxpr, read["batch"]) is None
    assert found(jaxpr, read["output"]) == [jaxpr.invars[0]]


@pytest.mark.parametrize(("batch", "is_tied"), [(2**21, False), (2**22, True)])
def test_a_partial_sum_that_takes_less_than_what_ends_with_it_is_made_first(batch, is_tied):
    """Each of 4 devices holds batch x 10 / 4 floats of x and of the gradient: 20 MiB of 2**21, 40 MiB of 2**22. The
    workspace is 32 MiB, the partial sum 96 bytes."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((batch, 4), (batch, 6), (6, 4))]
    jaxpr = jax.make_jaxpr(gradients)(*shapes).jaxpr
    product = next(k for k, e in enumerate(jaxpr.eqns) if e.primitive.name == "dot_general")
    split = (("data",), ())
    read = {product: EquationPlan(operands=((0, (split,)), (1, (split,))), results=((0, ((), ())),))}
    assert found(jaxpr, read) == ([jaxpr.invars[0]] if is_tied else None)


def split_by_rows(batch, inputs, outputs):
    """Gradients of a weight (inputs, outputs), scattered, and of its input, from rows that 4 devices share."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((batch, outputs), (batch, inputs), (inputs, outputs))]
    closed = jax.make_jaxpr(gradients)(*shapes)
    product = next(k for k, e in enumerate(closed.eqns) if e.primitive.name == "dot_general")
    split = (("data",), ())
    wanted = EquationPlan(operands=((0, (split,)), (1, (split,))), results=((0, split),), scatters=(("data", 0),))
    return closed, {product: wanted}


@pytest.mark.parametrize(("outputs", "is_tied"), [(960, False), (961, True)])
def test_a_partial_sum_that_takes_more_than_xla_joins_is_reduced_first(outputs, is_tied):
    """Of a weight (8192, 960) in float32 it takes 30 MiB, though each of four devices keeps a quarter of it."""
    closed, wanted = split_by_rows(64, 8192, outputs)
    assert (found(closed.jaxpr, wanted) is not None) == is_tied


def test_what_is_tied_to_a_sum_that_is_reduced_alone_waits_for_it(monkeypatch):
    """The partial sum of a weight (8, 4) is too large to be joined where nothing is."""
    monkeypatch.setattr("autoshard.execution.products_first.COMBINED_BYTES", 0)
    closed, wanted = split_by_rows(64, 8, 4)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    layouts = [(("data",), ()), (("data",), ()), ((), ())]
    run = jax.jit(lambda *args: Evaluator(mesh, wanted)(closed, args, layouts))
    random = np.random.default_rng(0)
    args = [random.standard_normal(aval.shape, np.float32) for aval in closed.in_avals]
    equations = run.trace(*args).jaxpr.eqns
    (region,) = (e for e in equations if e.primitive.name == "shard_map")
    (barrier,) = (e for e in equations if e.primitive.name == "optimization_barrier")
    assert [e.primitive.name for e in region.params["jaxpr"].eqns] == ["dot_general", "reduce_scatter"]
    assert len(barrier.outvars) == 2 and equations.index(region) < equations.index(barrier)
    for sharded, whole in zip(run(*args), gradients(*args), strict=True):
        np.testing.assert_allclose(sharded, whole, rtol=1e-5, atol=1e-5)


def test_what_is_tied_to_a_partial_sum_does_not_wait_for_the_sum():
    """x (8, 4) and its weight's gradient (8, 6), split by rows: the barrier is in front of the all-reduce."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, gradient = np.arange(32.0, dtype=np.float32).reshape(8, 4), np.ones((8, 6), np.float32)
    (equation,) = jax.make_jaxpr(lambda x, g: jax.lax.dot_general(x, g, (((0,), (0,)), ((), ()))))(x, gradient).eqns
    split = (("data",), ())
    wanted = EquationPlan(operands=((0, (split,)), (1, (split,))), results=((0, ((), ())),))
    rule, rows = table_rule(leaf_of(equation)), jax.sharding.PartitionSpec("data")
    run = jax.jit(lambda *o: run_by_shards(equation, o, rule, wanted, mesh, tied=[(o[1], rows)]))
    names = [e.primitive.name for e in run.trace(x, gradient).jaxpr.eqns[0].params["jaxpr"].eqns]
    assert names == ["dot_general", "optimization_barrier", "psum"]
    of_weight, tied = run(x, gradient)
    np.testing.assert_allclose(of_weight, x.T @ gradient)
    np.testing.assert_array_equal(tied, gradient)

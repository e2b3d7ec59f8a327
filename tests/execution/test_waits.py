"""What waits for a product waits for all of it, or for what each device makes of it."""

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.compiler.ordering import OrderingRules, orderings
from autoshard.execution.apply import Evaluator
from autoshard.execution.by_shards import run_by_shards
from autoshard.graph.equation_plan import EquationPlan
from autoshard.trace.rules.leaf import leaf_of
from autoshard.trace.rules.table import table_rule
from autoshard.trace.trace import trace


def gradients(gradient, x, weight):
    """Of the weight and of x, in `y = x @ weight`, as JAX's backward pass makes them."""
    return jnp.einsum("bi,bo->io", x, gradient), jnp.einsum("bo,io->bi", gradient, weight)


def split_by_rows(batch, inputs, outputs):
    """Gradients of a weight (inputs, outputs), scattered, and of its input, from rows that 4 devices share."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((batch, outputs), (batch, inputs), (inputs, outputs))]
    closed = jax.make_jaxpr(gradients)(*shapes)
    product = next(k for k, e in enumerate(closed.eqns) if e.primitive.name == "dot_general")
    split = (("data",), ())
    wanted = EquationPlan(operands=((0, (split,)), (1, (split,))), results=((0, split),), scatters=(("data", 0),))
    return closed, {product: wanted}


def test_what_is_tied_to_a_sum_that_is_reduced_alone_waits_for_it(monkeypatch):
    """The partial sum of a weight (8, 4) is too large to be joined where nothing is."""
    monkeypatch.setattr("autoshard.compiler.collective_combiner.COMBINED_BYTES", 0)
    closed, wanted = split_by_rows(64, 8, 4)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    layouts = [(("data",), ()), (("data",), ()), ((), ())]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed.in_avals]
    plans = orderings(trace(gradients, shapes).graph, wanted, layouts, mesh.shape, OrderingRules())(None).equations
    run = jax.jit(lambda *args: Evaluator(mesh, plans)(closed, args, layouts))
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


def test_in_a_part_what_waits_for_an_equation_outside_waits_for_the_reader_before_it():
    """Of three products with w, the second has used w up before the third reads it; a part without it has the first."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    args = [np.ones((8, 8), np.float32)] * 4
    program = jax.make_jaxpr(lambda w, x, y, z: (x @ w, y @ w, z @ w))(*args).jaxpr
    read = EquationPlan(operands=((1, (((), ()),)),))
    plans = {0: read, 1: EquationPlan(operands=read.operands, waits=(1,)), 2: read}
    known = lambda given: {v: (x, None) for v, x in zip(program.invars, given, strict=True)}
    for chosen, barriers in (([0, 2], 1), ([1, 2], 1), ([0, 1], 0)):
        wanted = [program.outvars[i] for i in chosen]
        run = lambda *given, c=chosen, w=wanted: Evaluator(mesh, plans).part(program, c, known(given), w)
        names = [e.primitive.name for e in jax.make_jaxpr(run)(*args).eqns]
        products = [k for k, name in enumerate(names) if name == "dot_general"]
        assert names.count("optimization_barrier") == barriers
        assert not barriers or products[0] < names.index("optimization_barrier") < products[1]

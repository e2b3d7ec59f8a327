"""What a copy waits for is tied to it as the equation reads it."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from autoshard.execution.apply import Evaluator
from autoshard.graph.equation_plan import EquationPlan

WHOLE, ROWS, COLUMNS = ((), ()), (("data",), ()), ((), ("data",))


def test_a_copy_waits_for_slices_where_slices_are_read():
    """The first term is gathered when the second one is there: of that, the sum reads columns."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    program = jax.make_jaxpr(lambda a, b: a + b)(shape, shape).jaxpr
    tied_to = {}
    for own in (WHOLE, ROWS):
        wanted = EquationPlan(operands=((0, (WHOLE,)), (1, (COLUMNS,))), delayed=(0,))
        run = Evaluator(mesh, {0: wanted})

        def made(a, b, run=run, own=own):
            known = dict(zip(program.invars, ((a, ROWS), (b, own)), strict=True))
            return run.part(program, [0], known, program.outvars)

        traced = jax.make_jaxpr(made)(shape, shape)
        specs = {
            e.outvars[0]: e.params["sharding"].spec for e in traced.eqns if e.primitive.name == "sharding_constraint"
        }
        (barrier,) = (e for e in traced.eqns if e.primitive.name == "optimization_barrier")
        tied_to[own] = [specs.get(v) for v in barrier.invars]
    assert tied_to == {WHOLE: [None, PartitionSpec(None, "data")], ROWS: [None, None]}


def test_what_is_sent_waits_for_what_is_gathered_first():
    """Of a product, the weight is gathered, and then columns of x are sent as rows; a slice of x waits for nothing."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    program = jax.make_jaxpr(lambda x, w: x @ w)(shape, shape).jaxpr
    tied = {}
    for lies in (COLUMNS, WHOLE):
        wanted = EquationPlan(operands=((0, (ROWS,)), (1, (WHOLE,))), gathered_first=(1,))
        run = Evaluator(mesh, {0: wanted})

        def made(x, w, run=run, lies=lies):
            known = dict(zip(program.invars, ((x, lies), (w, ROWS)), strict=True))
            return run.part(program, [0], known, program.outvars)

        traced = jax.make_jaxpr(made)(shape, shape)
        at = {e.primitive.name: e for e in traced.eqns}
        tied[lies] = len(at["optimization_barrier"].invars) if "optimization_barrier" in at else 0
        x, w = jax.random.normal(jax.random.key(0), (2, 8, 8))
        assert jnp.allclose(jax.jit(made)(x, w)[0], x @ w, rtol=1e-5, atol=1e-5)
    assert tied == {COLUMNS: 2, WHOLE: 0}

"""What a copy waits for is tied to it as the equation reads it."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from autoshard.execution.apply import Evaluator
from autoshard.graph.equation_plan import EquationPlan

WHOLE, ROWS, COLUMNS = ((), ()), (("data",), ()), ((), ("data",))


SHAPE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def planned(function, wanted, lies):
    """A function of one equation, of two operands that lie as told, as its plan wants it."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    program = jax.make_jaxpr(function)(SHAPE, SHAPE).jaxpr
    run = Evaluator(mesh, {0: wanted})

    def made(*operands):
        known = dict(zip(program.invars, zip(operands, lies, strict=True), strict=True))
        return run.part(program, [0], known, program.outvars)

    return made


def test_a_copy_waits_for_slices_where_slices_are_read():
    """The first term is gathered when the second one is there: of that, the sum reads columns."""
    wanted = EquationPlan(operands=((0, (WHOLE,)), (1, (COLUMNS,))), delayed=(0,))
    tied_to = {}
    for own in (WHOLE, ROWS):
        traced = jax.make_jaxpr(planned(lambda a, b: a + b, wanted, (ROWS, own)))(SHAPE, SHAPE)
        specs = {
            e.outvars[0]: e.params["sharding"].spec for e in traced.eqns if e.primitive.name == "sharding_constraint"
        }
        (barrier,) = (e for e in traced.eqns if e.primitive.name == "optimization_barrier")
        tied_to[own] = [specs.get(v) for v in barrier.invars]
    assert tied_to == {WHOLE: [None, PartitionSpec(None, "data")], ROWS: [None, None]}


def test_what_is_sent_waits_for_what_is_gathered_first():
    """Of a product, the weight is gathered, and then columns of x are sent as rows; a slice of x waits for nothing."""
    wanted = EquationPlan(operands=((0, (ROWS,)), (1, (WHOLE,))), gathered_first=(1,))
    tied = {}
    for lies in (COLUMNS, WHOLE):
        made = planned(lambda x, w: x @ w, wanted, (lies, ROWS))
        at = {e.primitive.name: e for e in jax.make_jaxpr(made)(SHAPE, SHAPE).eqns}
        tied[lies] = len(at["optimization_barrier"].invars) if "optimization_barrier" in at else 0
        x, w = jax.random.normal(jax.random.key(0), (2, 8, 8))
        assert jnp.allclose(jax.jit(made)(x, w)[0], x @ w, rtol=1e-5, atol=1e-5)
    assert tied == {COLUMNS: 2, WHOLE: 0}

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

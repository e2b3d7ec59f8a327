"""What a copy waits for is tied to it as the equation reads it."""

import dataclasses

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
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


@pytest.mark.parametrize("narrows", [False, True])
def test_a_copy_is_gathered_when_the_copy_before_it_is_there(narrows):
    """The second layer's weight is held back by the first one's copy, which a cast to bfloat16 may be."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def layers(a, b, x):
        return x @ a.astype(jnp.bfloat16).astype(jnp.float32) @ b  # equations 0, 1; 2; 3

    closed = jax.make_jaxpr(layers)(SHAPE, SHAPE, SHAPE)
    assert [e.primitive.name for e in closed.jaxpr.eqns] == [*["convert_element_type"] * 2, *["dot_general"] * 2]
    gathers, rows = EquationPlan(operands=((0, (ROWS,)), (1, (WHOLE,)))), EquationPlan(results=((0, ROWS),))
    if narrows:
        cast = EquationPlan(((0, (WHOLE,)),), ((0, WHOLE),), narrows_first=True, gathers_next=((0, 3, 1),))
        plans = {0: cast, 1: EquationPlan(results=((0, WHOLE),)), 2: gathers, 3: gathers}
    else:
        plans = {0: rows, 1: rows, 2: dataclasses.replace(gathers, gathers_next=((1, 1, 1),)), 3: gathers}
    run = lambda *own: Evaluator(mesh, plans)(closed, own, [ROWS] * 3)[0]
    a, b, x = jnp.asarray(np.random.default_rng(0).integers(-3, 4, (3, 8, 8)), jnp.float32)
    np.testing.assert_array_equal(jax.jit(run)(a, b, x), layers(a, b, x))
    equations = jax.make_jaxpr(run)(a, b, x).eqns
    (barrier,) = (e for e in equations if e.primitive.name == "optimization_barrier")
    copy, waiting = barrier.invars
    specs = {e.outvars[0]: e.params["sharding"].spec for e in equations if e.primitive.name == "sharding_constraint"}
    assert specs[copy] == PartitionSpec() and copy.aval.dtype == (jnp.bfloat16 if narrows else jnp.float32)
    assert waiting is not None and specs.get(waiting) != PartitionSpec()
    read = {v: e for e in equations for v in e.invars if not isinstance(v, jax.extend.core.Literal)}
    assert {read[v].primitive.name for v in barrier.outvars} == {"sharding_constraint"}

"""A function whose trace is kept, for all that need one."""

import jax
import jax.numpy as jnp

import autoshard
from autoshard.trace.trace import TracedOnce, trace


def counted(calls: list):
    def product(x, y):
        """Multiplies."""
        calls.append(1)
        return jnp.sum(x @ y)

    return TracedOnce(product)


def shapes(width: int, dtype=jnp.float32) -> list:
    return [jax.ShapeDtypeStruct((width, width), dtype)] * 2


def test_planning_checking_and_running_need_one_trace():
    calls: list = []
    fn = counted(calls)
    plan = autoshard.plan(fn, *shapes(8))
    assert isinstance(plan, autoshard.Plan)
    plan.check(fn, shapes(8))
    step = plan.jit(fn)
    step.prepare(*shapes(8))
    assert len(calls) == 1
    x = jnp.eye(8)
    assert float(step(x, x)) == 8 and len(calls) == 1


def test_other_arguments_have_a_trace_of_their_own():
    calls: list = []
    fn = counted(calls)
    first = trace(fn, shapes(4))
    assert trace(fn, shapes(4)) is first and trace(fn, [jnp.ones((4, 4))] * 2) is first
    others = [trace(fn, shapes(5)), trace(fn, shapes(4, jnp.bfloat16)), trace(fn, shapes(4), (0,))]
    assert len({id(t) for t in [first, *others]}) == 4 == len(calls)
    assert others[2].graph.arguments[0].donated and not first.graph.arguments[0].donated


def test_it_is_called_and_named_as_the_function_is():
    fn = counted([])
    assert fn.__name__ == "product" and fn.__doc__ == "Multiplies."
    assert float(jax.jit(fn)(jnp.eye(3), jnp.eye(3))) == 3
    assert [a.name for a in trace(fn, shapes(4)).graph.arguments] == ["x", "y"]

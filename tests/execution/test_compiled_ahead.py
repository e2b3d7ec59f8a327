"""A planned function that is compiled before it is called."""

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

import autoshard


def step(state, x):
    return {"w": state["w"] + x.T @ x}, jnp.sum(x)


def test_the_first_call_compiles_nothing_and_gives_the_same():
    shapes = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}, jax.ShapeDtypeStruct((16, 8), jnp.float32)
    plan = autoshard.plan(step, *shapes, donate_argnums=0)
    assert isinstance(plan, autoshard.Plan)
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    x = jnp.arange(128.0).reshape(16, 8)
    ahead, plain = plan.jit(step), plan.jit(step)
    make = lambda: jax.device_put({"w": jnp.ones((8, 8))}, ahead.in_shardings(shapes)[0])
    states = make(), make()
    placed = jax.device_put(x, ahead.in_shardings(shapes)[1])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        ahead.compile(*shapes)
        assert len(compiled) == 1
        ahead.compile(*shapes)
        new, total = ahead(states[0], placed)
        assert len(compiled) == 1
        expected, expected_total = plain(states[1], placed)
        assert len(compiled) == 2
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    np.testing.assert_array_equal(new["w"], expected["w"])
    assert float(total) == float(expected_total)
    assert states[0]["w"].is_deleted()

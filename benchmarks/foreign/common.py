"""What the programs share: abstract arrays, and the optimisers that people write by hand."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Step = Callable[[Any, Any], tuple[Any, jax.Array]]
"""(state, batch) -> (new state, loss)."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A training step and its abstract arguments: the state, which is donated, and a batch."""

    step: Step
    state: Any
    batch: Any


def arrays(shapes: Any, dtype: Any = jnp.float32) -> Any:
    """Abstract arrays in the structure of `shapes`, a pytree of tuples of ints."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=lambda node: isinstance(node, tuple)
    )


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """Abstract tokens, labels or indices."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def adam_state(params: Any) -> dict[str, Any]:
    """The state of `adam`."""
    return {"params": params, "m": params, "v": params, "count": jax.ShapeDtypeStruct((), jnp.int32)}


def adam(state: dict[str, Any], grads: Any, rate: float = 1e-3, b1: float = 0.9, b2: float = 0.95) -> dict[str, Any]:
    """Adam (Kingma and Ba, 2015, algorithm 1) as plain tree maps."""
    count = state["count"] + 1
    m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state["m"], grads)
    v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state["v"], grads)
    first, second = 1 - b1**count, 1 - b2**count
    update = lambda p, m, v: p - rate * (m / first) / (jnp.sqrt(v / second) + 1e-8)
    return {"params": jax.tree.map(update, state["params"], m, v), "m": m, "v": v, "count": count}


def adam_step(loss: Callable[[Any, Any], jax.Array]) -> Step:
    """A step of `adam` on `loss(params, batch)`."""

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return adam(state, grads), value

    return step


def sgd_step(loss: Callable[[Any, Any], jax.Array], rate: float = 0.1) -> Step:
    """A step of gradient descent; the state is the parameters alone."""

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), value

    return step


def momentum_step(loss: Callable[[Any, Any], jax.Array], rate: float = 0.1, decay: float = 0.9) -> Step:
    """A step with heavy-ball momentum and weight decay; the state is (parameters, velocity)."""

    def step(state, batch):
        params, velocity = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        velocity = jax.tree.map(lambda v, g, p: decay * v + g + 1e-4 * p, velocity, grads, params)
        return (jax.tree.map(lambda p, v: p - rate * v, params, velocity), velocity), value

    return step


def optax_step(loss: Callable[[Any, Any], jax.Array], optimizer: Any) -> Step:
    """A step of an optax optimiser; the state is (parameters, the optimiser's state)."""
    import optax

    def step(state, batch):
        params, inner = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, inner = optimizer.update(grads, inner, params)
        return (optax.apply_updates(params, updates), inner), value

    return step


def optax_state(params: Any, optimizer: Any) -> tuple[Any, Any]:
    """The state of `optax_step`."""
    return params, jax.eval_shape(optimizer.init, params)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Over the last dimension, in float32."""
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return (y * scale + bias).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Over the last dimension, in float32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)

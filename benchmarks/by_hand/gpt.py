"""A GPT in plain JAX, unrolled, with places for the constraints and gathers that a strategy puts into it.

Products in bfloat16, parameters and Adam's state in float32, vocabulary tied; 8 layers of width 4,096 by default.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from autoshard import TrainStep

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model and of its batch; `fused_attention`: whether cuDNN computes attention, in kernels of its own."""

    num_layers: int = 8
    width: int = 4096
    inner_width: int = 16384
    num_heads: int = 32
    vocabulary: int = 32768
    batch: int = 16
    length: int = 2048
    fused_attention: bool = False


def _cast(_: str, w: jax.Array, reads: int) -> tuple[jax.Array, ...]:
    return (w.astype(jnp.bfloat16),) * reads


def _same(x: jax.Array) -> jax.Array:
    return x


@dataclasses.dataclass(frozen=True)
class Interior:
    """What a strategy does inside the model; by default nothing.

    Attributes:
      weights: (path, parameter, reads) -> the parameter in bfloat16, once for each place that reads it.
      residual: The stream between blocks (batch, length, width). block_input: What a block reads, of the same shape.
      heads: Queries, keys, values and what was read (batch, length, heads, head width). scores: (batch, heads, length,
        length). inner: Within the perceptron (batch, length, inner width). logits: (batch, length, vocabulary).
      layer: Wraps a layer, such as in `jax.checkpoint`.
    """

    weights: Callable[[str, jax.Array, int], tuple[jax.Array, ...]] = _cast
    residual: Callable[[jax.Array], jax.Array] = _same
    block_input: Callable[[jax.Array], jax.Array] = _same
    heads: Callable[[jax.Array], jax.Array] = _same
    scores: Callable[[jax.Array], jax.Array] = _same
    inner: Callable[[jax.Array], jax.Array] = _same
    logits: Callable[[jax.Array], jax.Array] = _same
    layer: Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]] = lambda layer: layer


def arguments(sizes: Sizes) -> tuple[Params, jax.ShapeDtypeStruct]:
    """The training state and a batch of tokens, by shape."""
    d, f, h = sizes.width, sizes.inner_width, sizes.num_heads
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    layer = lambda: {
        "norm1": shape(d),
        "norm2": shape(d),
        "qkv": shape(d, 3, h, d // h),
        "o": shape(h, d // h, d),
        "up": shape(d, f),
        "down": shape(f, d),
    }
    params = {
        "embed": shape(sizes.vocabulary, d),
        "position": shape(sizes.length, d),
        "norm": shape(d),
        "layers": [layer() for _ in range(sizes.num_layers)],
    }
    state = {"params": params, "m": params, "v": params, "count": jax.ShapeDtypeStruct((), jnp.int32)}
    return state, jax.ShapeDtypeStruct((sizes.batch, sizes.length), jnp.int32)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True)
    variance = ((y - mean) ** 2).mean(-1, keepdims=True)
    return ((y - mean) * jax.lax.rsqrt(variance + 1e-5) * scale).astype(jnp.bfloat16)


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, interior: Interior) -> jax.Array:
    """What each position reads of itself and of those before it: (batch, length, heads, head width)."""
    mask = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))
    scores = interior.scores(jnp.einsum("bqhe,bkhe->bhqk", q, k)) / q.shape[-1] ** 0.5
    scores = jnp.where(mask, scores.astype(jnp.float32), -1e30)
    return jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores, -1).astype(jnp.bfloat16), v)


def loss(
    params: Params, tokens: jax.Array, interior: Interior = Interior(), fused_attention: bool = False
) -> jax.Array:
    """Cross-entropy of the next token."""
    weight = lambda name, w: interior.weights(f"['{name}']", w, 1)[0]
    rows, columns = interior.weights("['embed']", params["embed"], 2)

    def layer(x: jax.Array, p: Params) -> jax.Array:
        h = interior.block_input(_norm(x, p["norm1"]))
        q, k, v = map(interior.heads, jnp.einsum("bsd,dche->cbshe", h, weight("qkv", p["qkv"])))
        if fused_attention:
            read = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        else:
            read = _attention(q, k, v, interior)
        read = interior.heads(read)
        x = interior.residual(x + jnp.einsum("bqhe,hed->bqd", read, weight("o", p["o"])))
        h = interior.block_input(_norm(x, p["norm2"]))
        h = jax.nn.gelu(interior.inner(h @ weight("up", p["up"])))
        return interior.residual(x + h @ weight("down", p["down"]))

    x = interior.residual(jnp.take(rows, tokens, axis=0) + params["position"].astype(jnp.bfloat16))
    for p in params["layers"]:
        x = interior.layer(layer)(x, p)
    x = interior.block_input(_norm(x, params["norm"]))
    logits = interior.logits(jnp.einsum("bsd,vd->bsv", x, columns)).astype(jnp.float32)
    targets = jnp.roll(tokens, -1, axis=1)
    return -(jax.nn.one_hot(targets, logits.shape[-1]) * jax.nn.log_softmax(logits)).sum(-1).mean()


def step(
    state: Params, tokens: jax.Array, interior: Interior = Interior(), fused_attention: bool = False
) -> tuple[Params, jax.Array]:
    """A step of Adam."""
    value, grads = jax.value_and_grad(loss)(state["params"], tokens, interior, fused_attention)
    updates, (m, v) = _updates(grads, (state["m"], state["v"]))
    params = jax.tree.map(jnp.add, state["params"], updates)
    return {"params": params, "m": m, "v": v, "count": state["count"] + 1}, value


def _updates(grads: Params, moments: tuple[Params, Params], _: Params | None = None) -> tuple[Params, Any]:
    """Adam's, without its correction of the first steps."""
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, moments[1], grads)
    return jax.tree.map(lambda m, v: -1e-4 * m / (jnp.sqrt(v) + 1e-8), m, v), (m, v)


def train_step(fused_attention: bool = False) -> TrainStep:
    """The same step as a loss and an optimizer, so that a plan may choose what it recomputes."""
    adam = optax.GradientTransformation(lambda params: (params, params), _updates)
    own_loss = lambda params, tokens, key: (loss(params, tokens, fused_attention=fused_attention), None)
    return TrainStep(own_loss, adam)


def train_arguments(sizes: Sizes) -> tuple[Any, jax.ShapeDtypeStruct]:
    """The training state of `train_step` and a batch of tokens, by shape."""
    state, tokens = arguments(sizes)
    return jax.eval_shape(train_step().init, state["params"]), tokens

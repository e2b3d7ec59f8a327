"""Programs in Flax: Linen with its own attention, scan and batch normalisation, and NNX by split and merge."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

from foreign.common import Subject, arrays, ints, optax_state, optax_step

BF16 = jnp.bfloat16


class _Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x, _=None):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        h = nn.LayerNorm(dtype=BF16)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads, dtype=BF16)(h, h, mask=mask)
        h = nn.Dense(4 * x.shape[-1], dtype=BF16)(nn.LayerNorm(dtype=BF16)(x))
        return x + nn.Dense(x.shape[-1], dtype=BF16)(nn.gelu(h)), None


class _Decoder(nn.Module):
    """A decoder whose embedding also makes the logits (`attend`); its layers scanned and checkpointed, or not."""

    num_layers: int
    is_scanned: bool
    d: int = 2048
    heads: int = 16
    vocabulary: int = 32000

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocabulary, self.d, dtype=BF16)
        x = embed(tokens)
        x = x + self.param("position", nn.initializers.normal(), (tokens.shape[1], self.d)).astype(BF16)
        if self.is_scanned:
            layers = nn.scan(nn.remat(_Block), {"params": 0}, split_rngs={"params": True}, length=self.num_layers)
            x, _ = layers(self.heads)(x, None)
        else:
            for _ in range(self.num_layers):
                x, _ = _Block(self.heads)(x)
        return embed.attend(nn.LayerNorm(dtype=BF16)(x)).astype(jnp.float32)


def _decoder(num_layers: int, is_scanned: bool, optimizer: Any) -> Subject:
    model, tokens = _Decoder(num_layers, is_scanned), ints(32, 1024)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params, tokens):
        logits = model.apply(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    return Subject(optax_step(loss, optimizer), optax_state(params, optimizer), tokens)


def linen_decoder() -> Subject:
    """Separate layers; AdamW."""
    return _decoder(2, False, optax.adamw(1e-4))


def linen_scanned() -> Subject:
    """Scanned, checkpointed layers; clipped AdamW behind a warm-up."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 100, 10_000)
    return _decoder(6, True, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate)))


class _ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (128, 256, 512):
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False, dtype=BF16)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=BF16)(x))
            y = nn.Conv(width, (3, 3), use_bias=False, dtype=BF16)(x)
            y = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=BF16)(y))
            x = x + nn.Conv(width, (1, 1), dtype=BF16)(y)
        return nn.Dense(1000)(x.astype(jnp.float32).mean((1, 2)))


def linen_conv_net() -> Subject:
    """Batch normalisation, whose running figures are part of the state; SGD with Nesterov momentum."""
    model, optimizer = _ConvNet(), optax.sgd(0.1, momentum=0.9, nesterov=True)
    batch = {"image": arrays((256, 128, 128, 3)), "label": ints(256)}
    variables = jax.eval_shape(model.init, jax.random.key(0), batch["image"])

    def step(state, batch):
        def loss(params):
            held = {"params": params, "batch_stats": state["stats"]}
            logits, new = model.apply(held, batch["image"], mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), new["batch_stats"]

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, inner = optimizer.update(grads, state["inner"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "inner": inner, "stats": stats}, value

    params = variables["params"]
    inner = jax.eval_shape(optimizer.init, params)
    return Subject(step, {"params": params, "inner": inner, "stats": variables["batch_stats"]}, batch)


class _Encoder(nnx.Module):
    """Self-attention and a feed-forward network by NNX's own layers."""

    def __init__(self, d: int, heads: int, rngs: nnx.Rngs):
        kinds = {"dtype": BF16, "rngs": rngs}
        self.norm1, self.norm2 = nnx.LayerNorm(d, **kinds), nnx.LayerNorm(d, **kinds)
        self.attention = nnx.MultiHeadAttention(num_heads=heads, in_features=d, decode=False, **kinds)
        self.up, self.down = nnx.Linear(d, 4 * d, **kinds), nnx.Linear(4 * d, d, **kinds)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class _Classifier(nnx.Module):
    def __init__(self, num_layers: int, rngs: nnx.Rngs, d: int = 1024, vocabulary: int = 32000):
        self.embed = nnx.Embed(vocabulary, d, dtype=BF16, rngs=rngs)
        self.layers = nnx.List([_Encoder(d, 16, rngs) for _ in range(num_layers)])
        self.head = nnx.Linear(d, 128, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(axis=1).astype(jnp.float32))


def nnx_classifier() -> Subject:
    """Parameters by `nnx.split`, the model by `nnx.merge` in the loss; AdamW."""
    graph, params = nnx.split(nnx.eval_shape(lambda: _Classifier(2, nnx.Rngs(0))))
    optimizer = optax.adamw(1e-4)

    def loss(params, batch):
        logits = nnx.merge(graph, params)(batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    state = optax_state(params, optimizer)
    return Subject(optax_step(loss, optimizer), state, {"tokens": ints(128, 512), "label": ints(128)})


class _Perceptron(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, d: int = 4096):
        self.first = nnx.Linear(1024, d, rngs=rngs)
        self.hidden = nnx.List([nnx.Linear(d, d, rngs=rngs) for _ in range(3)])
        self.norm = nnx.LayerNorm(d, rngs=rngs)
        self.last = nnx.Linear(d, 1024, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for layer in self.hidden:
            x = x + nnx.silu(layer(x))
        return self.last(self.norm(x))


def nnx_perceptron() -> Subject:
    """Residual dense layers in float32 by NNX; SGD with momentum, gradients accumulated over two calls."""
    graph, params = nnx.split(nnx.eval_shape(lambda: _Perceptron(nnx.Rngs(0))))
    optimizer = optax.chain(optax.add_decayed_weights(1e-4), optax.trace(decay=0.9), optax.scale(-1e-2))

    def loss(params, batch):
        return jnp.mean(optax.huber_loss(nnx.merge(graph, params)(batch["x"]), batch["y"]))

    batch = {"x": arrays((16384, 1024)), "y": arrays((16384, 1024))}
    return Subject(optax_step(loss, optimizer), optax_state(params, optimizer), batch)

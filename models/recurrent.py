"""A language model of gated linear recurrences in Flax NNX, run by a scan over time.

The recurrence is the real-gated linear recurrent unit of Griffin (De et al. 2024, arXiv:2402.19427, section 2.4):
h_t = a_t * h_(t-1) + sqrt(1 - a_t^2) * (i_t * x_t), with a_t = a ** (8 r_t), where r and i are gates.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from .layers import INIT_STDDEV, GatedMLP, repeated, residual_stddev, types_of
from .losses import cross_entropy
from .objective import Batch, Metrics, Objective, nnx_objective

GATE_POWER = 8.0
"""The constant c of the paper, section 2.4."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Sizes and options of a recurrent language model.

    Attributes:
        vocab_size: number of token ids.
        context_length: length of a training sequence, in tokens.
        num_layers: number of blocks.
        embed_dim: width of the residual stream.
        state_dim: features of the recurrent state.
        hidden_dim: width of the MLP's hidden layer.
        dtype: type of activations and of matrix products; the recurrence is in float32.
        param_dtype: type in which parameters are stored.
        remat: keep only each block's input for the backward pass and compute the rest of the block again.
    """

    vocab_size: int
    context_length: int
    num_layers: int
    embed_dim: int
    state_dim: int
    hidden_dim: int
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: bool = False


def linear_recurrence(decay: jax.Array, inputs: jax.Array) -> jax.Array:
    """h_t = decay_t * h_(t-1) + inputs_t from h = 0.

    Args:
        decay, inputs: (batch, time, features).

    Returns:
        All states, (batch, time, features).
    """

    def step(state: jax.Array, at_time: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        decay, added = at_time
        state = decay * state + added
        return state, state

    by_time = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (decay, inputs))
    _, states = jax.lax.scan(step, jnp.zeros_like(inputs[:, 0]), by_time)
    return jnp.swapaxes(states, 0, 1)


class GatedRecurrence(nnx.Module):
    """Two branches of the input, one through the recurrence and one through a GELU, multiplied."""

    def __init__(self, config: RecurrentConfig, *, rngs: nnx.Rngs):
        types, width, state = types_of(config), config.embed_dim, config.state_dim
        init = nnx.initializers.normal(INIT_STDDEV)
        linear = lambda m, n, init: nnx.Linear(m, n, kernel_init=init, rngs=rngs, **types)
        self.config = config
        self.branch, self.gate = linear(width, state, init), linear(width, state, init)
        self.recurrence_gate, self.input_gate = linear(state, state, init), linear(state, state, init)
        # a = sigmoid(decay) lies between 0.9 and 0.999 to the power of 1 / GATE_POWER at the start, as in the paper.
        largest, smallest = (power ** (1 / GATE_POWER) for power in (0.999, 0.9))
        start = jax.random.uniform(rngs.params(), (state,), config.param_dtype, smallest, largest)
        self.decay = nnx.Param(jnp.log(start / (1 - start)))
        self.output = linear(state, width, nnx.initializers.normal(residual_stddev(config.num_layers)))

    def __call__(self, x: jax.Array) -> jax.Array:
        branch = self.branch(x)
        recurrence_gate = jax.nn.sigmoid(self.recurrence_gate(branch).astype(jnp.float32))
        input_gate = jax.nn.sigmoid(self.input_gate(branch).astype(jnp.float32))
        log_decay = GATE_POWER * recurrence_gate * jax.nn.log_sigmoid(self.decay.astype(jnp.float32))
        inputs = jnp.sqrt(-jnp.expm1(2 * log_decay)) * input_gate * branch.astype(jnp.float32)
        states = linear_recurrence(jnp.exp(log_decay), inputs).astype(self.config.dtype)
        return self.output(states * jax.nn.gelu(self.gate(x)))


class Block(nnx.Module):
    """Gated recurrence and gated MLP, each behind an RMS norm and added to the residual stream."""

    def __init__(self, config: RecurrentConfig, *, rngs: nnx.Rngs):
        types, width = types_of(config), config.embed_dim
        self.recurrence_norm = nnx.RMSNorm(width, rngs=rngs, **types)
        self.recurrence = GatedRecurrence(config, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs, **types)
        self.mlp = GatedMLP(
            width,
            config.hidden_dim,
            activation=jax.nn.gelu,
            down_stddev=residual_stddev(config.num_layers),
            rngs=rngs,
            **types,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.recurrence(self.recurrence_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Recurrent(nnx.Module):
    """Token embedding, blocks, final norm, logits by the token embedding."""

    def __init__(self, config: RecurrentConfig, *, rngs: nnx.Rngs):
        types, init = types_of(config), nnx.initializers.normal(INIT_STDDEV)
        self.config = config
        self.token_embed = nnx.Embed(config.vocab_size, config.embed_dim, embedding_init=init, rngs=rngs, **types)
        self.blocks = repeated(lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs)
        self.final_norm = nnx.RMSNorm(config.embed_dim, rngs=rngs, **types)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits (batch, time, vocab_size) of the token that follows each of int32 (batch, time)."""
        x = self.token_embed(tokens)
        run_block = nnx.remat(Block.__call__) if self.config.remat else Block.__call__
        for block in self.blocks:
            x = run_block(block, x)
        return self.token_embed.attend(self.final_norm(x))


def objective(config: RecurrentConfig) -> Objective:
    """Prediction of the next token; the batch is `inputs` and `targets`, int32 (batch, time)."""

    def loss(model: Recurrent, batch: Batch, _: jax.Array | None) -> tuple[jax.Array, Metrics]:
        return cross_entropy(model(batch["inputs"]), batch["targets"]), {}

    return nnx_objective(lambda rngs: Recurrent(config, rngs=rngs), loss)


def _at_scale(**sizes: Any) -> RecurrentConfig:
    """A model at scale: bfloat16 compute, float32 parameters, blocks recomputed in the backward pass."""
    return RecurrentConfig(vocab_size=51_200, context_length=2048, dtype=jnp.bfloat16, remat=True, **sizes)


PRESETS: Mapping[str, RecurrentConfig] = MappingProxyType(
    {
        "tiny": RecurrentConfig(
            vocab_size=256, context_length=64, num_layers=2, embed_dim=64, state_dim=64, hidden_dim=192
        ),
        "1b": _at_scale(num_layers=24, embed_dim=2048, state_dim=2048, hidden_dim=6144),
        "7b": _at_scale(num_layers=32, embed_dim=4096, state_dim=4096, hidden_dim=12_288),
    }
)
"""Sizes by name, our own, with the paper's MLPs of three times the width. `tiny` reads bytes, one token each."""

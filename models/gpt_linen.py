"""The GPT of `gpt.py` in Flax Linen, with its layers unrolled or rolled into one `nn.scan`.

Parameters bear the same names as in the NNX model. Unrolled, layer i is the subtree `block_<i>`; scanned, there is one
subtree `blocks` whose arrays have a leading axis of length num_layers.
"""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from .gpt import GPTConfig
from .layers import INIT_STDDEV, causal_attention
from .losses import cross_entropy
from .objective import Batch, Metrics, Objective, linen_objective


@dataclasses.dataclass(frozen=True, slots=True)
class LinenGPTConfig(GPTConfig):
    """A `GPTConfig` for the Linen model.

    Attributes:
        scan_layers: trace one block and loop over it, instead of tracing every block.
    """

    scan_layers: bool = False


class Attention(nn.Module):
    """Causal self-attention with separate query, key and value projections."""

    config: LinenGPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        heads = (config.num_heads, config.head_dim)
        types = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        init = nn.initializers.normal(INIT_STDDEV)
        query = nn.DenseGeneral(heads, kernel_init=init, name="query", **types)(x)
        key = nn.DenseGeneral(heads, kernel_init=init, name="key", **types)(x)
        value = nn.DenseGeneral(heads, kernel_init=init, name="value", **types)(x)
        return nn.DenseGeneral(
            config.embed_dim,
            axis=(-2, -1),
            kernel_init=nn.initializers.normal(config.residual_stddev),
            name="output",
            **types,
        )(causal_attention(query, key, value))


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    config: LinenGPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        types = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        up_init, down_init = nn.initializers.normal(INIT_STDDEV), nn.initializers.normal(config.residual_stddev)
        hidden = nn.Dense(config.mlp_ratio * config.embed_dim, kernel_init=up_init, name="up", **types)(x)
        return nn.Dense(config.embed_dim, kernel_init=down_init, name="down", **types)(jax.nn.gelu(hidden))


class Block(nn.Module):
    """One decoder block: attention and MLP, each behind a layer norm and added to the residual stream."""

    config: LinenGPTConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        types = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        drop = nn.Dropout(config.dropout_rate, deterministic=self.deterministic)
        attended = Attention(config, name="attention")(nn.LayerNorm(name="attention_norm", **types)(x))
        x = x + drop(attended)
        return x + drop(MLP(config, name="mlp")(nn.LayerNorm(name="mlp_norm", **types)(x)))


class GPT(nn.Module):
    """The decoder: token and position embeddings, blocks, final norm, logits."""

    config: LinenGPTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, deterministic: bool = True) -> jax.Array:
        """Logits of the token that follows each position.

        Args:
            tokens: int32 (batch, sequence), with sequence <= `context_length`.
            deterministic: no dropout; otherwise `apply` needs `rngs={"dropout": key}`.

        Returns:
            (batch, sequence, vocab_size) in `config.dtype`.
        """
        config = self.config
        types = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        init = nn.initializers.normal(INIT_STDDEV)
        token_embed = nn.Embed(config.vocab_size, config.embed_dim, embedding_init=init, name="token_embed", **types)
        positions = self.param("position_embed", init, (config.context_length, config.embed_dim), config.param_dtype)
        x = token_embed(tokens) + positions[: tokens.shape[1]].astype(config.dtype)
        x = self._run_blocks(x, deterministic)
        x = nn.LayerNorm(name="final_norm", **types)(x)
        if config.tie_embeddings:
            return token_embed.attend(x)
        return nn.Dense(config.vocab_size, use_bias=False, kernel_init=init, name="head", **types)(x)

    def _run_blocks(self, x: jax.Array, deterministic: bool) -> jax.Array:
        config = self.config
        # A scan body cannot be merged with its own recomputation, so the guard against that is not needed there.
        block_class = nn.remat(Block, prevent_cse=not config.scan_layers) if config.remat else Block
        if not config.scan_layers:
            for layer in range(config.num_layers):
                x = block_class(config, deterministic, name=f"block_{layer}")(x)
            return x
        scanned = nn.scan(
            lambda block, carry, _: (block(carry), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=config.num_layers,
        )
        x, _ = scanned(block_class(config, deterministic, name="blocks"), x, None)
        return x


def objective(config: LinenGPTConfig) -> Objective:
    """Prediction of the next token; the batch is `inputs` and `targets`, int32 (batch, sequence)."""

    def loss(apply: Callable[..., jax.Array], batch: Batch, dropout_key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        rngs = None if dropout_key is None else {"dropout": dropout_key}
        logits = apply(batch["inputs"], deterministic=dropout_key is None, rngs=rngs)
        return cross_entropy(logits, batch["targets"]), {}

    example = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return linen_objective(GPT(config), example, loss, config.dropout_rate > 0)

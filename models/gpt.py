"""A GPT-style decoder in Flax NNX: pre-layer-norm blocks, learned positions, multi-head causal attention, GELU MLP.

The model carries no sharding annotation, no device and no mesh. Heads keep an axis of their own from the projections
to the output, (batch, sequence, heads, head_dim), so that a split over heads needs no reshape.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from .layers import INIT_STDDEV, MLP, Attention, Cache, LayerCache, repeated, residual_stddev, types_of
from .losses import cross_entropy
from .objective import Batch, Metrics, Objective, nnx_objective


@dataclasses.dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes and options of a GPT.

    Attributes:
        vocab_size: number of token ids, and of rows in the token embedding.
        context_length: longest sequence, in tokens.
        num_layers: number of decoder blocks.
        num_heads: attention heads per block; must divide `embed_dim`.
        embed_dim: width of the residual stream.
        mlp_ratio: width of the MLP's hidden layer divided by `embed_dim`.
        dropout_rate: share of activations dropped in training; 0 leaves all random operations out of the trace.
        tie_embeddings: use the token embedding as the output projection.
        dtype: type of activations and of matrix products.
        param_dtype: type in which parameters are stored.
        remat: keep only each block's input for the backward pass and compute the rest of the block again.
        fused_attention: let cuDNN's kernels compute attention: on GPUs, where `dtype` has 16 bits.
    """

    vocab_size: int
    context_length: int
    num_layers: int
    num_heads: int
    embed_dim: int
    mlp_ratio: int = 4
    dropout_rate: float = 0.0
    tie_embeddings: bool = True
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: bool = False
    fused_attention: bool = False

    def __post_init__(self) -> None:
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"`num_heads` must divide `embed_dim`; received num_heads={self.num_heads}, embed_dim={self.embed_dim}."
            )

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.embed_dim // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values: every query head has its own."""
        return self.num_heads

    @property
    def residual_stddev(self) -> float:
        """Initial scale of the layers that write to the residual stream, so that its variance is free of depth."""
        return residual_stddev(self.num_layers)


class Block(nnx.Module):
    """One decoder block: attention and MLP, each behind a layer norm and added to the residual stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        types, width, stddev = types_of(config), config.embed_dim, config.residual_stddev
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs, **types)
        self.attention = Attention(
            width,
            (config.num_heads,),
            config.head_dim,
            output_stddev=stddev,
            fused=config.fused_attention,
            rngs=rngs,
            **types,
        )
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs, **types)
        self.mlp = MLP(width, config.mlp_ratio * width, down_stddev=stddev, rngs=rngs, **types)
        self.dropout = nnx.Dropout(config.dropout_rate)

    def __call__(self, x: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        attention_key, mlp_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        attended = self.attention.causal(self.attention_norm(x))
        x = x + self._drop(attended, attention_key)
        return x + self._drop(self.mlp(self.mlp_norm(x)), mlp_key)

    def extend(self, x: jax.Array, cache: LayerCache, start: jax.Array) -> tuple[jax.Array, LayerCache]:
        """The block without dropout for new positions, behind `start` others in the cache."""
        attended, cache = self.attention.extend(self.attention_norm(x), cache, start)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache

    def _drop(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return x if key is None else self.dropout(x, rngs=key)


class GPT(nnx.Module):
    """The decoder: token and position embeddings, blocks, final norm, logits."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        types = types_of(config)
        init = nnx.initializers.normal(INIT_STDDEV)
        self.config = config
        self.token_embed = nnx.Embed(config.vocab_size, config.embed_dim, embedding_init=init, rngs=rngs, **types)
        self.position_embed = nnx.Param(
            init(rngs.params(), (config.context_length, config.embed_dim), config.param_dtype)
        )
        self.blocks = repeated(lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs)
        self.final_norm = nnx.LayerNorm(config.embed_dim, rngs=rngs, **types)
        if not config.tie_embeddings:
            self.head = nnx.Linear(
                config.embed_dim, config.vocab_size, use_bias=False, kernel_init=init, rngs=rngs, **types
            )

    def __call__(self, tokens: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """Logits of the token that follows each position.

        Args:
            tokens: int32 (batch, sequence), with sequence <= `context_length`.
            dropout_key: key of the dropout masks, or None for no dropout.

        Returns:
            (batch, sequence, vocab_size) in `config.dtype`.
        """
        x = self.token_embed(tokens) + self.position_embed[: tokens.shape[1]].astype(self.config.dtype)
        run_block = nnx.remat(Block.__call__) if self.config.remat else Block.__call__
        for layer, block in enumerate(self.blocks):
            x = run_block(block, x, None if dropout_key is None else jax.random.fold_in(dropout_key, layer))
        return self._logits(x)

    def extend(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Logits for tokens that follow those in the cache, and the cache with them added; see `inference.py`."""
        positions = jax.lax.dynamic_slice_in_dim(self.position_embed[...], cache.length, tokens.shape[1])
        x = self.token_embed(tokens) + positions.astype(self.config.dtype)
        layers = []
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x, layer = block.extend(x, layer, cache.length)
            layers.append(layer)
        return self._logits(x), Cache(tuple(layers), cache.length + tokens.shape[1])

    def _logits(self, x: jax.Array) -> jax.Array:
        x = self.final_norm(x)
        return self.token_embed.attend(x) if self.config.tie_embeddings else self.head(x)


def objective(config: GPTConfig) -> Objective:
    """Prediction of the next token; the batch is `inputs` and `targets`, int32 (batch, sequence)."""

    def loss(model: GPT, batch: Batch, dropout_key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        return cross_entropy(model(batch["inputs"], dropout_key), batch["targets"]), {}

    return nnx_objective(lambda rngs: GPT(config, rngs=rngs), loss, config.dropout_rate > 0)

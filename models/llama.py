"""Llama 3 in Flax NNX: grouped-query attention, rotary positions, RMS norms, gated MLP, no biases.

Query heads keep two axes, (heads of keys and values, query heads that share one), so that a split over the former needs
no reshape.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from .layers import (
    INIT_STDDEV,
    Attention,
    Cache,
    GatedMLP,
    LayerCache,
    Rotation,
    repeated,
    residual_stddev,
    rotation,
    types_of,
)
from .losses import cross_entropy
from .objective import Batch, Metrics, Objective, nnx_objective


@dataclasses.dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and options of a Llama.

    Attributes:
        vocab_size: number of token ids.
        context_length: longest sequence, in tokens.
        num_layers: number of decoder blocks.
        num_heads: query heads per block.
        num_kv_heads: heads of keys and values per block; must divide `num_heads`.
        head_dim: features of a head, an even number.
        embed_dim: width of the residual stream.
        hidden_dim: width of the MLP's hidden layer.
        rope_theta: base of the rotary embedding's wavelengths.
        norm_epsilon: added to the mean square in the RMS norms.
        attention_chunks: parts that the queries of a sequence are taken in; see `layers.causal_attention`.
        dtype: type of activations and of matrix products.
        param_dtype: type in which parameters are stored.
        remat: keep only each block's input for the backward pass and compute the rest of the block again.
        fused_attention: let cuDNN's kernels compute attention: on GPUs, where `dtype` has 16 bits.
    """

    vocab_size: int
    context_length: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    embed_dim: int
    hidden_dim: int
    rope_theta: float = 500_000.0
    norm_epsilon: float = 1e-5
    attention_chunks: int = 1
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: bool = False
    fused_attention: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"`num_kv_heads` must divide `num_heads`; received num_kv_heads={self.num_kv_heads}, "
                f"num_heads={self.num_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` must be even, for rotations of pairs; received head_dim={self.head_dim}.")


class Block(nnx.Module):
    """One decoder block: attention and gated MLP, each behind an RMS norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        types, width, stddev = types_of(config), config.embed_dim, residual_stddev(config.num_layers)
        heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads)
        self.num_chunks = config.attention_chunks
        self.attention_norm = nnx.RMSNorm(width, epsilon=config.norm_epsilon, rngs=rngs, **types)
        self.attention = Attention(
            width,
            heads,
            config.head_dim,
            use_bias=False,
            output_stddev=stddev,
            fused=config.fused_attention,
            rngs=rngs,
            **types,
        )
        self.mlp_norm = nnx.RMSNorm(width, epsilon=config.norm_epsilon, rngs=rngs, **types)
        self.mlp = GatedMLP(width, config.hidden_dim, down_stddev=stddev, rngs=rngs, **types)

    def __call__(self, x: jax.Array, by: Rotation) -> jax.Array:
        x = x + self.attention.causal(self.attention_norm(x), by, self.num_chunks)
        return x + self.mlp(self.mlp_norm(x))

    def extend(self, x: jax.Array, cache: LayerCache, start: jax.Array, by: Rotation) -> tuple[jax.Array, LayerCache]:
        """The block for new positions, behind `start` others in the cache."""
        attended, cache = self.attention.extend(self.attention_norm(x), cache, start, by)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache


class Llama(nnx.Module):
    """The decoder: token embedding, blocks, final norm, logits by a matrix of their own."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        types, width, init = types_of(config), config.embed_dim, nnx.initializers.normal(INIT_STDDEV)
        self.config = config
        self.token_embed = nnx.Embed(config.vocab_size, width, embedding_init=init, rngs=rngs, **types)
        self.blocks = repeated(lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs)
        self.final_norm = nnx.RMSNorm(width, epsilon=config.norm_epsilon, rngs=rngs, **types)
        self.head = nnx.Linear(width, config.vocab_size, use_bias=False, kernel_init=init, rngs=rngs, **types)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the token that follows each position.

        Args:
            tokens: int32 (batch, sequence).

        Returns:
            (batch, sequence, vocab_size) in `config.dtype`.
        """
        by = self._rotation(jnp.arange(tokens.shape[1]))
        x = self.token_embed(tokens)
        run_block = nnx.remat(Block.__call__) if self.config.remat else Block.__call__
        for block in self.blocks:
            x = run_block(block, x, by)
        return self.head(self.final_norm(x))

    def extend(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Logits for tokens that follow those in the cache, and the cache with them added; see `inference.py`."""
        by = self._rotation(cache.length + jnp.arange(tokens.shape[1]))
        x, layers = self.token_embed(tokens), []
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x, layer = block.extend(x, layer, cache.length, by)
            layers.append(layer)
        return self.head(self.final_norm(x)), Cache(tuple(layers), cache.length + tokens.shape[1])

    def _rotation(self, positions: jax.Array) -> Rotation:
        return rotation(positions, self.config.head_dim, self.config.rope_theta)


def objective(config: LlamaConfig) -> Objective:
    """Prediction of the next token; the batch is `inputs` and `targets`, int32 (batch, sequence)."""

    def loss(model: Llama, batch: Batch, _: jax.Array | None) -> tuple[jax.Array, Metrics]:
        return cross_entropy(model(batch["inputs"]), batch["targets"]), {}

    return nnx_objective(lambda rngs: Llama(config, rngs=rngs), loss)


def _published(num_layers: int, num_heads: int, embed_dim: int, hidden_dim: int) -> LlamaConfig:
    """A model at scale: bfloat16 compute, float32 parameters, blocks recomputed in the backward pass."""
    return LlamaConfig(
        vocab_size=128_256,
        context_length=8192,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        embed_dim=embed_dim,
        hidden_dim=hidden_dim,
        attention_chunks=16,
        dtype=jnp.bfloat16,
        remat=True,
    )


PRESETS: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        "tiny": LlamaConfig(
            vocab_size=256,
            context_length=128,
            num_layers=2,
            num_heads=8,
            num_kv_heads=4,
            head_dim=16,
            embed_dim=128,
            hidden_dim=256,
        ),
        "8b": _published(num_layers=32, num_heads=32, embed_dim=4096, hidden_dim=14_336),
        "70b": _published(num_layers=80, num_heads=64, embed_dim=8192, hidden_dim=28_672),
    }
)
"""Sizes by name: Llama 3 (Dubey et al. 2024, arXiv:2407.21783, table 3). `tiny` reads bytes, one token each."""

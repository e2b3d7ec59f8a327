"""A T5-like encoder-decoder (version 1.1): relative position biases, RMS norms, gated MLPs, no biases in layers.

Raffel et al. 2019, arXiv:1910.10683; version 1.1 gates the MLP with a GELU and gives the logits a matrix of their own.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from .layers import INIT_STDDEV, Attention, GatedMLP, causal_mask, repeated, types_of
from .losses import cross_entropy
from .objective import Batch, Metrics, Objective, nnx_objective


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderDecoderConfig:
    """Sizes and options of an encoder-decoder.

    Attributes:
        vocab_size: number of token ids.
        input_length: longest input, in tokens.
        target_length: longest target, in tokens.
        num_layers: number of blocks in the encoder, and again in the decoder.
        num_heads: attention heads per block.
        head_dim: features of a head; heads and features need not multiply to `embed_dim`.
        embed_dim: width of the residual stream.
        hidden_dim: width of the MLP's hidden layer.
        num_buckets: kinds of distances between positions, each with a bias of its own; an even number.
        max_distance: distance from which on all share one bucket.
        dtype: type of activations and of matrix products.
        param_dtype: type in which parameters are stored.
        remat: keep only each block's inputs for the backward pass and compute the rest of the block again.
    """

    vocab_size: int
    input_length: int
    target_length: int
    num_layers: int
    num_heads: int
    head_dim: int
    embed_dim: int
    hidden_dim: int
    num_buckets: int = 32
    max_distance: int = 128
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: bool = False


def distance_buckets(offset: jax.Array, num_buckets: int, max_distance: int, is_causal: bool) -> jax.Array:
    """The bucket of each offset: exact for small distances, then logarithmic up to `max_distance`.

    Args:
        offset: int32, position of the key minus position of the query.
        num_buckets: buckets in all; where keys on both sides are seen, half of them are for each side.
        max_distance: distance from which on all are in the last bucket.
        is_causal: only keys at or before the query are seen.

    Returns:
        int32 of the shape of `offset`, from 0 to num_buckets - 1.
    """
    if is_causal:
        first, distance = jnp.zeros_like(offset), jnp.maximum(-offset, 0)
    else:
        num_buckets //= 2
        first, distance = jnp.where(offset > 0, num_buckets, 0), jnp.abs(offset)
    num_exact = num_buckets // 2
    ratio = jnp.log(jnp.maximum(distance, 1) / num_exact) / math.log(max_distance / num_exact)
    far = num_exact + (ratio * (num_buckets - num_exact)).astype(jnp.int32)
    return first + jnp.where(distance < num_exact, distance, jnp.minimum(far, num_buckets - 1))


class DistanceBias(nnx.Module):
    """A learned bias of attention scores for each head and bucket of distances, shared by all blocks of a stack."""

    def __init__(self, config: EncoderDecoderConfig, is_causal: bool, *, rngs: nnx.Rngs):
        self.config, self.is_causal = config, is_causal
        init = nnx.initializers.normal(INIT_STDDEV)
        self.table = nnx.Embed(
            config.num_buckets, config.num_heads, embedding_init=init, rngs=rngs, param_dtype=config.param_dtype
        )

    def __call__(self, num_positions: int) -> jax.Array:
        """float32 (heads, positions, positions): what is added to the scores."""
        positions = jnp.arange(num_positions)
        offset = positions[None, :] - positions[:, None]
        buckets = distance_buckets(offset, self.config.num_buckets, self.config.max_distance, self.is_causal)
        return self.table(buckets).transpose(2, 0, 1).astype(jnp.float32)


def _attention(config: EncoderDecoderConfig, rngs: nnx.Rngs) -> Attention:
    # T5 does not scale scores; the initial scale of its query weights makes up for it.
    return Attention(
        config.embed_dim, (config.num_heads,), config.head_dim, use_bias=False, scale=1.0, rngs=rngs, **types_of(config)
    )


class EncoderBlock(nnx.Module):
    """Attention and gated MLP, each behind an RMS norm and added to the residual stream."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        types, width = types_of(config), config.embed_dim
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs, **types)
        self.attention = _attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs, **types)
        self.mlp = GatedMLP(width, config.hidden_dim, activation=jax.nn.gelu, rngs=rngs, **types)

    def __call__(self, x: jax.Array, is_input: jax.Array, bias: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), visible=is_input[:, None, None, :], bias=bias)
        return x + self.mlp(self.mlp_norm(x))


class DecoderBlock(nnx.Module):
    """Causal attention, attention to the encoded input, gated MLP; each normed before and added after."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        types, width = types_of(config), config.embed_dim
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs, **types)
        self.attention = _attention(config, rngs)
        self.cross_norm = nnx.RMSNorm(width, rngs=rngs, **types)
        self.cross_attention = _attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs, **types)
        self.mlp = GatedMLP(width, config.hidden_dim, activation=jax.nn.gelu, rngs=rngs, **types)

    def __call__(self, x: jax.Array, encoded: jax.Array, is_input: jax.Array, bias: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), visible=causal_mask(x.shape[1], x.shape[1]), bias=bias)
        x = x + self.cross_attention(self.cross_norm(x), encoded, visible=is_input[:, None, None, :])
        return x + self.mlp(self.mlp_norm(x))


class EncoderDecoder(nnx.Module):
    """Both stacks; they share the token embedding."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        types, width = types_of(config), config.embed_dim
        self.config = config
        self.token_embed = nnx.Embed(
            config.vocab_size, width, embedding_init=nnx.initializers.normal(1.0), rngs=rngs, **types
        )
        self.encoder_bias = DistanceBias(config, is_causal=False, rngs=rngs)
        self.encoder_blocks = repeated(lambda rngs: EncoderBlock(config, rngs=rngs), config.num_layers, rngs)
        self.encoder_norm = nnx.RMSNorm(width, rngs=rngs, **types)
        self.decoder_bias = DistanceBias(config, is_causal=True, rngs=rngs)
        self.decoder_blocks = repeated(lambda rngs: DecoderBlock(config, rngs=rngs), config.num_layers, rngs)
        self.decoder_norm = nnx.RMSNorm(width, rngs=rngs, **types)
        self.head = nnx.Linear(
            width,
            config.vocab_size,
            use_bias=False,
            kernel_init=nnx.initializers.normal(INIT_STDDEV),
            rngs=rngs,
            **types,
        )

    def __call__(self, inputs: jax.Array, is_input: jax.Array, shifted_targets: jax.Array) -> jax.Array:
        """Logits of each target token, given the input and the targets before it.

        Args:
            inputs: int32 (batch, input length).
            is_input: bool (batch, input length), false where a short input is padded.
            shifted_targets: int32 (batch, target length), the targets behind a start token.

        Returns:
            (batch, target length, vocab_size) in `config.dtype`.
        """
        is_remat = self.config.remat
        run_encoder = nnx.remat(EncoderBlock.__call__) if is_remat else EncoderBlock.__call__
        run_decoder = nnx.remat(DecoderBlock.__call__) if is_remat else DecoderBlock.__call__
        x, bias = self.token_embed(inputs), self.encoder_bias(inputs.shape[1])
        for block in self.encoder_blocks:
            x = run_encoder(block, x, is_input, bias)
        encoded = self.encoder_norm(x)
        x, bias = self.token_embed(shifted_targets), self.decoder_bias(shifted_targets.shape[1])
        for block in self.decoder_blocks:
            x = run_decoder(block, x, encoded, is_input, bias)
        return self.head(self.decoder_norm(x))


def objective(config: EncoderDecoderConfig) -> Objective:
    """Prediction of the target from the input; see `batch_shapes`."""

    def loss(model: EncoderDecoder, batch: Batch, _: jax.Array | None) -> tuple[jax.Array, Metrics]:
        logits = model(batch["inputs"], batch["is_input"], batch["shifted_targets"])
        return cross_entropy(logits, batch["targets"], batch["is_target"].astype(jnp.float32)), {}

    return nnx_objective(lambda rngs: EncoderDecoder(config, rngs=rngs), loss)


def batch_shapes(config: EncoderDecoderConfig, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of `batch_size` pairs of full length; `is_input` and `is_target` are false in the padding."""
    each = lambda length, dtype: jax.ShapeDtypeStruct((batch_size, length), dtype)
    return {
        "inputs": each(config.input_length, jnp.int32),
        "is_input": each(config.input_length, jnp.bool_),
        "shifted_targets": each(config.target_length, jnp.int32),
        "targets": each(config.target_length, jnp.int32),
        "is_target": each(config.target_length, jnp.bool_),
    }


def _published(num_layers: int, num_heads: int, embed_dim: int, hidden_dim: int) -> EncoderDecoderConfig:
    """A model at scale: bfloat16 compute, float32 parameters, blocks recomputed in the backward pass."""
    return EncoderDecoderConfig(
        vocab_size=32_128,
        input_length=512,
        target_length=512,
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=64,
        embed_dim=embed_dim,
        hidden_dim=hidden_dim,
        dtype=jnp.bfloat16,
        remat=True,
    )


PRESETS: Mapping[str, EncoderDecoderConfig] = MappingProxyType(
    {
        "tiny": EncoderDecoderConfig(
            vocab_size=256,
            input_length=64,
            target_length=32,
            num_layers=2,
            num_heads=4,
            head_dim=16,
            embed_dim=64,
            hidden_dim=128,
        ),
        "base": _published(num_layers=12, num_heads=12, embed_dim=768, hidden_dim=2048),
        "3b": _published(num_layers=24, num_heads=32, embed_dim=2048, hidden_dim=5120),
        "11b": _published(num_layers=24, num_heads=64, embed_dim=4096, hidden_dim=10_240),
    }
)
"""Sizes by name: T5 version 1.1, whose released configurations are called base, xl and xxl. `tiny` reads bytes."""

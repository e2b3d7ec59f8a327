"""A BERT-like encoder, also the shape of ERNIE's: post-norm blocks, masked-token and sentence-pair prediction."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from .layers import INIT_STDDEV, MLP, Attention, repeated, types_of
from .losses import cross_entropy
from .objective import Batch, Metrics, Objective, nnx_objective


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Sizes and options of an encoder.

    Attributes:
        vocab_size: number of token ids.
        context_length: longest sequence, in tokens.
        num_layers: number of blocks.
        num_heads: attention heads per block; must divide `embed_dim`.
        embed_dim: width of the residual stream.
        mlp_ratio: width of the MLP's hidden layer divided by `embed_dim`.
        num_segments: kinds of segments, such as the first and the second sentence.
        dtype: type of activations and of matrix products.
        param_dtype: type in which parameters are stored.
        remat: keep only each block's input for the backward pass and compute the rest of the block again.
    """

    vocab_size: int
    context_length: int
    num_layers: int
    num_heads: int
    embed_dim: int
    mlp_ratio: int = 4
    num_segments: int = 2
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: bool = False

    def __post_init__(self) -> None:
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"`num_heads` must divide `embed_dim`; received num_heads={self.num_heads}, embed_dim={self.embed_dim}."
            )


class Block(nnx.Module):
    """One block: attention and MLP, each added to the residual stream, which is then normed."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        types, width = types_of(config), config.embed_dim
        self.attention = Attention(width, (config.num_heads,), width // config.num_heads, rngs=rngs, **types)
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs, **types)
        self.mlp = MLP(width, config.mlp_ratio * width, rngs=rngs, **types)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs, **types)

    def __call__(self, x: jax.Array, is_token: jax.Array) -> jax.Array:
        x = self.attention_norm(x + self.attention(x, visible=is_token[:, None, None, :]))
        return self.mlp_norm(x + self.mlp(x))


class Encoder(nnx.Module):
    """Embeddings of tokens, positions and segments; blocks; a head for masked tokens and one for sentence pairs."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        types, width, init = types_of(config), config.embed_dim, nnx.initializers.normal(INIT_STDDEV)
        self.config = config
        self.token_embed = nnx.Embed(config.vocab_size, width, embedding_init=init, rngs=rngs, **types)
        self.segment_embed = nnx.Embed(config.num_segments, width, embedding_init=init, rngs=rngs, **types)
        self.position_embed = nnx.Param(init(rngs.params(), (config.context_length, width), config.param_dtype))
        self.embed_norm = nnx.LayerNorm(width, rngs=rngs, **types)
        self.blocks = repeated(lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs)
        self.token_transform = nnx.Linear(width, width, kernel_init=init, rngs=rngs, **types)
        self.token_norm = nnx.LayerNorm(width, rngs=rngs, **types)
        self.token_bias = nnx.Param(jnp.zeros((config.vocab_size,), config.param_dtype))
        self.pooler = nnx.Linear(width, width, kernel_init=init, rngs=rngs, **types)
        self.pair_head = nnx.Linear(width, 2, kernel_init=init, rngs=rngs, **types)

    def __call__(self, tokens: jax.Array, segments: jax.Array, is_token: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits of the token at each position, and of whether the second sentence follows the first.

        Args:
            tokens: int32 (batch, sequence), with sequence <= `context_length`; some of them masked.
            segments: int32 (batch, sequence), the segment of each token.
            is_token: bool (batch, sequence), false where a short sequence is padded.

        Returns:
            (batch, sequence, vocab_size) and (batch, 2) in `config.dtype`.
        """
        x = self.token_embed(tokens) + self.segment_embed(segments)
        x = self.embed_norm(x + self.position_embed[: tokens.shape[1]].astype(self.config.dtype))
        run_block = nnx.remat(Block.__call__) if self.config.remat else Block.__call__
        for block in self.blocks:
            x = run_block(block, x, is_token)
        token = self.token_norm(jax.nn.gelu(self.token_transform(x)))
        token_logits = self.token_embed.attend(token) + self.token_bias.astype(self.config.dtype)
        return token_logits, self.pair_head(jnp.tanh(self.pooler(x[:, 0])))


def objective(config: EncoderConfig) -> Objective:
    """Prediction of masked tokens and of whether sentences follow each other; see `batch_shapes`."""

    def loss(model: Encoder, batch: Batch, _: jax.Array | None) -> tuple[jax.Array, Metrics]:
        token_logits, pair_logits = model(batch["inputs"], batch["segments"], batch["is_token"])
        token_loss = cross_entropy(token_logits, batch["targets"], batch["is_masked"].astype(jnp.float32))
        pair_loss = cross_entropy(pair_logits, batch["follows"])
        return token_loss + pair_loss, {"token_loss": token_loss, "pair_loss": pair_loss}

    return nnx_objective(lambda rngs: Encoder(config, rngs=rngs), loss)


def batch_shapes(config: EncoderConfig, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of `batch_size` sentence pairs of full length.

    `inputs` are the tokens with some masked, `targets` the tokens themselves, `is_masked` says where they count.
    """
    each = lambda dtype: jax.ShapeDtypeStruct((batch_size, config.context_length), dtype)
    return {
        "inputs": each(jnp.int32),
        "segments": each(jnp.int32),
        "is_token": each(jnp.bool_),
        "is_masked": each(jnp.bool_),
        "targets": each(jnp.int32),
        "follows": jax.ShapeDtypeStruct((batch_size,), jnp.int32),
    }


def _published(num_layers: int, num_heads: int, embed_dim: int) -> EncoderConfig:
    """A model at scale: bfloat16 compute, float32 parameters, blocks recomputed in the backward pass."""
    return EncoderConfig(
        vocab_size=30_720,
        context_length=512,
        num_layers=num_layers,
        num_heads=num_heads,
        embed_dim=embed_dim,
        dtype=jnp.bfloat16,
        remat=True,
    )


PRESETS: Mapping[str, EncoderConfig] = MappingProxyType(
    {
        "tiny": EncoderConfig(vocab_size=256, context_length=128, num_layers=2, num_heads=4, embed_dim=64),
        "base": _published(num_layers=12, num_heads=12, embed_dim=768),
        "large": _published(num_layers=24, num_heads=16, embed_dim=1024),
        "10b": _published(num_layers=48, num_heads=64, embed_dim=4096),
    }
)
"""Sizes by name: `base` and `large` are BERT's (Devlin et al. 2018, arXiv:1810.04805, section 3), `10b` is the shared
part of ERNIE 3.0 (Sun et al. 2021, arXiv:2107.02137, section 4.1). The vocabulary is BERT's 30,522 word pieces, padded
to a multiple of 1,024. `tiny` reads bytes, one token each."""

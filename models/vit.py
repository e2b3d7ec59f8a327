"""Vision transformer in Flax NNX: patches by a convolution, pre-norm blocks, the mean over patches classified.

Dosovitskiy et al. 2020, arXiv:2010.11929. The mean over patches stands in for the class token (Zhai et al. 2021,
arXiv:2106.04560, section 3.2), so that the sequence keeps a length with many divisors.
"""

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
class ViTConfig:
    """Sizes and options of a vision transformer.

    Attributes:
        image_size: height and width of an image, in pixels.
        patch_size: height and width of a patch; must divide `image_size`.
        num_channels: colours of a pixel.
        num_classes: number of labels.
        num_layers: number of blocks.
        num_heads: attention heads per block; must divide `embed_dim`.
        embed_dim: width of the residual stream.
        hidden_dim: width of the MLP's hidden layer.
        dtype: type of activations and of matrix products.
        param_dtype: type in which parameters are stored.
        remat: keep only each block's input for the backward pass and compute the rest of the block again.
        fused_attention: let cuDNN's kernels compute attention: on GPUs, where `dtype` has 16 bits.
    """

    image_size: int
    patch_size: int
    num_classes: int
    num_layers: int
    num_heads: int
    embed_dim: int
    hidden_dim: int
    num_channels: int = 3
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: bool = False
    fused_attention: bool = False

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"`patch_size` must divide `image_size`; received patch_size={self.patch_size}, "
                f"image_size={self.image_size}."
            )
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"`num_heads` must divide `embed_dim`; received num_heads={self.num_heads}, embed_dim={self.embed_dim}."
            )

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2


class Block(nnx.Module):
    """One block: attention and MLP, each behind a layer norm and added to the residual stream."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        types, width = types_of(config), config.embed_dim
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs, **types)
        self.attention = Attention(
            width,
            (config.num_heads,),
            width // config.num_heads,
            fused=config.fused_attention,
            rngs=rngs,
            **types,
        )
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs, **types)
        self.mlp = MLP(width, config.hidden_dim, rngs=rngs, **types)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ViT(nnx.Module):
    """Patch and position embeddings, blocks, final norm, mean over patches, class logits."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        types, width, init = types_of(config), config.embed_dim, nnx.initializers.normal(INIT_STDDEV)
        patch = (config.patch_size, config.patch_size)
        self.config = config
        self.patch_embed = nnx.Conv(
            config.num_channels, width, patch, strides=patch, padding="VALID", rngs=rngs, **types
        )
        self.position_embed = nnx.Param(init(rngs.params(), (config.num_patches, width), config.param_dtype))
        self.blocks = repeated(lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs)
        self.final_norm = nnx.LayerNorm(width, rngs=rngs, **types)
        self.head = nnx.Linear(width, config.num_classes, kernel_init=init, rngs=rngs, **types)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits of the classes.

        Args:
            images: float (batch, image_size, image_size, num_channels).

        Returns:
            (batch, num_classes) in `config.dtype`.
        """
        patches = self.patch_embed(images)
        x = patches.reshape(images.shape[0], self.config.num_patches, self.config.embed_dim)
        x = x + self.position_embed.astype(self.config.dtype)
        run_block = nnx.remat(Block.__call__) if self.config.remat else Block.__call__
        for block in self.blocks:
            x = run_block(block, x)
        return self.head(jnp.mean(self.final_norm(x), axis=1))


def objective(config: ViTConfig) -> Objective:
    """Classification of images; see `batch_shapes`."""

    def loss(model: ViT, batch: Batch, _: jax.Array | None) -> tuple[jax.Array, Metrics]:
        return cross_entropy(model(batch["images"]), batch["labels"]), {}

    return nnx_objective(lambda rngs: ViT(config, rngs=rngs), loss)


def batch_shapes(config: ViTConfig, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of `batch_size` labelled images."""
    shape = (batch_size, config.image_size, config.image_size, config.num_channels)
    return {
        "images": jax.ShapeDtypeStruct(shape, jnp.float32),
        "labels": jax.ShapeDtypeStruct((batch_size,), jnp.int32),
    }


def _published(patch_size: int, num_layers: int, num_heads: int, embed_dim: int, hidden_dim: int) -> ViTConfig:
    """A model at scale: bfloat16 compute, float32 parameters, blocks recomputed in the backward pass."""
    return ViTConfig(
        image_size=224,
        patch_size=patch_size,
        num_classes=1000,
        num_layers=num_layers,
        num_heads=num_heads,
        embed_dim=embed_dim,
        hidden_dim=hidden_dim,
        dtype=jnp.bfloat16,
        remat=True,
    )


PRESETS: Mapping[str, ViTConfig] = MappingProxyType(
    {
        "tiny": ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            num_classes=10,
            num_layers=2,
            num_heads=4,
            embed_dim=64,
            hidden_dim=128,
        ),
        "b16": _published(patch_size=16, num_layers=12, num_heads=12, embed_dim=768, hidden_dim=3072),
        "l16": _published(patch_size=16, num_layers=24, num_heads=16, embed_dim=1024, hidden_dim=4096),
        "h14": _published(patch_size=14, num_layers=32, num_heads=16, embed_dim=1280, hidden_dim=5120),
    }
)
"""Sizes by name: those of the paper (table 1). `tiny` reads handwritten digits of 8 x 8 pixels."""

"""The vision transformer of `vit.py` in Flax Linen. Parameters bear like names; layer i is the subtree `block_<i>`."""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from .layers import INIT_STDDEV, attention, types_of
from .losses import cross_entropy
from .objective import Batch, Metrics, Objective, linen_objective
from .vit import ViTConfig


@dataclasses.dataclass(frozen=True, slots=True)
class LinenViTConfig(ViTConfig):
    """A `ViTConfig` for the Linen model."""


class Block(nn.Module):
    """One block: attention and MLP, each behind a layer norm and added to the residual stream."""

    config: LinenViTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, types = self.config, types_of(self.config)
        init = nn.initializers.normal(INIT_STDDEV)
        heads = (config.num_heads, config.embed_dim // config.num_heads)
        normed = nn.LayerNorm(name="attention_norm", **types)(x)
        query, key, value = (
            nn.DenseGeneral(heads, kernel_init=init, name=f"attention_{name}", **types)(normed)
            for name in ("query", "key", "value")
        )
        attended = attention(query, key, value)
        x = x + nn.DenseGeneral(config.embed_dim, axis=(-2, -1), kernel_init=init, name="attention_output", **types)(
            attended
        )
        hidden = nn.Dense(config.hidden_dim, kernel_init=init, name="mlp_up", **types)(
            nn.LayerNorm(name="mlp_norm", **types)(x)
        )
        return x + nn.Dense(config.embed_dim, kernel_init=init, name="mlp_down", **types)(jax.nn.gelu(hidden))


class ViT(nn.Module):
    """Patch and position embeddings, blocks, final norm, mean over patches, class logits."""

    config: LinenViTConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits (batch, num_classes) of images (batch, image_size, image_size, num_channels)."""
        config, types, init = self.config, types_of(self.config), nn.initializers.normal(INIT_STDDEV)
        patch = (config.patch_size, config.patch_size)
        patches = nn.Conv(config.embed_dim, patch, strides=patch, padding="VALID", name="patch_embed", **types)(images)
        x = patches.reshape(images.shape[0], config.num_patches, config.embed_dim)
        positions = self.param("position_embed", init, (config.num_patches, config.embed_dim), config.param_dtype)
        x = x + positions.astype(config.dtype)
        block_class = nn.remat(Block) if config.remat else Block
        for layer in range(config.num_layers):
            x = block_class(config, name=f"block_{layer}")(x)
        x = jnp.mean(nn.LayerNorm(name="final_norm", **types)(x), axis=1)
        return nn.Dense(config.num_classes, kernel_init=init, name="head", **types)(x)


def objective(config: LinenViTConfig) -> Objective:
    """Classification of images; the batch is that of `vit.py`."""

    def loss(apply: Callable[..., jax.Array], batch: Batch, _: jax.Array | None) -> tuple[jax.Array, Metrics]:
        return cross_entropy(apply(batch["images"]), batch["labels"]), {}

    size = config.image_size
    example = jax.ShapeDtypeStruct((1, size, size, config.num_channels), jnp.float32)
    return linen_objective(ViT(config), example, loss)

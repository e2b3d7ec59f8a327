"""A diffusion U-Net in Flax NNX, trained to predict the noise that was added to an image.

Residual blocks of convolutions with group norm, conditioned on the time, and attention where the image is small; each
level down halves the image, and its features are kept for the way up. Ho et al. 2020, arXiv:2006.11239.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from .layers import attention, made, types_of
from .losses import mean_squared_error
from .objective import Batch, Metrics, Objective, nnx_objective


@dataclasses.dataclass(frozen=True, slots=True)
class UNetConfig:
    """Sizes and options of a U-Net.

    Attributes:
        image_size: height and width of an image, in pixels; 2 ** (levels - 1) must divide it.
        base_channels: channels of the first level; `num_groups` must divide it.
        multipliers: channels of each level, from the largest image to the smallest, divided by `base_channels`.
        blocks_per_level: residual blocks of each level on the way down; one more on the way up.
        attention_sizes: heights of image at which every residual block is followed by attention.
        head_dim: features of an attention head; must divide the channels where there is attention.
        num_groups: groups of channels that are normed together.
        num_channels: colours of a pixel.
        num_times: steps of the diffusion.
        dtype: type of activations and of convolutions.
        param_dtype: type in which parameters are stored.
        remat: keep only each residual block's inputs for the backward pass and compute the rest of it again.
    """

    image_size: int
    base_channels: int
    multipliers: tuple[int, ...]
    blocks_per_level: int
    attention_sizes: tuple[int, ...]
    head_dim: int = 64
    num_groups: int = 32
    num_channels: int = 3
    num_times: int = 1000
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: bool = False

    def __post_init__(self) -> None:
        factor = 2 ** (len(self.multipliers) - 1)
        if self.image_size % factor:
            raise ValueError(
                f"`image_size` must be a multiple of 2 ** (levels - 1) = {factor}; received "
                f"image_size={self.image_size}, levels={len(self.multipliers)}."
            )

    @property
    def time_dim(self) -> int:
        """Width of the time's embedding."""
        return 4 * self.base_channels


def signal_share(time: jax.Array, num_times: int) -> jax.Array:
    """Share of the variance that is image, not noise, after each time: the cosine schedule.

    Nichol and Dhariwal 2021, arXiv:2102.09672, equation 17, with the offset 0.008.

    Args:
        time: int32 (batch,), from 0 to num_times - 1.
        num_times: steps of the diffusion.

    Returns:
        float32 (batch,), falling from nearly 1 to nearly 0.
    """
    angle = ((time + 1) / num_times * 0.999 + 0.008) / 1.008 * (math.pi / 2)
    return jnp.square(jnp.cos(angle)) / math.cos(0.008 / 1.008 * math.pi / 2) ** 2


def time_features(time: jax.Array, dim: int) -> jax.Array:
    """Sines and cosines of int32 (batch,) times, at wavelengths from 2 pi to 20,000 pi: float32 (batch, dim)."""
    half = dim // 2
    frequencies = jnp.exp(-math.log(10_000) * jnp.arange(half, dtype=jnp.float32) / half)
    angles = time[:, None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def _conv(config: UNetConfig, in_channels: int, out_channels: int, rngs: nnx.Rngs, **options: Any) -> nnx.Conv:
    """A 3 x 3 convolution that keeps the size of the image, unless `options` say otherwise."""
    return nnx.Conv(in_channels, out_channels, (3, 3), rngs=rngs, **types_of(config), **options)


class ResidualBlock(nnx.Module):
    """Two normed convolutions, added to the input; the time scales and shifts what the second norm gives."""

    def __init__(self, config: UNetConfig, in_channels: int, channels: int, *, rngs: nnx.Rngs):
        types, groups = types_of(config), config.num_groups
        self.first_norm = nnx.GroupNorm(in_channels, num_groups=groups, rngs=rngs, **types)
        self.first = _conv(config, in_channels, channels, rngs)
        self.time = nnx.Linear(config.time_dim, 2 * channels, rngs=rngs, **types)
        self.second_norm = nnx.GroupNorm(channels, num_groups=groups, rngs=rngs, **types)
        # The last convolution starts at zero, so that a block starts as the identity.
        self.second = _conv(config, channels, channels, rngs, kernel_init=nnx.initializers.zeros)
        is_wider = in_channels != channels
        self.shortcut = nnx.Linear(in_channels, channels, rngs=rngs, **types) if is_wider else None

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        residual = x if self.shortcut is None else self.shortcut(x)
        x = self.first(jax.nn.silu(self.first_norm(x)))
        scale, shift = jnp.split(self.time(jax.nn.silu(time))[:, None, None, :], 2, axis=-1)
        return residual + self.second(jax.nn.silu(self.second_norm(x) * (1 + scale) + shift))


class ImageAttention(nnx.Module):
    """Attention among the places of an image, normed before and added to the input."""

    def __init__(self, config: UNetConfig, channels: int, *, rngs: nnx.Rngs):
        types, heads = types_of(config), (channels // config.head_dim, config.head_dim)
        self.norm = nnx.GroupNorm(channels, num_groups=config.num_groups, rngs=rngs, **types)
        self.query = nnx.LinearGeneral(channels, heads, rngs=rngs, **types)
        self.key = nnx.LinearGeneral(channels, heads, rngs=rngs, **types)
        self.value = nnx.LinearGeneral(channels, heads, rngs=rngs, **types)
        self.output = nnx.LinearGeneral(
            heads, channels, axis=(-2, -1), kernel_init=nnx.initializers.zeros, rngs=rngs, **types
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        places = self.norm(x).reshape(x.shape[0], x.shape[1] * x.shape[2], x.shape[3])
        attended = attention(self.query(places), self.key(places), self.value(places))
        return x + self.output(attended).reshape(x.shape)


class Stage(nnx.Module):
    """A residual block, with attention behind it where the image is small enough."""

    def __init__(self, config: UNetConfig, size: int, in_channels: int, channels: int, *, rngs: nnx.Rngs):
        self.block = ResidualBlock(config, in_channels, channels, rngs=rngs)
        self.attention = ImageAttention(config, channels, rngs=rngs) if size in config.attention_sizes else None

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        x = self.block(x, time)
        return x if self.attention is None else self.attention(x)


def _stage(config: UNetConfig, size: int, in_channels: int, channels: int, rngs: nnx.Rngs) -> Stage:
    return made(lambda rngs: Stage(config, size, in_channels, channels, rngs=rngs), rngs)


def doubled(x: jax.Array) -> jax.Array:
    """An image of twice the height and width, each pixel repeated: (batch, h, w, c) to (batch, 2h, 2w, c)."""
    batch, height, width, channels = x.shape
    x = jnp.broadcast_to(x[:, :, None, :, None, :], (batch, height, 2, width, 2, channels))
    return x.reshape(batch, 2 * height, 2 * width, channels)


class UNet(nnx.Module):
    """The way down, the middle and the way up."""

    def __init__(self, config: UNetConfig, *, rngs: nnx.Rngs):
        types, base = types_of(config), config.base_channels
        self.config = config
        self.time_first = nnx.Linear(base, config.time_dim, rngs=rngs, **types)
        self.time_second = nnx.Linear(config.time_dim, config.time_dim, rngs=rngs, **types)
        self.stem = _conv(config, config.num_channels, base, rngs)
        size, channels, kept = config.image_size, base, [base]
        down, shrink = [], []
        for level, multiplier in enumerate(config.multipliers):
            for _ in range(config.blocks_per_level):
                down.append(_stage(config, size, channels, base * multiplier, rngs))
                channels = base * multiplier
                kept.append(channels)
            if level < len(config.multipliers) - 1:
                shrink.append(_conv(config, channels, channels, rngs, strides=(2, 2)))
                kept.append(channels)
                size //= 2
        self.down, self.shrink = nnx.List(down), nnx.List(shrink)
        self.middle = _stage(config, size, channels, channels, rngs)
        self.last_middle = ResidualBlock(config, channels, channels, rngs=rngs)
        up, grow = [], []
        for level, multiplier in reversed(list(enumerate(config.multipliers))):
            for _ in range(config.blocks_per_level + 1):
                up.append(_stage(config, size, channels + kept.pop(), base * multiplier, rngs))
                channels = base * multiplier
            if level > 0:
                grow.append(_conv(config, channels, channels, rngs))
                size *= 2
        self.up, self.grow = nnx.List(up), nnx.List(grow)
        self.final_norm = nnx.GroupNorm(channels, num_groups=config.num_groups, rngs=rngs, **types)
        self.head = _conv(config, channels, config.num_channels, rngs, kernel_init=nnx.initializers.zeros)

    def __call__(self, images: jax.Array, time: jax.Array) -> jax.Array:
        """The noise in noisy images.

        Args:
            images: float (batch, image_size, image_size, num_channels).
            time: int32 (batch,), how far the diffusion has gone.

        Returns:
            The shape of `images` in `config.dtype`.
        """
        config = self.config
        run = nnx.remat(Stage.__call__) if config.remat else Stage.__call__
        time = self.time_second(jax.nn.silu(self.time_first(time_features(time, config.base_channels))))
        x = self.stem(images)
        kept, num_levels = [x], len(config.multipliers)
        for number, stage in enumerate(self.down):
            x = run(stage, x, time)
            kept.append(x)
            level = (number + 1) // config.blocks_per_level
            if (number + 1) % config.blocks_per_level == 0 and level < num_levels:
                x = self.shrink[level - 1](x)
                kept.append(x)
        x = self.last_middle(run(self.middle, x, time), time)
        for number, stage in enumerate(self.up):
            x = run(stage, jnp.concatenate([x, kept.pop()], axis=-1), time)
            level = (number + 1) // (config.blocks_per_level + 1)
            if (number + 1) % (config.blocks_per_level + 1) == 0 and level < num_levels:
                x = self.grow[level - 1](doubled(x))
        return self.head(jax.nn.silu(self.final_norm(x)))


def objective(config: UNetConfig) -> Objective:
    """Prediction of the noise in images at times drawn evenly; see `batch_shapes`."""

    def loss(model: UNet, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        images = batch["images"]
        time_key, noise_key = jax.random.split(key)
        time = jax.random.randint(time_key, images.shape[:1], 0, config.num_times)
        noise = jax.random.normal(noise_key, images.shape)
        share = signal_share(time, config.num_times)[:, None, None, None]
        noisy = jnp.sqrt(share) * images + jnp.sqrt(1 - share) * noise
        return mean_squared_error(model(noisy, time), noise), {}

    return nnx_objective(lambda rngs: UNet(config, rngs=rngs), loss, is_random=True, evaluate=loss)


def batch_shapes(config: UNetConfig, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of `batch_size` images, whose pixels lie between -1 and 1."""
    shape = (batch_size, config.image_size, config.image_size, config.num_channels)
    return {"images": jax.ShapeDtypeStruct(shape, jnp.float32)}


def _at_scale(**sizes: Any) -> UNetConfig:
    """A model at scale: bfloat16 compute, float32 parameters, residual blocks recomputed in the backward pass."""
    return UNetConfig(**sizes, dtype=jnp.bfloat16, remat=True)


PRESETS: Mapping[str, UNetConfig] = MappingProxyType(
    {
        "tiny": UNetConfig(
            image_size=8,
            num_channels=1,
            base_channels=16,
            multipliers=(1, 2),
            blocks_per_level=1,
            attention_sizes=(4,),
            head_dim=8,
            num_groups=8,
        ),
        "64": _at_scale(
            image_size=64, base_channels=192, multipliers=(1, 2, 3, 4), blocks_per_level=3, attention_sizes=(32, 16, 8)
        ),
        "256": _at_scale(
            image_size=256,
            base_channels=256,
            multipliers=(1, 1, 2, 2, 4, 4),
            blocks_per_level=2,
            attention_sizes=(32, 16, 8),
        ),
    }
)
"""Sizes by name: those of the models for images of 64 and 256 pixels in Dhariwal and Nichol 2021 (arXiv:2105.05233,
appendix I), whose other refinements are left out. `tiny` draws handwritten digits of 8 x 8 pixels."""

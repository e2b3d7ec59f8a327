"""Wide residual network in Flax NNX: bottleneck blocks of convolutions with batch norm, for large images.

He et al. 2015 (arXiv:1512.03385), with more channels given by the 3 x 3 convolutions as in Alpa's benchmark (Zheng et
al. 2022, arXiv:2201.12023); after Zagoruyko and Komodakis 2016 (arXiv:1605.07146), who also widen what they read. The
stride of a block is in its 3 x 3 convolution. The running averages of the batch norms are mutable state.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from .layers import made, types_of
from .losses import cross_entropy
from .objective import Batch, Metrics, Objective, nnx_objective

EXPANSION = 4
"""Channels that a block gives, divided by its stage's base channels (He et al. 2015, table 1)."""


@dataclasses.dataclass(frozen=True, slots=True)
class WideResNetConfig:
    """Sizes and options of a wide residual network.

    Attributes:
        image_size: height and width of an image, in pixels; at least 2 ** (number of stages + 1).
        num_classes: number of labels.
        blocks_per_stage: blocks in each stage; every stage but the first halves the image and doubles the channels.
        base_channels: channels of the first layer.
        width_factor: channels that a 3 x 3 convolution gives, divided by those that it reads.
        num_channels: colours of a pixel.
        momentum: share of the running averages that a step keeps.
        dtype: type of activations and of convolutions; batch statistics are in float32.
        param_dtype: type in which parameters are stored.
        remat: keep only each block's input for the backward pass and compute the rest of the block again.
    """

    image_size: int
    num_classes: int
    blocks_per_stage: tuple[int, ...]
    base_channels: int
    width_factor: int = 1
    num_channels: int = 3
    momentum: float = 0.9
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: bool = False


class ConvNorm(nnx.Module):
    """A convolution without bias, and a batch norm over images and places."""

    def __init__(
        self,
        config: WideResNetConfig,
        in_channels: int,
        out_channels: int,
        size: int,
        stride: int = 1,
        *,
        is_last: bool = False,
        rngs: nnx.Rngs,
    ):
        """`is_last`: the norm starts with a scale of zero, so that a residual block starts as the identity."""
        types = types_of(config)
        self.conv = nnx.Conv(
            in_channels,
            out_channels,
            (size, size),
            strides=(stride, stride),
            use_bias=False,
            kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
            rngs=rngs,
            **types,
        )
        self.norm = nnx.BatchNorm(
            out_channels,
            momentum=config.momentum,
            scale_init=nnx.initializers.zeros if is_last else nnx.initializers.ones,
            rngs=rngs,
            **types,
        )

    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        return self.norm(self.conv(x), use_running_average=not is_training)


class Block(nnx.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, added to the input; the input is projected where its shape differs."""

    def __init__(self, config: WideResNetConfig, in_channels: int, channels: int, stride: int, *, rngs: nnx.Rngs):
        wide, out_channels = channels * config.width_factor, channels * EXPANSION
        self.reduce = ConvNorm(config, in_channels, channels, 1, rngs=rngs)
        self.mix = ConvNorm(config, channels, wide, 3, stride, rngs=rngs)
        self.expand = ConvNorm(config, wide, out_channels, 1, is_last=True, rngs=rngs)
        is_same = stride == 1 and in_channels == out_channels
        self.shortcut = None if is_same else ConvNorm(config, in_channels, out_channels, 1, stride, rngs=rngs)

    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        residual = x if self.shortcut is None else self.shortcut(x, is_training)
        x = jax.nn.relu(self.reduce(x, is_training))
        x = jax.nn.relu(self.mix(x, is_training))
        return jax.nn.relu(residual + self.expand(x, is_training))


class WideResNet(nnx.Module):
    """A strided convolution and a pooling, stages of blocks, the mean over the image classified."""

    def __init__(self, config: WideResNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.stem = ConvNorm(config, config.num_channels, config.base_channels, 7, 2, rngs=rngs)
        blocks, in_channels = [], config.base_channels
        for stage, num_blocks in enumerate(config.blocks_per_stage):
            channels = config.base_channels * 2**stage
            for number in range(num_blocks):
                stride = 2 if stage > 0 and number == 0 else 1
                make = functools.partial(Block, config, in_channels, channels, stride)
                blocks.append(made(lambda rngs, make=make: make(rngs=rngs), rngs))
                in_channels = channels * EXPANSION
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(in_channels, config.num_classes, rngs=rngs, **types_of(config))

    def __call__(self, images: jax.Array, is_training: bool = False) -> jax.Array:
        """Logits of the classes.

        Args:
            images: float (batch, image_size, image_size, num_channels).
            is_training: norm by the statistics of the batch, and update the running averages.

        Returns:
            (batch, num_classes) in `config.dtype`.
        """
        x = jax.nn.relu(self.stem(images, is_training))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        run_block = nnx.remat(Block.__call__, static_argnums=2) if self.config.remat else Block.__call__
        for block in self.blocks:
            x = run_block(block, x, is_training)
        x = jnp.mean(x, axis=(1, 2))
        with jax.named_scope("classifier"):
            return self.head(x)


def objective(config: WideResNetConfig) -> Objective:
    """Classification of images; see `batch_shapes`."""

    def loss_of(is_training: bool) -> Callable[..., tuple[jax.Array, Metrics]]:
        def loss(model: WideResNet, batch: Batch, _: jax.Array | None) -> tuple[jax.Array, Metrics]:
            logits = model(batch["images"], is_training)
            with jax.named_scope("classifier"):
                return cross_entropy(logits, batch["labels"]), {}

        return loss

    return nnx_objective(lambda rngs: WideResNet(config, rngs=rngs), loss_of(True), evaluate=loss_of(False))


def batch_shapes(config: WideResNetConfig, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of `batch_size` labelled images."""
    shape = (batch_size, config.image_size, config.image_size, config.num_channels)
    return {
        "images": jax.ShapeDtypeStruct(shape, jnp.float32),
        "labels": jax.ShapeDtypeStruct((batch_size,), jnp.int32),
    }


def _published(base_channels: int, width_factor: int) -> WideResNetConfig:
    """50 layers for images of 224 x 224 pixels."""
    return WideResNetConfig(
        image_size=224,
        num_classes=1024,
        blocks_per_stage=(3, 4, 6, 3),
        base_channels=base_channels,
        width_factor=width_factor,
    )


PRESETS: Mapping[str, WideResNetConfig] = MappingProxyType(
    {
        "tiny": WideResNetConfig(
            image_size=8, num_channels=1, num_classes=10, blocks_per_stage=(1, 1), base_channels=8, width_factor=2
        ),
        "250m": _published(base_channels=160, width_factor=2),
        "1b": _published(base_channels=320, width_factor=2),
        "2b": _published(base_channels=448, width_factor=2),
        "4b": _published(base_channels=640, width_factor=2),
        "6.8b": _published(base_channels=320, width_factor=16),
        "13b": _published(base_channels=320, width_factor=32),
    }
)
"""Sizes by name, of 50 layers, in float32: those of Alpa's benchmark (Zheng et al. 2022, arXiv:2201.12023, and its
benchmark suite). `tiny` reads handwritten digits of 8 x 8 pixels."""

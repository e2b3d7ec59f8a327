"""The small program of every family that planned and hand-written steps are checked on.

Between them they have every optimizer, clipping, weight decay, accumulation of gradients, scaling of the loss, remat,
scanned layers and mutable state. Optimizers have a larger epsilon than usual: the gradient of a key's bias is rounding
alone, and must not be made into steps of full size.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from autoshard_models import optimizers
from autoshard_models.loss_scaling import LossScaling
from autoshard_models.train_step import StepOptions, TrainFunctions, build
from autoshard_models.zoo import FAMILIES

ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, b2=0.95, eps=1e-6, weight_decay=0.1))
ADAFACTOR = optax.adafactor(2e-2, min_dim_size_to_factor=8, eps=1e-12)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A training step small enough to be compiled many times.

    Attributes:
        config: of the model.
        optimizer, options: of the step.
        batch_size: examples of a batch.
        below: for each integer of the batch, and each float that is 0 or 1, what it stays below.
    """

    config: Any
    optimizer: optax.GradientTransformation
    batch_size: int
    below: Mapping[str, int | Sequence[int]]
    options: StepOptions = StepOptions()

    @functools.cached_property
    def functions(self) -> TrainFunctions:
        """Makes and advances the training state; built when first asked for, not by all who collect tests."""
        return build(self.config, self.optimizer, self.options)

    def batch(self, seed: int = 0) -> dict[str, jax.Array]:
        """Random data of the shapes that the family states; masks are prefixes of at least half the length."""
        rng, made = np.random.default_rng(seed), {}
        for name, leaf in batch_shapes(self.config, self.batch_size).items():
            if leaf.dtype == jnp.bool_:
                length = leaf.shape[1]
                values = np.arange(length) < rng.integers(length // 2, length + 1, (leaf.shape[0], 1))
            elif name in self.below:
                values = rng.integers(self.below[name], size=leaf.shape)
            else:
                values = rng.normal(size=leaf.shape)
            made[name] = jnp.asarray(values, leaf.dtype)
        return made


def batch_shapes(config: Any, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch of the family that `config` belongs to."""
    (family,) = (family for family in FAMILIES.values() if type(config) is family.config)
    return family.batch_shapes(config, batch_size)


def _program(
    family: str,
    optimizer: optax.GradientTransformation,
    below: Mapping[str, int | Sequence[int]],
    batch_size: int = 8,
    options: StepOptions = StepOptions(),  # noqa: B008 - frozen
    **sizes: Any,
) -> Program:
    config = dataclasses.replace(FAMILIES[family].presets["tiny"], **sizes)
    return Program(config, optimizer, batch_size, below, options)


_TOKENS = {"inputs": 32, "targets": 32}
_GPT = {"vocab_size": 32, "context_length": 8, "embed_dim": 32}
_VIT = {"num_layers": 1, "embed_dim": 32, "hidden_dim": 64}

PROGRAMS: Mapping[str, Program] = {
    "gpt": _program("gpt", ADAMW, _TOKENS, num_layers=1, tie_embeddings=False, **_GPT),
    "gpt_linen": _program("gpt_linen", ADAMW, _TOKENS, num_layers=2, scan_layers=True, remat=True, **_GPT),
    "llama": _program(
        "llama",
        ADAMW,
        _TOKENS,
        vocab_size=32,
        context_length=8,
        num_layers=1,
        num_heads=8,
        num_kv_heads=4,
        head_dim=4,
        embed_dim=32,
        hidden_dim=48,
        attention_chunks=2,
        remat=True,
    ),
    "encoder": _program(
        "encoder",
        ADAMW,
        _TOKENS | {"segments": 2, "follows": 2},
        vocab_size=32,
        context_length=8,
        num_layers=1,
        embed_dim=32,
    ),
    "encoder_decoder": _program(
        "encoder_decoder",
        ADAFACTOR,
        _TOKENS | {"shifted_targets": 32},
        vocab_size=32,
        input_length=16,
        target_length=8,
        num_layers=1,
        head_dim=8,
        embed_dim=32,
        hidden_dim=32,
        num_buckets=8,
        max_distance=16,
    ),
    "moe": _program(
        "moe", ADAFACTOR, _TOKENS, vocab_size=32, context_length=8, num_layers=1, embed_dim=16, hidden_dim=32
    ),
    "vit": _program(
        "vit",
        optimizers.sgd(0.05, clip_norm=1.0),
        {"labels": 10},
        batch_size=16,
        options=StepOptions(num_micro_batches=2, loss_scaling=LossScaling()),
        **_VIT,
    ),
    "vit_linen": _program("vit_linen", ADAMW, {"labels": 10}, **_VIT),
    "wide_resnet": _program("wide_resnet", optimizers.sgd(0.05, weight_decay=1e-3), {"labels": 10}, remat=True),
    "unet": _program("unet", optimizers.sgd(0.1, clip_norm=1.0), {}, base_channels=8, num_groups=4),
    "dlrm": _program(
        "dlrm", optimizers.sgd(0.1), {"categories": FAMILIES["dlrm"].presets["tiny"].table_rows, "clicks": 2}, 16
    ),
    "recurrent": _program(
        "recurrent",
        ADAMW,
        _TOKENS,
        batch_size=16,
        options=StepOptions(num_micro_batches=2),
        vocab_size=32,
        context_length=8,
        num_layers=1,
        embed_dim=16,
        state_dim=16,
        hidden_dim=32,
    ),
    "graph_network": _program(
        "graph_network",
        ADAMW,
        {"senders": 32, "receivers": 32},
        batch_size=1,
        options=StepOptions(loss_scaling=LossScaling(initial=1024.0)),
        num_layers=1,
        latent_dim=16,
    ),
}
"""One program for every family."""

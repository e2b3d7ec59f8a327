"""The hand-written strategies, and their programs: the GPT of `gpt.py` and the models of the zoo.

Into the GPT each strategy also puts constraints on activations. The zoo's models stay as they are: the state and the
batch are placed by rule, parameters are cast and gathered before the loss reads them, and XLA propagates the rest.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from autoshard_models.train_step import build_for
from autoshard_models.zoo import objective_of
from jax.sharding import AxisType, Mesh

import autoshard
from autoshard.train.config import TrainConfig
from autoshard.train.models import model_config
from autoshard.train.optimizers import make_optimizer
from autoshard.train.planning import arguments
from autoshard.train.registry import train_functions
from by_hand import gpt
from by_hand.placement import DATA, TENSOR, Placement


class Recompute(enum.Enum):
    """What backward makes again instead of keeping it."""

    NOTHING = "nothing"
    ALL_BUT_PRODUCTS = "all but products"
    LAYERS = "layers"


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How a step is made parallel.

    Attributes:
      is_sharded: Whether the state is split over the data-parallel devices (FSDP). tensor: Tensor-parallel devices.
      is_sequence_split: Whether activations between blocks are split along the sequence over the tensor-parallel ones
        (Korthikanti et al. 2022, arXiv:2205.05198). recompute: In backward.
      kept_split: Parameters of this name stay split over the data-parallel devices where they are used.
      keeps_all: Whether the checkpoints of a model of the zoo are taken out, so that nothing is recomputed.
    """

    name: str
    is_sharded: bool
    tensor: int = 1
    is_sequence_split: bool = False
    recompute: Recompute = Recompute.NOTHING
    kept_split: str | None = None
    keeps_all: bool = False

    def axes(self, num_devices: int) -> tuple[tuple[str, int], ...]:
        """Mesh axes (name, size), major to minor."""
        if self.tensor == 1:
            return ((DATA, num_devices),)
        return (DATA, num_devices // self.tensor), (TENSOR, self.tensor)

    def placement(self, devices: Sequence[Any]) -> Placement:
        """Its rules on these devices."""
        axes = self.axes(len(devices))
        array = np.array(list(devices), dtype=object).reshape([size for _, size in axes])
        mesh = Mesh(array, [name for name, _ in axes], axis_types=(AxisType.Auto,) * len(axes))
        return Placement(mesh, self.is_sharded, self.kept_split)


DDP = Strategy("ddp", False)
FSDP = Strategy("fsdp", True)
FSDP_REGATHERED = Strategy("fsdp, regathered", True, recompute=Recompute.ALL_BUT_PRODUCTS)
FSDP_LAYERS = Strategy("fsdp, layers recomputed", True, recompute=Recompute.LAYERS)
MEGATRON = Strategy("megatron", False, tensor=8)
MEGATRON_SP = Strategy("megatron-sp", False, tensor=8, is_sequence_split=True)
FSDP_MEGATRON_2 = Strategy("fsdp x megatron 2", True, tensor=2)
FSDP_MEGATRON_2_SP = Strategy("fsdp x megatron-sp 2", True, tensor=2, is_sequence_split=True)
FSDP_MEGATRON_8_SP = Strategy("fsdp x megatron-sp 8", True, tensor=8, is_sequence_split=True)
FSDP_KEPT = Strategy("fsdp, all kept", True, keeps_all=True)
DDP_KEPT = Strategy("ddp, all kept", False, keeps_all=True)
FSDP_MEGATRON_2_KEPT = Strategy("fsdp x megatron 2, all kept", True, tensor=2, keeps_all=True)
EXPERTS = Strategy("fsdp + experts", True, kept_split="experts")
TABLES = Strategy("ddp + tables", False, kept_split="tables")

OF_GPT = (
    *(FSDP, FSDP_REGATHERED, FSDP_LAYERS, DDP),
    *(FSDP_MEGATRON_2_SP, MEGATRON_SP, FSDP_MEGATRON_8_SP),
)
WITHOUT_CHECKPOINTS = (FSDP_KEPT, DDP_KEPT, FSDP_MEGATRON_2_KEPT)
OF_TRANSFORMERS = (FSDP, FSDP_REGATHERED, DDP, FSDP_MEGATRON_2, MEGATRON, *WITHOUT_CHECKPOINTS)


def lowered_gpt(strategy: Strategy, sizes: gpt.Sizes, devices: Sequence[Any]) -> jax.stages.Lowered:
    """The GPT's step under a strategy, ready to compile for the devices."""
    placement = strategy.placement(devices)
    tensor = TENSOR if strategy.tensor > 1 else None
    split = lambda *entries: lambda x: jax.lax.with_sharding_constraint(x, placement.sharding(DATA, *entries))
    stream = split(tensor if strategy.is_sequence_split else None)
    interior = gpt.Interior(
        weights=lambda path, w, reads: placement.weights(path, w, "bfloat16", reads),
        residual=stream,
        # The barrier holds the cast of the norm's result to bfloat16 before its gather.
        block_input=lambda x: split()(jax.lax.optimization_barrier(stream(x)) if strategy.is_sequence_split else x),
        heads=split(None, tensor),
        scores=split(tensor),
        inner=split(None, tensor),
        logits=split(None, tensor),
        layer=lambda layer: _recomputing(strategy.recompute, layer),
    )
    step = functools.partial(gpt.step, interior=interior, fused_attention=sizes.fused_attention)
    with autoshard.assume_cudnn():
        return _lowered(step, gpt.arguments(sizes), placement)


def lowered_zoo(strategy: Strategy, config: TrainConfig, devices: Sequence[Any]) -> jax.stages.Lowered:
    """The step of a model of the zoo under a strategy, ready to compile for the devices."""
    placement, model = strategy.placement(devices), model_config(config.model)
    objective = objective_of(model)

    def weight(path: Any, leaf: jax.Array) -> jax.Array:
        return placement.weights(jax.tree_util.keystr(path), leaf, model.dtype)[0]

    def loss(params: Any, mutable: Any, batch: Any, key: Any) -> Any:
        return objective.loss(jax.tree_util.tree_map_with_path(weight, params), mutable, batch, key)

    made = build_for(
        objective._replace(loss=_recomputing(strategy.recompute, loss)),
        make_optimizer(config.optimizer, config.train.steps),
    )
    return _lowered(made.step, arguments(config, train_functions(config)), placement)


def _recomputing(recompute: Recompute, fn: Callable[..., Any]) -> Callable[..., Any]:
    match recompute:
        case Recompute.NOTHING:
            return fn
        case Recompute.ALL_BUT_PRODUCTS:
            return jax.checkpoint(fn, policy=jax.checkpoint_policies.dots_saveable)
        case Recompute.LAYERS:
            return jax.checkpoint(fn)


def _lowered(step: Callable[..., Any], args: tuple[Any, Any], placement: Placement) -> jax.stages.Lowered:
    state, batch = args
    held = placement.of(state)
    outputs = jax.eval_shape(step, state, batch)
    rest = jax.tree.map(lambda leaf: placement.sharding(), outputs[1])
    jitted = jax.jit(step, in_shardings=(held, placement.batch(batch)), out_shardings=(held, rest), donate_argnums=0)
    return jitted.lower(state, batch)

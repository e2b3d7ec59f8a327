"""Every family of models by its name: its configurations, its named sizes, its loss and its batches."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from . import (
    dlrm,
    encoder,
    encoder_decoder,
    gpt,
    gpt_linen,
    graph_network,
    llama,
    moe,
    presets,
    recurrent,
    unet,
    vit,
    vit_linen,
    wide_resnet,
)
from .objective import Objective, next_token_batch


class Family(NamedTuple):
    """Models that one module describes.

    Attributes:
        config: the class of their configurations.
        presets: named sizes.
        objective: configuration -> Objective.
        batch_shapes: (configuration, batch size) -> shapes of a batch, by name.
    """

    config: type
    presets: Mapping[str, Any]
    objective: Callable[[Any], Objective]
    batch_shapes: Callable[[Any, int], dict[str, jax.ShapeDtypeStruct]]


def _linen(config: type, sizes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Presets of an NNX model as those of its Linen twin."""
    return MappingProxyType({name: config(**dataclasses.asdict(size)) for name, size in sizes.items()})


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt": Family(gpt.GPTConfig, presets.PRESETS, gpt.objective, next_token_batch),
        "gpt_linen": Family(
            gpt_linen.LinenGPTConfig,
            _linen(gpt_linen.LinenGPTConfig, presets.PRESETS),
            gpt_linen.objective,
            next_token_batch,
        ),
        "llama": Family(llama.LlamaConfig, llama.PRESETS, llama.objective, next_token_batch),
        "encoder": Family(encoder.EncoderConfig, encoder.PRESETS, encoder.objective, encoder.batch_shapes),
        "encoder_decoder": Family(
            encoder_decoder.EncoderDecoderConfig,
            encoder_decoder.PRESETS,
            encoder_decoder.objective,
            encoder_decoder.batch_shapes,
        ),
        "moe": Family(moe.MoEConfig, moe.PRESETS, moe.objective, next_token_batch),
        "vit": Family(vit.ViTConfig, vit.PRESETS, vit.objective, vit.batch_shapes),
        "vit_linen": Family(
            vit_linen.LinenViTConfig,
            _linen(vit_linen.LinenViTConfig, vit.PRESETS),
            vit_linen.objective,
            vit.batch_shapes,
        ),
        "wide_resnet": Family(
            wide_resnet.WideResNetConfig, wide_resnet.PRESETS, wide_resnet.objective, wide_resnet.batch_shapes
        ),
        "unet": Family(unet.UNetConfig, unet.PRESETS, unet.objective, unet.batch_shapes),
        "dlrm": Family(dlrm.DLRMConfig, dlrm.PRESETS, dlrm.objective, dlrm.batch_shapes),
        "recurrent": Family(recurrent.RecurrentConfig, recurrent.PRESETS, recurrent.objective, next_token_batch),
        "graph_network": Family(
            graph_network.GraphNetworkConfig, graph_network.PRESETS, graph_network.objective, graph_network.batch_shapes
        ),
    }
)
"""All families by name."""


def objective_of(config: Any) -> Objective:
    """The objective of the model that `config` describes.

    Raises:
        TypeError: no family has a configuration of that type.
    """
    for family in FAMILIES.values():
        if type(config) is family.config:
            return family.objective(config)
    known = ", ".join(family.config.__name__ for family in FAMILIES.values())
    raise TypeError(f"no family has configurations of type {type(config).__name__}; choose one of {known}.")

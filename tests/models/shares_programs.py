"""Programs whose attention eight devices can split, and the meshes on which their shares are tried."""

import dataclasses
from typing import Any

import optax
from zoo_programs import PROGRAMS, Program

from autoshard.baselines import DataRule, Strategy, TensorRule

SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"num_heads": 8},
    "llama": {"num_heads": 16, "num_kv_heads": 8, "attention_chunks": 1},
    "encoder": {"num_heads": 8},
    "moe": {"num_heads": 8, "embed_dim": 32},
    "vit_linen": {"num_heads": 8},
}
"""What differs from the program of the zoo, by family."""
MESHES = {
    "8": (Strategy(None, TensorRule.MEGATRON), {"tensor": 8}),
    "2x4": (Strategy(DataRule.DDP, TensorRule.MEGATRON), {"data": 2, "tensor": 4}),
    "zero": (Strategy(DataRule.ZERO3, TensorRule.MEGATRON), {"data": 2, "tensor": 4}),
}
"""(strategy, mesh) by name."""


SGD = optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.sgd(0.05, momentum=0.9))
"""An optimizer that is compiled quickly."""


def program(family: str, optimizer: optax.GradientTransformation = SGD) -> Program:
    """The program of a family."""
    config = dataclasses.replace(PROGRAMS[family].config, **SIZES[family])
    return Program(config, optimizer, 8, PROGRAMS[family].below)

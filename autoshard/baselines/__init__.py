"""Data parallelism, ZeRO, tensor and expert parallelism and their mixes, as plans to compare with and to run."""

from autoshard.baselines.make import (
    Outcome,
    Settings,
    all_baselines,
    baseline,
    data_parallel,
    megatron,
    mixed,
    plan_baseline,
    prepare_subject,
    suited,
    try_baseline,
    zero,
)
from autoshard.baselines.strategies import ALL, DataRule, Spread, Strategy, TensorRule

__all__ = [
    "ALL",
    "DataRule",
    "Outcome",
    "Settings",
    "Spread",
    "Strategy",
    "TensorRule",
    "all_baselines",
    "baseline",
    "data_parallel",
    "megatron",
    "mixed",
    "plan_baseline",
    "prepare_subject",
    "suited",
    "try_baseline",
    "zero",
]

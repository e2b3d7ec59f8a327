"""Data parallelism, ZeRO, tensor parallelism and their mixes, as ordinary plans to compare with and to run."""

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
    try_baseline,
    zero,
)
from autoshard.baselines.strategies import ALL, DataRule, Strategy

__all__ = [
    "ALL",
    "DataRule",
    "Outcome",
    "Settings",
    "Strategy",
    "all_baselines",
    "baseline",
    "data_parallel",
    "megatron",
    "mixed",
    "plan_baseline",
    "prepare_subject",
    "try_baseline",
    "zero",
]

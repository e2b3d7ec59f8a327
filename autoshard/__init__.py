"""autoshard chooses how a JAX program is sharded over a cluster, proves how good the choice is, and runs it.

Names are imported on first use, so that `import autoshard` and the command line start without loading JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard import baselines, elastic, errors
    from autoshard.annotations.scopes import pipeline, replicate, split, stage
    from autoshard.api import Plan, StagedPlan, compare, diff, jit
    from autoshard.balance.options import Balance
    from autoshard.calibration import calibrate
    from autoshard.cluster import Cluster
    from autoshard.compiler.schedule import Schedule
    from autoshard.cost.id_distribution import IdDistribution
    from autoshard.cost.lookups import Lookups
    from autoshard.errors import AutoshardError
    from autoshard.host_tables.hosted import HostTables
    from autoshard.host_tables.options import Execution
    from autoshard.offloading.hosted_plan import HostTablesPlan
    from autoshard.offloading.of_step import place_tables
    from autoshard.offloading.options import TableOptions
    from autoshard.offloading.planning import plan
    from autoshard.offloading.reading import load
    from autoshard.pipelines.search.options import StageOptions
    from autoshard.plans.logical import LogicalAxes
    from autoshard.plans.logical_pins import logical_names, pins_from_logical_rules
    from autoshard.plans.naming import logical_axes
    from autoshard.plans.offline import write_problem
    from autoshard.plans.options import PlanOptions, PlanProgress
    from autoshard.report.write import write_report
    from autoshard.trace.absent_cudnn import assume_cudnn
    from autoshard.train_step import TrainState, TrainStep
    from autoshard.uneven_step import UnevenStep

__version__ = "0.2.0"

__all__ = [
    "AutoshardError",
    "Balance",
    "Cluster",
    "IdDistribution",
    "LogicalAxes",
    "Lookups",
    "Plan",
    "PlanOptions",
    "PlanProgress",
    "Schedule",
    "StageOptions",
    "StagedPlan",
    "TableOptions",
    "TrainState",
    "TrainStep",
    "UnevenStep",
    "assume_cudnn",
    "baselines",
    "calibrate",
    "compare",
    "diff",
    "elastic",
    "Execution",
    "HostTables",
    "HostTablesPlan",
    "errors",
    "jit",
    "load",
    "logical_axes",
    "logical_names",
    "pins_from_logical_rules",
    "pipeline",
    "place_tables",
    "plan",
    "replicate",
    "split",
    "stage",
    "write_problem",
    "write_report",
]

_HOMES = {
    "AutoshardError": "autoshard.errors",
    "Balance": "autoshard.balance.options",
    "Cluster": "autoshard.cluster",
    "calibrate": "autoshard.calibration",
    "compare": "autoshard.api",
    "diff": "autoshard.api",
    "Execution": "autoshard.host_tables.options",
    "HostTables": "autoshard.host_tables.hosted",
    "HostTablesPlan": "autoshard.offloading.hosted_plan",
    "jit": "autoshard.api",
    "IdDistribution": "autoshard.cost.id_distribution",
    "load": "autoshard.offloading.reading",
    "Lookups": "autoshard.cost.lookups",
    "LogicalAxes": "autoshard.plans.logical",
    "logical_axes": "autoshard.plans.naming",
    "logical_names": "autoshard.plans.logical_pins",
    "pins_from_logical_rules": "autoshard.plans.logical_pins",
    "Plan": "autoshard.api",
    "pipeline": "autoshard.annotations.scopes",
    "place_tables": "autoshard.offloading.of_step",
    "PlanOptions": "autoshard.plans.options",
    "PlanProgress": "autoshard.plans.options",
    "plan": "autoshard.offloading.planning",
    "replicate": "autoshard.annotations.scopes",
    "Schedule": "autoshard.compiler.schedule",
    "split": "autoshard.annotations.scopes",
    "stage": "autoshard.annotations.scopes",
    "StageOptions": "autoshard.pipelines.search.search",
    "StagedPlan": "autoshard.api",
    "TableOptions": "autoshard.offloading.options",
    "TrainState": "autoshard.train_step",
    "TrainStep": "autoshard.train_step",
    "UnevenStep": "autoshard.uneven_step",
    "assume_cudnn": "autoshard.trace.absent_cudnn",
    "write_problem": "autoshard.plans.offline",
    "write_report": "autoshard.report.write",
}
"""Where each public name lives; names not listed here are sub-packages."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}; it has {', '.join(__all__)}.")
    home = _HOMES.get(name)
    return (
        importlib.import_module(f"autoshard.{name}") if home is None else getattr(importlib.import_module(home), name)
    )


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

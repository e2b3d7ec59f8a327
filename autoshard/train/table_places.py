"""Which embedding tables of a run go to host memory, and how its steps follow each other then: `execution.mode`."""

import os
from typing import Any

from autoshard.cost.id_distribution import IdDistribution
from autoshard.errors import ConfigError
from autoshard.host_tables.options import Execution
from autoshard.offloading.host_part import HostPart, agreed
from autoshard.offloading.of_step import place_tables
from autoshard.offloading.search import SearchOptions
from autoshard.train.config import ExecutionSection, TrainConfig
from autoshard.train_step import TrainStep

_MOST_WORKERS = 8
"""Where nothing else is known: half of the CPUs look rows up, at most so many, which together use most of a memory's
bandwidth; an estimate."""


def host_part(config: TrainConfig, step: Any, state: Any, batch: Any) -> HostPart | None:
    """What `config` puts into host memory; None for nothing.

    Args:
        config: the run. step: its step, a `TrainStep` if `execution.mode` is given.
        state, batch: its arguments, by shape.

    Raises:
        ConfigError: `auto` without a cluster file, stages are to be tried (`plan.pipelines`), or the loss looks nothing
            up.
        ClusterError: `auto` for a cluster whose hosts are not described.
        MemoryBudgetError: `auto`, and tables fit nowhere.
    """
    section = config.execution
    if section.mode is None:
        return None
    if config.plan.pipelines == "search":
        raise ConfigError(
            "plan.pipelines: the step over the rows of a batch is one program (execution.mode is "
            f"`{section.mode}`); received `search`. Leave plan.pipelines out, or execution.mode."
        )
    if section.mode != "auto":
        tables = None if section.tables is None else tuple(section.tables)
        at_host = tuple(section.pooled or ()), tuple(section.host_layers or ())
        return HostPart(tables, _execution(section), section.hot_rows or {}, *at_host)
    if config.plan.cluster is None:
        raise ConfigError(
            "execution.mode: `auto` decides by what the hosts of the cluster can do; received no plan.cluster. Name a "
            "cluster file that describes them, such as configs/clusters/h100x8_cpu.yaml, or choose sync, pipelined or "
            "async."
        )
    lookups, cluster = config.plan.lookups, config.plan.cluster
    assert isinstance(step, TrainStep)
    search = SearchOptions(
        max_staleness=section.max_staleness if section.may_be_stale else 0,
        hot_rows=section.may_keep_hot_rows,
        pooling=section.may_pool,
        host_layers=section.may_run_layers if section.host_layers is None else tuple(section.host_layers),
    )
    ids = IdDistribution(lookups.zipf_exponent, lookups.is_ranked)
    return agreed(lambda: place_tables(step, state, batch, cluster=cluster, ids=ids, search=search))


def _execution(section: ExecutionSection) -> Execution:
    assert section.mode is not None and section.mode != "auto"
    cpus = len(section.worker_cpus or ()) or len(os.sched_getaffinity(0)) // 2
    return Execution(
        section.mode,
        max_staleness=section.max_staleness,
        num_workers=section.num_workers or max(1, min(cpus, _MOST_WORKERS)),
        prefetch=section.prefetch,
        timeout_s=section.timeout_s,
        worker_cpus=None if section.worker_cpus is None else tuple(section.worker_cpus),
    )

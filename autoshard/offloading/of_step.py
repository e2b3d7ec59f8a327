"""Tables and dense part of a training step, as `situation.py` wants them."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autoshard.api import Plan, plan_on_devices
from autoshard.cluster import Cluster
from autoshard.cost.id_distribution import IdDistribution
from autoshard.errors import ConfigError
from autoshard.offloading.placement import TablePlacement, placement_of
from autoshard.offloading.search import SearchOptions
from autoshard.offloading.situation import DenseWork, HostCut, HostRates, Situation, TableUse, described_host, situation
from autoshard.plans.make import budget_of, load_cluster
from autoshard.plans.options import PlanOptions
from autoshard.tables import Cut, Table, Tables, find_tables
from autoshard.tables.sparse_step import cut_at_look_ups, cuts_of_step
from autoshard.tables.state_rows import RowLeaf, param_leaves, row_leaves
from autoshard.tables.traced_loss import shape_like
from autoshard.train_step import TrainStep

_FEW_ROWS = 64
"""Of each table, while the rest of the step is planned: what they take then is hardly anything."""


def place_tables(
    step: TrainStep,
    state: Any,
    batch: Any,
    *,
    cluster: Cluster | str | os.PathLike[str],
    ids: IdDistribution | Mapping[str, IdDistribution] | None = None,
    rates: HostRates | None = None,
    search: SearchOptions | None = None,
    options: PlanOptions | None = None,
    mesh: Mapping[str, int] | None = None,
    memory_budget_bytes: float | None = None,
) -> TablePlacement:
    """Decides where the embedding tables of a training step live, and how its batches follow each other.

    The tables are found in the loss, as look-ups of whole rows. The rest of the step is planned by `autoshard.plan`
    with a few rows of each table, for its time and memory on the accelerators.

    Args:
      step: The training step. state, batch: Its arguments, arrays or shapes; nothing is allocated.
      cluster: Devices of one kind with described hosts, or a path to its file.
      ids: How often each row is looked up: of all tables, or by path of the table; None: all rows alike.
      rates: What a CPU does in a second; None for estimates.
      search: What may be chosen.
      options, mesh: For the plan of the rest.
      memory_budget_bytes: Limit per device, as for `autoshard.plan`.

    Returns:
      The placement. `host_tables` and `execution` are what `autoshard.HostTables` takes.

    Raises:
      ConfigError: The loss looks nothing up, or `ids` names no table.
      ClusterError: Hosts are not described.
      MemoryBudgetError: No placement fits.
    """
    hardware, options = load_cluster(cluster), options or PlanOptions()
    state, batch = jax.tree.map(shape_like, (state, batch))
    found = find_tables(step, state, batch)
    if not found.tables:
        raise ConfigError(f"Tables are placed, and the loss looks no table up: {found}. Plan the step as it is.")
    described_host(hardware)
    if isinstance(ids, Mapping) and (unknown := set(ids) - {t.path for t in found.tables}):
        raise ConfigError(f"`ids` names tables of the loss; it has none called {min(unknown)!r}.\n{found}")
    few = [min(table.num_rows, _FEW_ROWS) for table in found.tables]
    rest = plan_on_devices(
        *cut_at_look_ups(step, state, batch, found.tables, few),
        cluster=hardware,
        mesh=mesh,
        donate_argnums=0,
        memory_budget_bytes=memory_budget_bytes,
        options=options,
    )
    if not isinstance(rest, Plan):
        raise ConfigError("Tables are placed beside a dense part in one program; the plan has stages. Plan without.")
    told = rest.estimate
    memory_bytes = told.peak_bytes if told.reserved_bytes is None else told.reserved_bytes
    dense = DenseWork(told.step_s, memory_bytes, told.flops * rest.num_devices)
    budget_bytes = budget_of(hardware.groups[0].device_type, memory_budget_bytes, options)
    is_cut = search is not None and (search.pooling or search.host_layers)
    cuts = cuts_of_step(step, state, batch) if is_cut else ()
    placed_on = situation_of(
        found, state, batch, hardware, dense, ids=ids, rates=rates, budget_bytes=budget_bytes, cuts=cuts
    )
    return placement_of(placed_on, search)


def situation_of(
    found: Tables,
    state: Any,
    batch: Any,
    cluster: Cluster,
    dense: DenseWork,
    *,
    ids: IdDistribution | Mapping[str, IdDistribution] | None,
    rates: HostRates | None,
    budget_bytes: float | None = None,
    cuts: Sequence[Cut] = (),
) -> Situation:
    """The tables of a step on a cluster, beside the rest of it.

    Args:
      found: Tables of the loss. state, batch: Arguments of the step, by shape.
      cluster: Devices of one kind with described hosts. dense: The rest of the step.
      ids, rates: As for `place_tables`. budget_bytes: Of each accelerator; None for nine tenths of its memory.
      cuts: Of the loss, that its optimizer allows.
    """
    leaves = row_leaves(state, found.tables)
    is_pooling = lambda cut: len(cut.tables) == 1 and not cut.params
    sums = {cut.tables[0].path: -(-cut.size_bytes // cut.tables[0].row_bytes) for cut in cuts if is_pooling(cut)}
    uses = tuple(_use(number, table, leaves, ids, sums.get(table.path, 0)) for number, table in enumerate(found.tables))
    host_cuts = tuple(_host_cut(cut, state) for cut in cuts if not is_pooling(cut))
    batch_size = max(x.shape[0] for x in jax.tree.leaves(batch) if x.shape)
    limits = {"budget_bytes": budget_bytes, "rates": rates}
    return situation(cluster, uses, dense, batch_size, **limits, updates_all_rows=True, cuts=host_cuts)


def _host_cut(cut: Cut, state: Any) -> HostCut:
    """A cut as it is priced."""
    tables, params = cut.names
    leaves = param_leaves(state, {param.index for param in cut.params})
    state_bytes = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in leaves)
    return HostCut(tables, params, cut.size_bytes, cut.flops, cut.dtype, state_bytes)


def _use(number: int, table: Table, leaves: tuple[RowLeaf, ...], ids: Any, num_sums: int) -> TableUse:
    """A table as it is placed; what the optimizer keeps has its rows, too."""
    own = [x for x in leaves if x.table == number]
    state_bytes = sum(math.prod(x.row_shape) * np.dtype(x.dtype).itemsize for x in own)
    spread = ids.get(table.path) if isinstance(ids, Mapping) else ids
    spread = spread or IdDistribution()
    return TableUse(table.path, table.num_rows, table.row_bytes, state_bytes, table.num_ids, spread, num_sums)

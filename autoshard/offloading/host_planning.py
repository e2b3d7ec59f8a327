"""Plans with tables in host memory: where the devices cannot hold them, and where a step is faster so."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from autoshard.api import Plan, plan_on_devices
from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError, ClusterError, ConfigError
from autoshard.offloading.choices import choices_of, on_host, spared_s
from autoshard.offloading.host_part import HostPart
from autoshard.offloading.hosted_plan import HostTablesPlan
from autoshard.offloading.of_step import place_tables, situation_of
from autoshard.offloading.options import TableOptions
from autoshard.offloading.placement import TablePlacement
from autoshard.offloading.search import SearchOptions
from autoshard.offloading.situation import DenseWork, Situation, described_host
from autoshard.plans.options import PlanOptions
from autoshard.printing import seconds
from autoshard.tables import Tables, find_tables
from autoshard.tables.row_updates import row_updates
from autoshard.tables.sparse_step import cuts_of_step
from autoshard.tables.traced_loss import shape_like
from autoshard.train_step import TrainStep


@dataclasses.dataclass(frozen=True, slots=True)
class HostPlanner:
    """A training step, and what its plan must obey: arguments of `autoshard.plan` that go with host memory."""

    step: TrainStep
    state: Any
    batch: Any
    cluster: Cluster
    tables: TableOptions
    options: PlanOptions
    mesh: Mapping[str, int] | None
    memory_budget_bytes: float | None
    configuration: str | None

    @property
    def has_tables(self) -> bool:
        """Whether the loss looks rows up in tables that have more rows than it reads."""
        return _is_worth_a_look(find_tables(self.step, self.state, self.batch))

    def where_devices_do_not_suffice(self) -> HostTablesPlan:
        """The plan of a step that does not fit the devices.

        Raises:
          AutoshardError: There is none.
        """
        placed = self._placed(self.tables.search)
        if not placed.host_tables:
            raise ConfigError(
                "All tables fit the devices where the state is donated and hardly more is needed. Pass "
                "donate_argnums=0, or choose by hand which tables are in host memory: autoshard.HostTables."
            )
        return self._planned(placed, math.inf)

    def where_faster(self, on_devices: Plan) -> Plan | HostTablesPlan:
        """The plan whose step is predicted to be shorter by the gain that is asked for, or the one on devices, which
        then tells why.

        Where all that tables take on the devices is less than that gain, nothing more is planned; nor is the step over
        rows where the prices of all places say enough.

        Args:
          on_devices: The plan with all tables on the devices.
        """
        least, own_s = self.tables.least_gain, on_devices.estimate.step_s
        if not (math.isfinite(least) and _describes_hosts(self.cluster)):
            return on_devices
        found = find_tables(self.step, self.state, self.batch)
        if not _is_worth_a_look(found):
            return on_devices
        stays = lambda why: dataclasses.replace(on_devices, on_hosts=f"tables stay on the devices: {why}")
        takes = lambda placed, step_s: stays(
            f"{seconds(step_s)} a step with {len(placed.host_tables)} in host memory, not {least:.0%} less"
        )
        try:
            saved_s = self._most_saved_s(found)
            if saved_s <= least * own_s:
                return stays(f"without them a step would be at most {seconds(max(saved_s, 0.0))} shorter")
            placed = self._placed(self.tables.search_for_time)
            if not placed.host_tables:
                return stays("by the prices of all places, none is faster in host memory")
            if placed.step_s > (1 - least) * own_s:
                return takes(placed, placed.step_s)
            made = self._planned(placed, own_s)
        except AutoshardError as error:
            return stays(str(error))
        return made if made.step_s <= (1 - least) * own_s else takes(placed, made.step_s)

    def _most_saved_s(self, found: Tables) -> float:
        """The most that a step on the devices could take longer for its tables, by prices of the dearest place of each.

        Raises:
          TraceError: The update may not run on the rows of a batch alone.
        """
        state, batch = jax.tree.map(shape_like, (self.state, self.batch))
        row_updates(self.step, state, found.tables, self.tables.lazy)
        ids, rates = self.options.lookups.ids, self.tables.rates
        cuts = cuts_of_step(self.step, state, batch) if self.tables.host_layers else ()
        dense = DenseWork(0.0, 0.0, 0.0)
        s = situation_of(found, state, batch, self.cluster, dense, ids=ids, rates=rates, cuts=cuts)
        return most_saved_s(s)

    def _placed(self, search: SearchOptions) -> TablePlacement:
        return place_tables(
            self.step,
            self.state,
            self.batch,
            cluster=self.cluster,
            ids=self.options.lookups.ids,
            rates=self.tables.rates,
            search=search,
            options=dataclasses.replace(self.options, compile_check=False, compile_check_meshes=1),
            mesh=self.mesh,
            memory_budget_bytes=self.memory_budget_bytes,
        )

    def _planned(self, placed: TablePlacement, on_devices_s: float) -> HostTablesPlan:
        """The plan of the step over rows, with tables where they were placed."""
        part = HostPart.of(placed)
        assert part is not None
        sparse = part.step_over_rows(self.step, self.state, self.batch, self.tables.lazy)
        over_rows = plan_on_devices(
            sparse.step,
            sparse.state,
            sparse.batch,
            cluster=self.cluster,
            mesh=self.mesh,
            donate_argnums=0,
            memory_budget_bytes=self.memory_budget_bytes,
            options=self.options,
            configuration=self.configuration,
        )
        assert isinstance(over_rows, Plan)  # since the rest of the step has such a plan
        shapes = jax.tree.map(shape_like, (self.state, self.batch))
        return HostTablesPlan(placed, over_rows, str(sparse.update), self.tables.lazy, on_devices_s, shapes)


def _is_worth_a_look(found: Tables) -> bool:
    return any(table.most_rows < table.num_rows for table in found.tables)


def most_saved_s(s: Situation) -> float:
    """Seconds of a step that accelerators could be spared at most, if a planner had put each table at the place that is
    the dearest for them, and if the host ran all layers that it can.
    """
    saved = max((spared_s(cut, s) for cut in s.cuts), default=0.0)
    for table in s.tables:
        theirs = [c.loads.accelerator_s for c in choices_of(table, s, False) if not c.place.is_on_host]
        saved += max(max(theirs) - on_host(table, s).loads.accelerator_s, 0.0)
    return saved


def _describes_hosts(cluster: Cluster) -> bool:
    try:
        described_host(cluster)
    except ClusterError:
        return False
    return True

"""What a caller fixes of embedding tables and host memory."""

import dataclasses

from autoshard.errors import ConfigError
from autoshard.host_tables.options import Mode
from autoshard.offloading.choices import Place
from autoshard.offloading.search import SearchOptions
from autoshard.offloading.situation import HostRates

_PLACES = (Place.WHOLE, Place.HOST, Place.POOLED, Place.LAYERS, Place.HOT_ROWS)
"""Those of a step that has no plan on the devices: how large a table is there that is split is then known by the
planner alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class TableOptions:
    """What may be done with embedding tables that do not fit the devices; for `autoshard.plan`.

    Attributes:
      on_hosts: Whether they may live in host memory. Without, a step that does not fit has no plan.
      least_gain: Share of the step, predicted, that host memory must save before tables leave devices that have room
        for them; `math.inf` to keep these there.
      mode: How steps follow each other, as in `autoshard.Execution`; None: `sync` or `pipelined`, which give the same
        results, or with `max_staleness` also `async`, whatever is predicted to be fastest.
      max_staleness: Steps whose updates a row may lack; with 0, results are exact.
      hot_rows: Whether the most frequent rows of a table may stay on the devices.
      pooling: Whether the host may sum rows of a table, where the loss does nothing else with them, so that only sums
        are sent. In `sync` and `async`, of one host; not together with `hot_rows`.
      host_layers: Whether dense layers may run at the host, right behind the rows that they read; or paths of the
        parameters whose layers must, and no others (`autoshard.tables.find_cuts` tells which can). As for `pooling`.
      lazy: Accept an update that leaves rows without a gradient as they are where that of whole tables changes them
        (momentum, Adam, weight decay).
      rates: What a CPU does in a second; None for estimates.

    Raises:
      ConfigError: The mode is none, or `async` without staleness; the gain is negative.
    """

    on_hosts: bool = True
    least_gain: float = 0.05
    mode: Mode | None = None
    max_staleness: int = 0
    hot_rows: bool = False
    pooling: bool = False
    host_layers: bool | tuple[str, ...] = False
    lazy: bool = False
    rates: HostRates | None = None

    def __post_init__(self) -> None:
        if self.mode not in (None, "sync", "pipelined", "async"):
            raise ConfigError(f"TableOptions.mode is sync, pipelined or async; received {self.mode!r}. Choose one.")
        if not self.least_gain >= 0:
            raise ConfigError(
                f"TableOptions.least_gain is a share of the step, 0 or more; received {self.least_gain}. Give 0.05 for "
                "one in twenty, or math.inf to keep what fits on the devices."
            )
        if self.mode == "async" and self.max_staleness < 1:
            raise ConfigError(
                "TableOptions.max_staleness bounds the steps whose updates a row may lack in the mode `async`; "
                f"received {self.max_staleness}. Give 1 or more, or choose `pipelined`, whose results are exact."
            )

    @property
    def search(self) -> SearchOptions:
        """What may be chosen where the devices do not suffice, as `place_tables` takes it."""
        return dataclasses.replace(self.search_for_time, places=_PLACES)

    @property
    def search_for_time(self) -> SearchOptions:
        """What may be chosen where they do."""
        chosen = SearchOptions(
            max_staleness=self.max_staleness,
            hot_rows=self.hot_rows,
            pooling=self.pooling,
            host_layers=self.host_layers,
        )
        return chosen if self.mode is None else dataclasses.replace(chosen, modes=(self.mode,))

"""How look-ups, steps and write-backs follow each other."""

import dataclasses
from typing import Literal

from autoshard.errors import ConfigError

Mode = Literal["sync", "pipelined", "async"]


@dataclasses.dataclass(frozen=True, slots=True)
class Execution:
    """How a step with tables in host memory runs.

    Attributes:
      mode: `sync`: the rows of a batch are looked up, the step runs, its rows are written back, one after another.
        `pipelined`: rows of coming batches are looked up and those of past ones written back while a step runs; rows
        that were not written back yet are patched from the steps that have them, so that results equal `sync` bit for
        bit. `async`: they are not patched: a row may lack the updates of up to `max_staleness` steps before, and what
        is written back is added to it.
      max_staleness: Of `async`: steps whose updates a look-up may miss.
      num_workers: Processes that own the rows, each the same number of each table.
      prefetch: Batches that are looked up ahead of the step. In `async`, `max_staleness` is a limit for it too.
      timeout_s: A worker that does not answer for so long counts as lost.
      worker_cpus: CPUs that the workers, and the threads that serve them, may use; None for all.
    """

    mode: Mode = "pipelined"
    max_staleness: int = 2
    num_workers: int = 2
    prefetch: int = 2
    timeout_s: float = 60.0
    worker_cpus: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_staleness", 0), ("num_workers", 1), ("prefetch", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"Execution.{name} must be at least {least}; received {getattr(self, name)}. Raise it."
                )
        if self.mode not in ("sync", "pipelined", "async"):
            raise ConfigError(f"Execution.mode is sync, pipelined or async; received {self.mode!r}. Choose one.")

    @property
    def num_slots(self) -> int:
        """Credits: batches between their look-up and the end of their write-back, at most."""
        if self.mode == "sync":
            return 1
        ahead = self.prefetch + 2  # one in the step, one on its way back
        return ahead if self.mode == "pipelined" else min(ahead, self.max_staleness + 1)

    @property
    def staleness(self) -> int:
        """Steps whose updates a look-up may miss, at most."""
        return self.num_slots - 1 if self.mode == "async" else 0

    @property
    def outline(self) -> str:
        """The mode, and how many batches are under way at once."""
        return self.mode if self.mode == "sync" else f"{self.mode}, {self.num_slots} batches under way"

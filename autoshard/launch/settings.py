"""What a supervised run is told: its size, its limits of time, and how many failures it may have."""

import dataclasses
import pathlib

from autoshard.launch.engines.protocol import Command
from autoshard.run_processes import RUN_VARIABLE

REJOIN_AFTER_S = 30.0
"""How long a slot whose worker was lost is left alone where nothing else is asked for: a choice."""


@dataclasses.dataclass(frozen=True, slots=True)
class Budgets:
    """How often a run may lose workers.

    Attributes:
        preemptions: losses of whole hosts and drains by a notice of preemption; None for any number.
        crashes: workers that crashed or stalled.
        at_one_step: failures at the same step with the same error, after which the error counts as deterministic.
        at_one_slot: failures of one slot in a row, after which it is left out.
    """

    preemptions: int | None = None
    crashes: int = 100
    at_one_step: int = 3
    at_one_slot: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchSettings:
    """A supervised run.

    Attributes:
        run_dir: its output folder.
        least_workers, most_workers: its size; equal for a run that replaces what it loses.
        devices_per_worker: CPU devices of each worker; None for the accelerators of its host.
        arguments: the command line of a worker's process.
        budgets: how many failures it may have.
        rejoin_after_s: how long a slot whose worker was lost is left alone, in a run whose size may change.
        stall_limit_s: longest time without a heartbeat; None to derive it from what was measured.
        has_standbys: keep processes ready which have imported everything, for the next generation.
        plans_ahead: plan and compile for the likely next sizes while a generation runs on CPU devices.
    """

    run_dir: pathlib.Path
    least_workers: int
    most_workers: int
    devices_per_worker: int | None
    arguments: tuple[str, ...]
    budgets: Budgets = Budgets()
    rejoin_after_s: float = REJOIN_AFTER_S
    stall_limit_s: float | None = None
    has_standbys: bool = True
    plans_ahead: bool = True

    @property
    def run_variable(self) -> tuple[str, str]:
        """The environment variable by which processes of this run are known, and its value."""
        return RUN_VARIABLE, str(self.run_dir)

    @property
    def command(self) -> Command:
        """How a worker's process is started."""
        return Command(self.arguments, dict([self.run_variable]), str(self.run_dir / "logs"))

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change."""
        return self.least_workers < self.most_workers

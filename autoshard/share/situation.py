"""What a policy sees, and what it decides."""

import dataclasses
from collections.abc import Mapping

from autoshard.share.pool import Node, Placement
from autoshard.share.rates import Rates


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A job that does not change while it runs.

    Attributes:
        name: of its own.
        steps: steps that it takes in all.
        rates: what it may run on, and how fast.
        arrival_s: when it came.
        weight: how much it counts.
        deadline_s: when it should be done, on the clock of `arrival_s`; None without.
        is_elastic: its devices may change while it runs.
        is_preemptible: it may be stopped, and go on later.
        move_s: time without steps where its devices change: save, stop, start, plan, restore.
        request: devices that it asks for where sizes are fixed; 0 for the least of its rates.
    """

    name: str
    steps: float
    rates: Rates
    arrival_s: float = 0.0
    weight: float = 1.0
    deadline_s: float | None = None
    is_elastic: bool = True
    is_preemptible: bool = True
    move_s: float = 60.0
    request: int = 0

    @property
    def requested(self) -> int:
        """Devices of a job whose size is fixed: the request, or the nearest size that it can have."""
        sizes = sorted({rate.footprint.num_devices for rate in self.rates.entries})
        return min(sizes, key=lambda size: (abs(size - self.request), size))


@dataclasses.dataclass(frozen=True, slots=True)
class JobState:
    """A job that is there and not done.

    Attributes:
        job: what it is.
        remaining_steps: steps that are left.
        placement: where it runs; None while it waits.
        num_moves: how often its devices changed while it ran.
        has_run: whether it ever ran.
        paused_until_s: until when it takes no step, since it was just placed.
    """

    job: Job
    remaining_steps: float
    placement: Placement | None = None
    num_moves: int = 0
    has_run: bool = False
    paused_until_s: float = 0.0

    @property
    def rate(self) -> float:
        """Steps in a second where it is now."""
        return 0.0 if self.placement is None else self.job.rates.of(self.placement.footprint)

    def ends_s(self, now_s: float) -> float:
        """When it would end if nothing changed; infinite while it waits."""
        rate = self.rate
        return max(self.paused_until_s, now_s) + self.remaining_steps / rate if rate else float("inf")


@dataclasses.dataclass(frozen=True, slots=True)
class Situation:
    """The cluster at one moment: nodes that are there, and jobs that are not done, in the order of arrival."""

    now_s: float
    nodes: tuple[Node, ...]
    jobs: tuple[JobState, ...]

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return sum(node.num_devices for node in self.nodes)


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """Who runs where from now on; whoever is not named waits.

    Attributes:
        placements: by name of the job.
        value, bound: of the objective, and what no decision exceeds; None where the policy proves nothing.
        decided_in_s: time it took.
    """

    placements: Mapping[str, Placement]
    value: float | None = None
    bound: float | None = None
    decided_in_s: float = 0.0

    @property
    def gap(self) -> float | None:
        """How far the value may be from the best one, relative to it."""
        if self.value is None or self.bound is None:
            return None
        return max(self.bound - self.value, 0.0) / max(abs(self.value), abs(self.bound), 1e-12)

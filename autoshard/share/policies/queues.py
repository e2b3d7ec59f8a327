"""What schedulers of batch jobs do: fixed sizes, no job moved or stopped, a queue in some order.

A job asks for a number of devices of one kind, and takes the kind on which it ends soonest.
"""

import dataclasses
from collections.abc import Sequence

from autoshard.share.pool import FreeDevices, Placement
from autoshard.share.rates import Rate
from autoshard.share.situation import Decision, JobState, Situation


@dataclasses.dataclass(frozen=True, slots=True)
class FifoBackfill:
    """First in, first out, with EASY backfill (Lifka 1995): others may overtake where the first in the queue is not
    delayed. Run times are known exactly, which no such scheduler is told in practice.
    """

    name: str = "fifo"
    round_s: float = 0.0

    def decide(self, situation: Situation) -> Decision:
        """The oldest job that waits starts, or gets the earliest reservation that running jobs leave."""
        placements, free, queue = _running(situation)
        while queue:
            head = queue[0]
            started = _start(free, _requests(head))
            if started is None:
                break
            placements[head.job.name] = started
            queue = queue[1:]
        if queue:
            reserved = _reservation(situation, placements, queue[0])
            for state in queue[1:]:
                self._backfill(situation, placements, free, state, queue[0], reserved)
        return Decision(placements)

    def _backfill(
        self,
        situation: Situation,
        placements: dict[str, Placement],
        free: FreeDevices,
        state: JobState,
        head: JobState,
        reserved: float | None,
    ) -> None:
        """Starts a job if the reservation of the first one is no later for it."""
        for rate in _requests(state):
            placement = free.place(rate.footprint)
            if placement is None:
                continue
            trial = {**placements, state.job.name: placement}
            after = _reservation(situation, trial, head)
            if reserved is None or (after is not None and after <= reserved + 1e-6):
                free.take(placement)
                placements[state.job.name] = placement
                return


@dataclasses.dataclass(frozen=True, slots=True)
class ShortestJobFirst:
    """Of the jobs that wait, the one that takes least time starts first; those that do not fit are passed over."""

    name: str = "sjf"
    round_s: float = 0.0

    def decide(self, situation: Situation) -> Decision:
        """Starts what fits, the shortest first."""
        placements, free, queue = _running(situation)
        for state in sorted(queue, key=lambda own: own.remaining_steps / _requests(own)[0].steps_per_s):
            started = _start(free, _requests(state))
            if started is not None:
                placements[state.job.name] = started
        return Decision(placements)


def _running(situation: Situation) -> tuple[dict[str, Placement], FreeDevices, list[JobState]]:
    """Who runs on nodes that are there, what is free beside them, and who waits, by arrival."""
    there = {node.number for node in situation.nodes}
    placements = {
        state.job.name: state.placement
        for state in situation.jobs
        if state.placement is not None and state.placement.nodes <= there
    }
    waiting = [state for state in situation.jobs if state.job.name not in placements]
    return placements, FreeDevices(situation.nodes, placements.values()), waiting


def _requests(state: JobState) -> Sequence[Rate]:
    """The footprints of the size that a job asks for, the fastest first."""
    size = state.job.requested
    fitting = [rate for rate in state.job.rates.entries if rate.footprint.num_devices == size]
    return sorted(fitting, key=lambda rate: -rate.steps_per_s)


def _start(free: FreeDevices, requests: Sequence[Rate]) -> Placement | None:
    """Takes the fastest of the requests that fits."""
    for rate in requests:
        placement = free.place(rate.footprint)
        if placement is not None:
            free.take(placement)
            return placement
    return None


def _reservation(situation: Situation, placements: dict[str, Placement], head: JobState) -> float | None:
    """When the first in the queue could end at the earliest, as running jobs end; None if it never fits."""
    states = {state.job.name: state for state in situation.jobs}
    ends = sorted((_end_s(states[name], placement, situation.now_s), name) for name, placement in placements.items())
    free = FreeDevices(situation.nodes, placements.values())
    best: float | None = None
    for start_s, name in [(situation.now_s, None), *ends]:
        if name is not None:
            free.give(placements[name])
        for rate in _requests(head):
            end_s = start_s + head.remaining_steps / rate.steps_per_s
            if (best is None or end_s < best) and free.place(rate.footprint) is not None:
                best = end_s
    return best


def _end_s(state: JobState, placement: Placement, now_s: float) -> float:
    if state.placement is not None:
        return state.ends_s(now_s)
    return now_s + state.job.move_s + state.remaining_steps / state.job.rates.of(placement.footprint)

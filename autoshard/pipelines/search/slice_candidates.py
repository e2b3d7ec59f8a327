"""All candidates on one slice of the cluster, and how many examples each manages in a time, by bounds and by guess."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autoshard.pipelines.search.candidate import Candidate
from autoshard.pipelines.search.candidates import CandidateSet
from autoshard.pipelines.search.options import StageOptions
from autoshard.pipelines.search.replica_group import SearchContext
from autoshard.pipelines.search.waiting_bounds import WaitingBounds

SMALL_SLICE = 16
"""On slices of no more submeshes than this, replicas may leave some of them out."""
CLOSE_ENOUGH = 1e-3
"""Share of a bound to which it is found."""
HALVINGS = 50
"""Steps in which the time is found in which all slices together manage the batch."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SliceCandidates:
    """Candidates of one slice, whose times grow by `each_s` with every micro-batch of a replica.

    Attributes:
      candidates: As many replicas of each as there is room for.
      each_s, waits_s: [candidates]: time of a micro-batch, at least; what is expected to come to all of them.
      most_rounds: Micro-batches of a replica, if they are fixed.
      others: Replicas on other slices, at most.
    """

    candidates: tuple[Candidate, ...]
    each_s: np.ndarray
    waits_s: np.ndarray
    most_rounds: int | None
    others: int = 0

    def examples(self, time_s: float, *, at_best: bool) -> np.ndarray:
        """The most that each candidate manages in a time: as is to be expected, or by the bound on it."""
        room_s = time_s if at_best else time_s - self.waits_s
        rounds = np.maximum(0, np.floor(room_s / self.each_s * (1 + 1e-12)))
        return self.per_round * (rounds if self.most_rounds is None else np.minimum(rounds, self.most_rounds))

    @property
    def per_round(self) -> np.ndarray:
        """Examples of one micro-batch on every replica."""
        return np.array([s.micro_batch_size * s.num_pipelines for s in self.candidates])


def slice_candidates(
    context: SearchContext, index: int, sizes: Sequence[int], options: StageOptions, others: int = 0
) -> SliceCandidates:
    """All candidates on one slice, with as many replicas as there is room for; on a small slice also with fewer.

    Args:
      context: Costs, cluster, memory.
      index: The slice. sizes: Of micro-batches.
      options: What is fixed.
      others: Replicas on other slices, which take their part of the optimizer's state.
    """
    candidates: list[Candidate] = []
    for option, x in enumerate(context.topology.table.options):
        if x.slice != index or x.num_devices > (options.most_devices_per_stage or math.inf):
            continue
        for size in sizes:
            candidate_set = CandidateSet(context, (option,), size)
            if candidate_set.is_possible:
                slots = int(candidate_set.slots[0])
                for num in _numbers(slots):
                    counts = candidate_set.counts(num, options, num + others)
                    if slots > SMALL_SLICE:
                        counts = counts[slots // counts[:, 0] == num]
                    candidates += candidate_set.candidates_of(
                        counts, num, 1, options, math.inf, len(counts), num + others
                    )[0]
    each_s = np.array([s.each_s for s in candidates])
    return SliceCandidates(
        tuple(candidates),
        each_s,
        np.array([s.guess_s for s in candidates]) - each_s,
        options.num_micro_batches,
        others,
    )


def _numbers(slots: int) -> list[int]:
    """Numbers of replicas."""
    return sorted(
        {slots // submeshes for submeshes in range(1, slots + 1)} | set(range(1, min(slots, SMALL_SLICE) + 1))
    )


def least_time_s(rows: Sequence[SliceCandidates], batch_size: int, *, at_best: bool) -> float:
    """Least time in which the slices together manage the batch, each with the candidate that manages most in it."""

    def manage(time_s: float) -> bool:
        return sum(row.examples(time_s, at_best=at_best).max() for row in rows) >= batch_size

    low, high = 0.0, min(float((row.each_s + np.maximum(0.0, row.waits_s)).min()) for row in rows)
    for _ in range(HALVINGS):
        if manage(high):
            break
        low, high = high, 2 * high
    else:
        return math.inf
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if manage(middle) else (middle, high)
    return low if at_best else high


def least_waiting_s(
    context: SearchContext, rows: Sequence[SliceCandidates], batch_size: int, from_s: float, to_s: float
) -> float:
    """The bound of `least_time_s`, made better between two times: each candidate's submeshes wait for each other.

    In time T, no slice manages more than m R M examples, with the most micro-batches M that `waiting_bounds` does not
    rule out of any candidate with R replicas and micro-batches of m. What slices send to each other is not counted.
    """
    waiting = WaitingBounds(context)

    def manage(time_s: float) -> bool:
        return sum(_most_examples(waiting, row, time_s) for row in rows) >= batch_size

    if not math.isfinite(to_s) or not manage(to_s):
        return max(from_s, to_s) if math.isfinite(to_s) else from_s
    low, high = from_s, to_s
    while high - low > CLOSE_ENOUGH * high:
        middle = (low + high) / 2
        low, high = (low, middle) if manage(middle) else (middle, high)
    return low


def _most_examples(waiting: WaitingBounds, row: SliceCandidates, time_s: float) -> int:
    """No candidate of a slice manages more examples in a time."""
    most, rounds, best = row.examples(time_s, at_best=True), row.per_round, 0
    for k in np.argsort(-most, kind="stable"):
        if most[k] <= best:
            break
        per_round, one = int(rounds[k]), row.candidates[k]
        least, owners = best // per_round + 1, one.num_pipelines + row.others
        number = waiting.most_micro_batches(one, time_s, least, int(most[k] // per_round), owners)
        best = max(best, number * per_round)
    return best


def soonest(
    row: SliceCandidates, batch_size: int, options: StageOptions, most_replicas: float
) -> tuple[np.ndarray, np.ndarray]:
    """For each number of examples up to a batch, the least time expected of a candidate in whole rounds; and the
    candidate.
    """
    times_s, chosen = np.full(batch_size + 1, np.inf), np.zeros(batch_size + 1, dtype=int)
    per_round = row.per_round
    replicas = np.array([s.num_pipelines for s in row.candidates])
    for k in np.flatnonzero((per_round <= batch_size) & (replicas <= most_replicas)):
        most = batch_size // per_round[k]
        rounds = np.arange(1, most + 1) if options.num_micro_batches is None else np.array([options.num_micro_batches])
        rounds = rounds[rounds <= most]
        own_s = row.waits_s[k] + rounds * row.each_s[k]
        is_less = own_s < times_s[rounds * per_round[k]]
        numbers = rounds[is_less] * per_round[k]
        times_s[numbers], chosen[numbers] = own_s[is_less], k
    return times_s, chosen

"""The kinds of arrangements, and the search of one: candidates in the order of what they promise, each cut."""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.pipelines.search.candidate import Candidate
from autoshard.pipelines.search.candidates import CandidateSet
from autoshard.pipelines.search.improve import improved_partition
from autoshard.pipelines.search.options import StageOptions
from autoshard.pipelines.search.partition import StagePartition, best_partition
from autoshard.pipelines.search.partition_bounds import CLOSE
from autoshard.pipelines.search.replica_group import ReplicaGroup, SearchContext
from autoshard.pipelines.search.waiting_bounds import WaitingBounds
from autoshard.pipelines.search.whale import cut_by_shares, even_cut, whale_shares

MOST_ORDERED = 3
"""Slices that pipelines run across, at most, in all orders; of more slices, pipelines run across all in their order."""
MOST_CANDIDATE_SETS = 400
"""Choices of mesh options, one for each slice, for each size of micro-batches and kind of arrangement; of more, those
with the options that make best use of their devices are looked at, and the bound is one for these."""
MOST_OPENED = 600
"""Candidate sets, with a number of replicas, whose candidates are looked at, at most, in each kind of arrangement."""
MOST_OPENED_OF_MANY = 100
"""The same across three slices and more, where each has many more candidates."""
MOST_LEFT = 2000
"""Candidate sets that are left, at most, whose candidates are bounded in the end, across two slices at most."""
MOST_BOUNDED = 6000
"""Candidates that are left, at most, whose bounds are made better in the end (`waiting_bounds`)."""
MOST_IMPROVED = 4
"""Cuts of each kind of arrangement, the best ones, of different candidates, that are improved layer by layer."""
MOST_OF_SET = 40
"""Candidates of one of them, and of one schedule, that are kept; what is left out is in the bound."""


@dataclasses.dataclass(frozen=True, slots=True)
class BestOfSequence:
    """The best of one sequence, None if there is none; a bound for all of it; the best candidate's name."""

    cut: StagePartition | None
    bound_s: float
    description: str = ""


_Entry = tuple[float, int, CandidateSet | Candidate, int, int]
"""Something to look at: its bound or guess, a number that tells equal ones apart, itself, replicas, micro-batches."""


def slice_sequences(num_slices: int) -> Iterator[tuple[int, ...]]:
    """Each slice alone, then pipelines across slices, as orders of slices."""
    for length in range(1, num_slices + 1):
        if length == 1 or num_slices <= MOST_ORDERED:
            yield from itertools.permutations(range(num_slices), length)
        elif length == num_slices:
            yield tuple(range(num_slices))


def search_sequence(
    context: SearchContext,
    sequence: Sequence[int],
    batch_size: int,
    sizes: Sequence[int],
    options: StageOptions,
    cutoff_s: float,
    to_beat_s: float = math.inf,
) -> BestOfSequence:
    """Candidates in the order of what they promise.

    Before them are candidate sets with a bound for all their candidates. A candidate set is opened when no candidate
    promises more than its bound. Nothing is cut whose bound is not below the best time, or `to_beat_s` once there is a
    cut.
    """
    opened: list[_Entry] = []
    left: list[_Entry] = []
    count, waiting = itertools.count(), WaitingBounds(context)
    for candidate_set in _candidate_sets(context, sequence, [s for s in sizes if batch_size % s == 0], options):
        replicas, numbers = _replicas(
            batch_size // candidate_set.micro_batch_size, int(candidate_set.slots.min()), options
        )
        if len(replicas):
            bounds_s = candidate_set.least_s(replicas, numbers, options.schedule_kinds)
            for k in np.flatnonzero(bounds_s < cutoff_s):
                opened.append((float(bounds_s[k]), next(count), candidate_set, int(replicas[k]), int(numbers[k])))
    heapq.heapify(opened)
    best, num_cut, num_opened = BestOfSequence(None, math.inf), 0, 0
    limit_s, dropped_s = cutoff_s, math.inf
    cuts: list[tuple[StagePartition, ReplicaGroup, Candidate]] = []
    tried: list[tuple[float, Candidate]] = []
    while opened and num_cut < options.most_candidates:
        bound_s, _, item, num_pipelines, number = heapq.heappop(opened)
        if isinstance(item, CandidateSet):
            if num_opened == (MOST_OPENED if len(sequence) <= 2 else MOST_OPENED_OF_MANY):
                left.append((bound_s, next(count), item, num_pipelines, number))
            elif bound_s < limit_s * (1 - CLOSE):
                num_opened += 1
                candidates, rest_s = item.candidates(num_pipelines, number, options, limit_s, MOST_OF_SET)
                dropped_s = min(dropped_s, rest_s)
                for candidate in candidates:
                    heapq.heappush(opened, (candidate.guess_s, next(count), candidate, num_pipelines, number))
        elif (least_s := waiting.least_s(item, item.bound_s, limit_s)) < limit_s * (1 - CLOSE):
            num_cut += 1
            group = item.group(context, _spread(batch_size // item.micro_batch_size, num_pipelines))
            found, cut_s = best_partition(
                context, group, options.partition_effort, _suggestions(context, item), limit_s
            )
            tried.append((max(cut_s, least_s), item))
            if found is not None:
                limit_s = min(limit_s, found.step_s, to_beat_s)
                cuts.append((found, group, item))
    for found, group, candidate in sorted(cuts, key=lambda entry: entry[0].step_s)[:MOST_IMPROVED]:
        improved = improved_partition(context, group, found, _suggestions(context, candidate))
        if improved.step_s < (cutoff_s if best.cut is None else best.cut.step_s):
            best = BestOfSequence(improved, 0.0, group.description)
    step_s = cutoff_s if best.cut is None else min(best.cut.step_s, to_beat_s)
    for bound_s, candidate in tried:  # bounded again: when they were cut no time, or a later one, was to be beaten
        dropped_s = min(dropped_s, max(bound_s, waiting.least_s(candidate, candidate.bound_s, step_s)))
    ruled_out_s = min(dropped_s, step_s)
    left_s = _left_s([*opened, *left], waiting, options, ruled_out_s, MOST_LEFT if len(sequence) <= 2 else MOST_OPENED)
    bound_s = min(left_s, dropped_s, math.inf if best.cut is None else step_s)
    return dataclasses.replace(best, bound_s=bound_s)


def _left_s(
    opened: Sequence[_Entry], waiting: WaitingBounds, options: StageOptions, enough_s: float, most_opened: int
) -> float:
    """A bound for what is left of a sequence when its effort is used up, up to a time that is of no more interest.

    The least bound is that of all. So it is made better where it is least, again and again: that of a candidate by
    `waiting_bounds`, that of a candidate set by opening it.
    """
    count = itertools.count()
    heap = [(x.bound_s if isinstance(x, Candidate) else b, next(count), x, r, n, False) for b, _, x, r, n in opened]
    heapq.heapify(heap)
    num_bounded, rest_s = 0, math.inf
    while heap and min(rest_s, heap[0][0]) < enough_s * (1 - CLOSE):
        bound_s, _, item, num_pipelines, number, is_final = heapq.heappop(heap)
        if is_final or rest_s <= bound_s or num_bounded >= MOST_BOUNDED:
            return min(rest_s, bound_s)
        if isinstance(item, Candidate):
            num_bounded += 1
            better_s = max(bound_s, waiting.least_s(item, bound_s, enough_s))
            heapq.heappush(heap, (better_s, next(count), item, num_pipelines, number, True))
        elif most_opened > 0:
            most_opened -= 1
            candidates, left_s = item.candidates(num_pipelines, number, options, enough_s, MOST_OF_SET)
            rest_s = min(rest_s, left_s)
            for one in candidates:
                heapq.heappush(heap, (max(bound_s, one.bound_s), next(count), one, num_pipelines, number, False))
        else:
            return bound_s
    return min(rest_s, heap[0][0] if heap else math.inf)


def _candidate_sets(
    context: SearchContext, sequence: Sequence[int], sizes: Sequence[int], options: StageOptions
) -> Iterator[CandidateSet]:
    table = context.topology.table
    most = options.most_devices_per_stage or math.inf
    each = [[o for o, x in enumerate(table.options) if x.slice == s and x.num_devices <= most] for s in sequence]
    for size in sizes:
        kept = max(1, int(MOST_CANDIDATE_SETS ** (1 / len(sequence))))
        choices = [sorted(of_slice, key=lambda o: _device_s(context, o, size))[:kept] for of_slice in each]
        for chosen in itertools.product(*choices):
            candidate_set = CandidateSet(context, chosen, size)
            if candidate_set.is_possible:
                yield candidate_set


def _device_s(context: SearchContext, option: int, size: int) -> float:
    """Time of all layers for one micro-batch, over all devices of a submesh."""
    costs = context.intervals.layer_costs(option, size)
    known = [c.forward_s + c.backward_s + c.weight_s for c in costs if c is not None]
    num_devices = context.topology.table.options[option].num_devices
    return sum(known) * len(costs) / len(known) * num_devices if known else math.inf


def _replicas(num_micro_batches: int, most: int, options: StageOptions) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of replicas, and micro-batches of the busiest: of equally busy ones, the fewest replicas."""
    replicas = np.arange(1, min(most, num_micro_batches) + 1)
    if options.num_pipelines is not None:
        replicas = replicas[replicas == options.num_pipelines]
    numbers = -(-num_micro_batches // replicas) if len(replicas) else replicas
    numbers, first = np.unique(numbers, return_index=True)
    replicas = replicas[first]
    if options.num_micro_batches is not None:
        chosen = numbers == options.num_micro_batches
        return replicas[chosen], numbers[chosen]
    return replicas, numbers


def _spread(total: int, parts: int) -> tuple[int, ...]:
    """As evenly as can be, the greater parts first."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def _suggestions(context: SearchContext, candidate: Candidate) -> list[tuple[int, ...]]:
    """An even cut, and one by Whale's shares."""
    layers, table = context.intervals.layers, context.topology.table
    cuts = [even_cut(layers.num_layers, candidate.num_stages)]
    each = [context.intervals.layer_costs(o, candidate.micro_batch_size) for o in candidate.options]
    if not any(None in row for row in each):
        costs = [c for c in each[0] if c is not None]
        stages = [k for k, n in enumerate(candidate.counts) for _ in range(n)] * candidate.chunks
        options = [table.options[candidate.options[k]] for k in stages]
        flops = [o.num_devices * o.mesh.device_type.flops_per_s("float32") for o in options]
        rooms = [o.num_devices * context.limits_bytes[o.slice] for o in options]
        fixed = sum(c.weight_bytes + c.gradient_bytes + c.optimizer_bytes for c in costs) * options[0].num_devices
        work = [c.forward_s + c.backward_s + c.weight_s for c in costs]
        cuts.append(cut_by_shares(work, whale_shares(flops, rooms, sum(work), fixed)))
    return cuts

"""A group of replicas on each slice, with shares of the batch that suit their speeds."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from autoshard.errors import StageError
from autoshard.pipelines.schedule.orders import make_schedule
from autoshard.pipelines.search.arrangement import Arrangement, Pipeline, Stage
from autoshard.pipelines.search.batch_shares import LinearTime, best_batch_shares
from autoshard.pipelines.search.candidate import Candidate
from autoshard.pipelines.search.memory_bounds import replicas_with_room
from autoshard.pipelines.search.options import PartitionEffort, StageOptions
from autoshard.pipelines.search.partition import MOST_REPLICAS, best_partition
from autoshard.pipelines.search.replica_group import SearchContext, arrangement_step_s
from autoshard.pipelines.search.slice_candidates import (
    SliceCandidates,
    least_time_s,
    least_waiting_s,
    slice_candidates,
    soonest,
)
from autoshard.pipelines.search.stage_memory import fits
from autoshard.pipelines.search.step_durations import stage_durations
from autoshard.pipelines.search.whale import whale_shares

MOST_JOINT = 36
"""Combinations of groups, one of each slice, whose shares are found."""
MOST_MATCHED = 4
"""Combinations of groups, at most, that are looked at because their examples add up."""
MOST_TRIED = 40
"""Candidates of a slice that are cut, at most, to find some that fit the memory."""
MOST_SIMULATED = 6
"""Of these, those that are simulated."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupPerSlice:
    """What was found: description, arrangement and time of each, the best first; a bound for all; why there is none."""

    found: tuple[tuple[str, Arrangement, float], ...]
    bound_s: float
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _PartitionedCandidate:
    """A group that one slice could have: its candidate, its cut, and how fast each of its replicas is."""

    candidate: Candidate
    stages: tuple[Stage, ...]
    time_model: LinearTime


def group_per_slice(
    context: SearchContext, batch_size: int, sizes: Sequence[int], options: StageOptions
) -> GroupPerSlice:
    """Finds a group for each slice and their shares of the batch.

    The time in which all slices together manage the batch, each with the candidate that manages most in it, tells which
    candidates to cut; the cuts tell the time models; and for these the shares are exact.

    Args:
      context: Costs, cluster, memory.
      batch_size: Examples of a step.
      sizes: Micro-batch sizes to try.
      options: What is fixed of candidates.

    Returns:
      The best with exact shares, and to compare with, the best with even shares and with Whale's.
    """
    num_slices = len(context.topology.slices)
    rows = [slice_candidates(context, s, sizes, options) for s in range(num_slices)]
    live = [row for row in rows if row.candidates]
    if not live:
        return GroupPerSlice((), math.inf, "no slice has room for a replica of the model")
    room = [replicas_with_room(context, s, sizes) for s in range(num_slices)]
    bounding = [slice_candidates(context, s, sizes, options, sum(room) - room[s]) for s in range(num_slices)]
    bounding = [row for row in bounding if row.candidates]
    bound_s = least_time_s(bounding, batch_size, at_best=True)
    aim_s = least_time_s(live, batch_size, at_best=False)
    each = max(1, int(MOST_JOINT ** (1 / len(live))))
    members = [_members(context, row, aim_s, each, options) for row in live]
    members = [m for m in members if m]
    if not members:
        return GroupPerSlice((), bound_s, "no cut of what was tried fits the memory")
    found: list[tuple[str, Arrangement, float]] = []
    shared = []
    matched: list[tuple[_PartitionedCandidate, ...]] = []
    if len(members) == len(live):
        for most_replicas in (math.inf, 1):  # one replica a slice exchanges least, which times expected do not show
            matched += _matched(context, live, batch_size, options, most_replicas)
    for joint in [*itertools.product(*members), *matched]:
        shares = _shares(batch_size, joint)
        if shares is not None:
            shared.append((_slowest_s(joint, shares), joint, shares))
    for _, joint, shares in sorted(shared, key=lambda entry: entry[0])[:MOST_SIMULATED]:
        found += _join(context, batch_size, joint, shares, options)
    if not found:
        return GroupPerSlice((), bound_s, "the batch cannot be shared out between the slices")
    bound_s = least_waiting_s(context, bounding, batch_size, bound_s, min(step_s for _, _, step_s in found))
    names = dict.fromkeys(name for name, _, _ in found)
    best = [min((f for f in found if f[0] == name), key=lambda entry: entry[2]) for name in names]
    return GroupPerSlice(tuple(sorted(best, key=lambda entry: entry[2])), bound_s)


def _members(
    context: SearchContext, row: SliceCandidates, aim_s: float, most: int, options: StageOptions
) -> list[_PartitionedCandidate]:
    """The candidates that manage most in the time that is aimed at, cut."""
    if not math.isfinite(aim_s):
        return []
    whole = row.examples(aim_s, at_best=False)
    smooth = row.per_round * np.maximum(0.0, aim_s - row.waits_s) / row.each_s
    members: list[_PartitionedCandidate] = []
    tried: set[int] = set()
    for order in (np.argsort(-whole, kind="stable"), np.argsort(-smooth, kind="stable")):
        num_left = -(-most // 2)
        for k in order[:MOST_TRIED]:
            if not num_left or len(members) == most:
                break
            if int(k) in tried:
                continue
            tried.add(int(k))
            candidate = row.candidates[k]
            number = max(1, round(float(smooth[k]) / float(row.per_round[k])))
            if options.num_micro_batches is not None:
                number = options.num_micro_batches
            member = _member(context, candidate, number)
            if member is not None:
                members.append(member)
                num_left -= 1
    return members


def _matched(
    context: SearchContext,
    rows: Sequence[SliceCandidates],
    batch_size: int,
    options: StageOptions,
    most_replicas: float,
) -> list[tuple[_PartitionedCandidate, ...]]:
    """Groups whose whole rounds, as many micro-batches on each replica, add up to the batch: the fastest.

    What manages most in a time need not add up, least of all where a micro-batch is a great part of the batch. For each
    number of examples, the candidate of a slice that is expected to do it soonest is known; so the least time of the
    first slices together for each number follows, slice by slice.
    """
    by_number = [soonest(row, batch_size, options, most_replicas) for row in rows]
    together_s, taken = by_number[0][0], []
    for times_s, _ in by_number[1:-1]:
        next_s, least = np.full(batch_size + 1, np.inf), np.zeros(batch_size + 1, dtype=int)
        for number in np.flatnonzero(np.isfinite(times_s)):
            both_s = np.maximum(together_s[: batch_size + 1 - number], times_s[number])
            is_less = both_s < next_s[number:]
            next_s[number:][is_less], least[number:][is_less] = both_s[is_less], number
        together_s = next_s
        taken.append(least)
    last_s = np.maximum(together_s[::-1], by_number[-1][0]) if len(rows) > 1 else together_s
    found: list[tuple[_PartitionedCandidate, ...]] = []
    for number in np.argsort(last_s, kind="stable")[:MOST_TRIED]:
        if len(found) == MOST_MATCHED or not np.isfinite(last_s[number]):
            break
        numbers = [int(number)] if len(rows) > 1 else [batch_size]
        for least in reversed(taken):
            numbers.insert(0, int(least[batch_size - sum(numbers)]))
        if len(rows) > 1:
            numbers.insert(0, batch_size - sum(numbers))
        joint = []
        for row, (_, chosen), n in zip(rows, by_number, numbers, strict=True):
            candidate = row.candidates[chosen[n]]
            joint.append(_member(context, candidate, n // (candidate.micro_batch_size * candidate.num_pipelines)))
        if all(member is not None for member in joint):
            found.append(tuple(joint))
    return found


def _member(context: SearchContext, candidate: Candidate, number: int) -> _PartitionedCandidate | None:
    group = candidate.group(context, [number] * candidate.num_pipelines)
    cut, _ = best_partition(context, group, PartitionEffort(most_enumerated=300, most_simulated=2))
    if cut is None:
        return None
    more = number + max(1, number // 2)
    longer = candidate.group(context, [more] * candidate.num_pipelines)
    longer_s = arrangement_step_s(context, Arrangement(longer.pipelines(cut.stages)), MOST_REPLICAS)
    each_s = max(0.0, longer_s - cut.step_s) / (more - number)
    fixed_s = max(0.0, cut.step_s - number * each_s)
    return _PartitionedCandidate(candidate, cut.stages, LinearTime(candidate.micro_batch_size, fixed_s, each_s))


def _shares(batch_size: int, joint: Sequence[_PartitionedCandidate]) -> tuple[tuple[int, ...], ...] | None:
    """For each group, the micro-batches of those of its replicas that have any, the greatest first."""
    time_models = [(m.time_model,) for m in joint for _ in range(m.candidate.num_pipelines)]
    try:
        rest = [s.num_micro_batches for s in best_batch_shares(batch_size, time_models)]
    except StageError:
        return None
    of_groups = []
    for member in joint:
        own, rest = rest[: member.candidate.num_pipelines], rest[member.candidate.num_pipelines :]
        of_groups.append(tuple(sorted((n for n in own if n), reverse=True)))
    return tuple(of_groups)


def _slowest_s(joint: Sequence[_PartitionedCandidate], of_groups: Sequence[Sequence[int]]) -> float:
    return max(m.time_model.time_s(numbers[0]) for m, numbers in zip(joint, of_groups, strict=True) if numbers)


def _join(
    context: SearchContext,
    batch_size: int,
    joint: Sequence[_PartitionedCandidate],
    shares: tuple[tuple[int, ...], ...],
    options: StageOptions,
) -> list[tuple[str, Arrangement, float]]:
    """Groups side by side with their shares; and, to compare with, even shares and Whale's."""
    ways = [("shares by speed", shares)]
    meshes = [context.topology.table.options[m.candidate.options[0]] for m in joint]
    devices = [
        o.num_devices * m.candidate.num_pipelines * sum(m.candidate.counts) for o, m in zip(meshes, joint, strict=True)
    ]
    speeds = [n * o.mesh.device_type.flops_per_s("float32") for n, o in zip(devices, meshes, strict=True)]
    rooms = [n * context.limits_bytes[o.slice] for n, o in zip(devices, meshes, strict=True)]
    even = [n / sum(devices) for n in devices]
    for name, parts in (("even shares", even), ("Whale's shares", whale_shares(speeds, rooms, 1.0, 0.0))):
        rounded = _rounded(batch_size, joint, parts)
        if rounded is not None:
            ways.append((name, rounded))
    found = []
    for name, of_groups in ways:
        most = max(n for group in of_groups for n in group)
        if options.num_micro_batches is None or most == options.num_micro_batches:
            arrangement = _arrangement(context, joint, of_groups)
            if arrangement is not None and options.num_pipelines in (None, len(arrangement.pipelines)):
                found.append((name, arrangement, arrangement_step_s(context, arrangement, MOST_REPLICAS)))
    return found


def _rounded(
    batch_size: int, joint: Sequence[_PartitionedCandidate], parts: Sequence[float]
) -> tuple[tuple[int, ...], ...] | None:
    """Parts of a batch in whole micro-batches, spread evenly over each group; None if they do not add up."""
    of_groups, rest, rest_part = [], batch_size, 1.0
    for member, part in zip(joint, parts, strict=True):
        number = round(rest * part / rest_part / member.time_model.micro_batch_size) if rest_part > 0 else 0
        rest, rest_part = rest - number * member.time_model.micro_batch_size, rest_part - part
        num = member.candidate.num_pipelines
        of_groups.append(tuple(n for i in range(num) if (n := number // num + (i < number % num))))
    return tuple(of_groups) if rest == 0 else None


def _arrangement(
    context: SearchContext, joint: Sequence[_PartitionedCandidate], of_groups: Sequence[tuple[int, ...]]
) -> Arrangement | None:
    """The groups with their numbers of micro-batches; None if a submesh would not fit its memory."""
    pipelines: list[Pipeline] = []
    for member, numbers in zip(joint, of_groups, strict=True):
        if numbers:
            pipelines += member.candidate.group(context, numbers).pipelines(member.stages)
    arrangement = Arrangement(tuple(pipelines))
    firsts = [
        i for i, p in enumerate(pipelines) if i == 0 or pipelines[i - 1].submeshes[0].option != p.submeshes[0].option
    ]
    for pipeline in (pipelines[i] for i in firsts):
        num_stages = len(pipeline.stages)
        schedule = make_schedule(pipeline.schedule, len(pipeline.submeshes), num_stages, pipeline.num_micro_batches)
        parts = [stage_durations(context.intervals, pipeline, s, len(pipelines)) for s in range(num_stages)]
        if not all(fits(schedule, parts, [context.limits_bytes[submesh.slice] for submesh in pipeline.submeshes])):
            return None
    return arrangement

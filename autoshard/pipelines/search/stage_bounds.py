"""The stages of a pipeline, each for every run of layers that it could have: times, bounds, and memory.

The bounds are those of `cut_bounds`.
"""

import dataclasses

import numpy as np

from autoshard.pipelines.cost.interval_costs import IntervalCosts
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.arrangement import Submesh
from autoshard.pipelines.search.replica_group import ReplicaGroup, SearchContext
from autoshard.pipelines.search.stage_memory import TOLERANCE, InFlight, most_in_flight, run_peak_bytes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StageBounds:
    """Bounds and memory of one stage of the pipeline, for every interval of layers that it could have.

    As every stage before and after has a layer, stage s begins with one of the layers s ... s + N, N = layers - stages.
    Entry [i, j] of every array, of N + 1 rows and columns, is for the layers s + i <= l < s + j + 1.

    Attributes:
      is_allowed: Possible, and within memory. needs_remat: Only if it is computed again.
      chain_s: What it adds to X. more_s: What it adds to X if it is the slowest. floor_s: The bound that holds for any.
      busy_s: Time of all tasks of one micro-batch. head_s: Forward and its transfer.
    """

    is_allowed: np.ndarray
    needs_remat: np.ndarray
    chain_s: np.ndarray
    more_s: np.ndarray
    floor_s: np.ndarray
    busy_s: np.ndarray
    head_s: np.ndarray


def stage_bounds(context: SearchContext, group: ReplicaGroup, *, shares_memory: bool) -> list[StageBounds]:
    """The positions of all stages; `shares_memory`: stages of one submesh have fixed shares of its memory."""
    return [_stage_bounds(context, group, s, shares_memory) for s in range(group.num_stages)]


def _stage_bounds(context: SearchContext, group: ReplicaGroup, stage: int, shares_memory: bool) -> StageBounds:
    submeshes, kind = group.submeshes[0], group.schedule
    submesh = submeshes[stage % len(submeshes)]
    width = context.intervals.layers.num_layers - group.num_stages + 1
    rows, columns = slice(stage, stage + width), slice(stage + 1, stage + 1 + width)
    costs = context.intervals.costs(submesh.option, group.micro_batch_size).window(rows, columns)
    most = group.num_micro_batches[0]
    is_split = kind is ScheduleKind.ZERO_BUBBLE
    is_plain, is_allowed = _memory(context, group, stage, costs, submesh, shares_memory)
    if context.asked is not None:
        is_allowed = is_allowed & context.asked.runs[stage][rows, columns] & context.may_hold(stage, submesh.slice)
    needs_remat = ~is_plain
    forward_s = costs.forward_s
    backward_s = costs.backward_s + np.where(needs_remat, forward_s, 0.0)
    busy_s = forward_s + backward_s + costs.weight_s
    if not is_split:
        backward_s = backward_s + costs.weight_s
    there_s, back_s = (times_s[rows] for times_s in _boundary_s(context, group, stage))
    chain_s = forward_s + backward_s + (there_s + back_s)[:, None]
    weights_s, gradients_s = _copies_s(context, group, stage, costs)
    update_s = costs.update_s / group.num_pipelines
    around_s = weights_s + gradients_s + update_s
    reach = min(most, group.num_stages - stage)
    if kind is ScheduleKind.GPIPE:
        more_s = (most - 1) * busy_s
    elif kind is ScheduleKind.ONE_F_ONE_B:
        more_s = (most - reach) * busy_s + (reach - 1) * np.maximum(forward_s, backward_s)
    else:
        more_s = (most * (group.num_stages // len(submeshes)) - 1) * busy_s
    return StageBounds(
        is_allowed=is_allowed,
        needs_remat=needs_remat,
        chain_s=chain_s + (around_s if stage == 0 else 0.0),
        more_s=more_s,
        floor_s=most * busy_s + around_s,
        busy_s=busy_s,
        head_s=forward_s + there_s[:, None],
    )


def _memory(
    context: SearchContext, group: ReplicaGroup, stage: int, costs: IntervalCosts, submesh: Submesh, shares_memory: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Which runs fit as they are, and which fit at all."""
    per_submesh = group.num_stages // len(group.submeshes[0])
    limit = context.limits_bytes[submesh.slice] * (1 + TOLERANCE)
    most = group.num_micro_batches[0]
    if per_submesh == 1:
        in_flight = most_in_flight(group.schedule, stage, group.num_stages, most)
    elif shares_memory:  # no more than its share of the submesh: what does not fit so is not found
        in_flight = (InFlight(_interleaved_in_flight(group, stage)),)
        working = _working_bytes(context, group, submesh.option, stage % len(group.submeshes[0]))
        share = _share(context, group, submesh.option, stage)
        limit = np.maximum(limit * share, (limit - working) * share + costs.working_bytes)
    else:
        in_flight = (InFlight(1),)
    plain, again = (
        run_peak_bytes(costs, in_flight, group.num_pipelines, rematerialise=r) <= limit for r in (False, True)
    )
    is_plain = plain if per_submesh == 1 or shares_memory else plain | again
    return is_plain & costs.is_possible, (plain | again) & costs.is_possible


def _share(context: SearchContext, group: ReplicaGroup, option: int, stage: int) -> float:
    """A stage's share of its submesh's memory: what equally many of equal layers need there, of what they need in all.

    What is in flight differs between the stages of a submesh.
    """
    costs = [c for c in context.intervals.layer_costs(option, group.micro_batch_size) if c is not None]
    kept = sum(c.weight_bytes + c.gradient_bytes + c.optimizer_bytes / group.num_pipelines for c in costs)
    residual = sum(c.residual_bytes for c in costs)
    num_submeshes = len(group.submeshes[0])
    on_submesh = range(stage % num_submeshes, group.num_stages, num_submeshes)
    needs = [kept + _interleaved_in_flight(group, s) * residual for s in on_submesh]
    return needs[stage // num_submeshes] / sum(needs) if sum(needs) else 1 / len(needs)


def _working_bytes(context: SearchContext, group: ReplicaGroup, option: int, submesh: int) -> float:
    """What one task of a submesh needs at most, whichever layers its stages have: one task runs at a time."""
    costs = context.intervals.layer_costs(option, group.micro_batch_size)
    width = len(costs) - group.num_stages + 1
    stages = range(submesh, group.num_stages, len(group.submeshes[0]))
    return max((c.working_bytes for s in stages for c in costs[s : s + width] if c is not None), default=0.0)


def _interleaved_in_flight(group: ReplicaGroup, stage: int) -> int:
    """Micro-batches whose forward task on a stage comes before the first backward task of its submesh (`orders`)."""
    num_submeshes = len(group.submeshes[0])
    chunk, submesh = divmod(stage, num_submeshes)
    chunks = group.num_stages // num_submeshes
    rounds, rest = divmod(2 * (num_submeshes - submesh - 1) + (chunks - 1) * num_submeshes + 1, chunks * num_submeshes)
    held = rounds * num_submeshes + min(max(rest - chunk * num_submeshes, 0), num_submeshes)
    return min(max(held, 1), group.num_micro_batches[0])


def _boundary_s(context: SearchContext, group: ReplicaGroup, stage: int) -> tuple[np.ndarray, np.ndarray]:
    """For each first layer of a stage, the time of what surely is sent from the stage before, and comes back."""
    submeshes, sizes = group.submeshes[0], context.intervals.boundary_bytes(group.micro_batch_size)
    here, before = submeshes[stage % len(submeshes)], submeshes[(stage - 1) % len(submeshes)]
    if stage == 0 or here == before:
        return np.zeros(sizes.shape[1]), np.zeros(sizes.shape[1])
    speed, topology = context.topology.speed(before, here), context.topology
    num_senders = min(topology.num_devices(before), topology.num_devices(here))
    times_s = np.where(sizes > 0, speed.latency_s + sizes / (num_senders * speed.bandwidth_bytes_per_s), 0.0)
    return times_s[0], times_s[1]


def _copies_s(
    context: SearchContext, group: ReplicaGroup, stage: int, costs: IntervalCosts
) -> tuple[np.ndarray, np.ndarray]:
    """Times of copies of weights and of gradients between the replicas of the group; see `durations`."""
    num, topology = group.num_pipelines, context.topology
    if num == 1:
        return np.zeros_like(costs.kept_bytes), np.zeros_like(costs.kept_bytes)
    index = stage % len(group.submeshes[0])
    here = group.submeshes[0][index]
    latency_s = seconds_per_byte = 0.0
    for other in group.submeshes[1:]:
        speed = topology.speed(here, other[index])
        latency_s += speed.latency_s
        seconds_per_byte += 1 / (num * topology.num_devices(here) * speed.bandwidth_bytes_per_s)
    device = topology.table.options[here.option].mesh.device_type
    added_s = 3 * (num - 1) / num * costs.gradient_bytes / device.memory_bytes_per_s
    has_weights = costs.sent_weight_bytes > 0
    weights_s = has_weights * latency_s + costs.sent_weight_bytes * seconds_per_byte
    gradients_s = has_weights * latency_s + costs.sent_gradient_bytes * seconds_per_byte
    return weights_s, gradients_s + added_s

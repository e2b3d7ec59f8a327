"""How long everything in a step of an arrangement takes: from layers, costs and links to the simulator's input.

**Stages.** Times and bytes are sums over the layers of the stage (`runs.IntervalCosts`). A stage that is computed again
keeps the inputs of each micro-batch in flight; its backward pass computes forward once more, and holds the residuals of
that one micro-batch: backward_s += forward_s, working_bytes += residual_bytes, residual_bytes = input_bytes.

**Transfers.** What a later stage on another submesh reads is sent once to each such stage. Between submeshes of n1 and
n2 devices every device of the smaller side handles its part: latency + bytes / (min(n1, n2) bandwidth).

**Weights.** Each has one owner; other submeshes that read it hold copies, which are sent before the step, and whose
gradients come back after it. Homes are spread: of a layer that R pipelines hold, each owns 1/R. So a stage of pipeline
r, on n_r devices, needs

    weights_s = sum over p != r of latency_rp + (bytes / R) / (min(n_r, n_p) bandwidth_rp)

in and out at once, both (R - 1)/R of the bytes as in a ring all-gather. A weight that several stages of a pipeline read
is owned by its first reader, and each of the R owners sends its part to each later reader. Gradients go the other
way, by their own bytes; then an owner adds what it received to its own sum: reading two and writing one,
3 bytes / memory bandwidth for each copy, for what it owns. Optimizer state and the time of its update are 1/R too.
"""

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

from autoshard.pipelines.cost.interval_costs import IntervalCostTable
from autoshard.pipelines.cost.layers import Layers
from autoshard.pipelines.schedule.durations import PipelineDurations, StageDurations, StepDurations, TransferDurations
from autoshard.pipelines.schedule.orders import make_schedule
from autoshard.pipelines.search.arrangement import Arrangement, Pipeline, Submesh
from autoshard.pipelines.search.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True)
class _Peer:
    """A submesh of another pipeline that holds some of a stage's layers: `start <= layer < stop`."""

    submesh: Submesh
    start: int
    stop: int


def step_durations(
    intervals: IntervalCostTable, topology: Topology, arrangement: Arrangement, only: Sequence[int] | None = None
) -> StepDurations:
    """Durations of a whole step.

    Args:
      intervals: Costs of the layers. topology: Where submeshes lie.
      arrangement: What runs where.
      only: Indices of the pipelines to give; without it, all. Pipelines that are left out still count as replicas.
    """
    indices = range(len(arrangement.pipelines)) if only is None else only
    return StepDurations(tuple(_pipeline_durations(intervals, topology, arrangement, i) for i in indices))


def stage_durations(intervals: IntervalCostTable, pipeline: Pipeline, stage: int, num_pipelines: int) -> StageDurations:
    """Durations and bytes of one stage of a pipeline, one of `num_pipelines` replicas."""
    part = pipeline.stages[stage]
    costs = intervals.costs(submesh_of(pipeline, stage).option, pipeline.micro_batch_size)
    at = part.start, part.stop
    fixed_bytes = float(costs.kept_bytes[at] + costs.optimizer_bytes[at] / num_pipelines)
    forward_s, backward_s = float(costs.forward_s[at]), float(costs.backward_s[at])
    residual_bytes, working_bytes = float(costs.residual_bytes[at]), float(costs.working_bytes[at])
    if part.rematerialise:
        backward_s += forward_s
        working_bytes += residual_bytes
        residual_bytes = float(costs.input_bytes[at])
    return StageDurations(
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=float(costs.weight_s[at]),
        residual_bytes=residual_bytes,
        weight_residual_bytes=float(costs.weight_residual_bytes[at]),
        fixed_bytes=fixed_bytes,
        working_bytes=working_bytes,
    )


def submesh_of(pipeline: Pipeline, stage: int) -> Submesh:
    """The submesh that holds a stage."""
    return pipeline.submeshes[stage % len(pipeline.submeshes)]


def stage_of(pipeline: Pipeline, layer: int) -> int:
    """The stage that holds a layer."""
    return bisect.bisect_right(pipeline.stages, layer, key=lambda stage: stage.start) - 1


def _pipeline_durations(
    intervals: IntervalCostTable, topology: Topology, arrangement: Arrangement, index: int
) -> PipelineDurations:
    pipeline, num_pipelines = arrangement.pipelines[index], len(arrangement.pipelines)
    num_stages = len(pipeline.stages)
    copies = [_copies_s(intervals, topology, arrangement, index, s) for s in range(num_stages)]
    costs = [intervals.costs(submesh_of(pipeline, s).option, pipeline.micro_batch_size) for s in range(num_stages)]
    spans = [(s.start, s.stop) for s in pipeline.stages]
    return PipelineDurations(
        schedule=make_schedule(pipeline.schedule, len(pipeline.submeshes), num_stages, pipeline.num_micro_batches),
        stages=tuple(stage_durations(intervals, pipeline, s, num_pipelines) for s in range(num_stages)),
        transfers=_transfers(intervals.layers, topology, pipeline),
        weights_s=tuple(weights_s for weights_s, _ in copies),
        gradients_s=tuple(gradients_s for _, gradients_s in copies),
        update_s=tuple(float(c.update_s[at]) / num_pipelines for c, at in zip(costs, spans, strict=True)),
    )


def _transfers(layers: Layers, topology: Topology, pipeline: Pipeline) -> tuple[TransferDurations, ...]:
    stage_of = [s for s, stage in enumerate(pipeline.stages) for _ in range(stage.start, stage.stop)]
    sent: dict[tuple[int, int], tuple[float, float]] = {}
    for crossing in layers.activations:
        source = stage_of[crossing.source]
        size = crossing.example_bytes * (1 if crossing.is_shared else pipeline.micro_batch_size)
        for target in {stage_of[reader] for reader in crossing.readers} - {source}:
            if submesh_of(pipeline, source) != submesh_of(pipeline, target):
                forward, backward = sent.get((source, target), (0.0, 0.0))
                sent[source, target] = (forward + size, backward + size * crossing.has_gradient)
    return tuple(
        TransferDurations(source, target, *(_sent_s(topology, pipeline, source, target, size) for size in sizes))
        for (source, target), sizes in sorted(sent.items())
    )


def _sent_s(topology: Topology, pipeline: Pipeline, source: int, target: int, size_bytes: float) -> float:
    if not size_bytes:
        return 0.0
    return topology.transfer_s(submesh_of(pipeline, source), submesh_of(pipeline, target), size_bytes)


def _copies_s(
    intervals: IntervalCostTable, topology: Topology, arrangement: Arrangement, index: int, stage: int
) -> tuple[float, float]:
    """Times to get copies of weights before a step, and to send and add gradients after it."""
    pipeline, num_pipelines = arrangement.pipelines[index], len(arrangement.pipelines)
    here, part = submesh_of(pipeline, stage), pipeline.stages[stage]
    costs = intervals.costs(here.option, pipeline.micro_batch_size)
    weights_s = gradients_s = 0.0
    shares: dict[tuple[int, int], tuple[float, float]] = {}  # replicas that are cut alike have the same
    for peer in _peers(arrangement, index, stage):
        at = peer.start, peer.stop
        if at not in shares:
            both = costs.sent_weight_bytes[at], costs.sent_gradient_bytes[at]
            shares[at] = float(both[0] / num_pipelines), float(both[1] / num_pipelines)
        weights_share, gradients_share = shares[at]
        if weights_share > 0:
            weights_s += topology.transfer_s(here, peer.submesh, weights_share)
            gradients_s += topology.transfer_s(here, peer.submesh, gradients_share)
    kept = float(costs.kept_bytes[part.start, part.stop])
    added_bytes = (num_pipelines - 1) * float(costs.gradient_bytes[part.start, part.stop]) / num_pipelines
    gradient_bytes = float(costs.gradient_bytes[part.start, part.stop])
    ratio = gradient_bytes / (kept - gradient_bytes) if kept > gradient_bytes else 0.0
    for shared in intervals.layers.shared_weights:
        for size, is_gradient in ((shared.size_bytes, False), (shared.size_bytes * ratio, True)):
            tied_s, num_copies = _tied_s(topology, arrangement, index, stage, shared.readers, size)
            if is_gradient:
                gradients_s += tied_s
                added_bytes += num_copies * size / num_pipelines / topology.num_devices(here)
            else:
                weights_s += tied_s
    device = topology.table.options[here.option].mesh.device_type
    return float(weights_s), float(gradients_s + 3 * added_bytes / device.memory_bytes_per_s)


def _peers(arrangement: Arrangement, index: int, number: int) -> Iterator[_Peer]:
    """Places of other pipelines that hold layers of a stage."""
    stages = arrangement.pipelines[index].stages
    part = stages[number]
    for i, other in enumerate(arrangement.pipelines):
        if i == index:
            continue
        if other.stages is stages:
            yield _Peer(submesh_of(other, number), part.start, part.stop)
            continue
        for s in range(stage_of(other, part.start), stage_of(other, part.stop - 1) + 1):
            stage = other.stages[s]
            start, stop = max(part.start, stage.start), min(part.stop, stage.stop)
            yield _Peer(submesh_of(other, s), start, stop)


def _tied_s(
    topology: Topology, arrangement: Arrangement, index: int, stage: int, readers: tuple[int, ...], size_bytes: float
) -> tuple[float, int]:
    """Time to send a weight that several layers read, or its gradients; and the copies that the stage sends of it."""
    pipeline = arrangement.pipelines[index]
    here, part = submesh_of(pipeline, stage), pipeline.stages[stage]
    own = [r for r in readers if part.start <= r < part.stop]
    if not own or not size_bytes:
        return 0.0, 0
    share = size_bytes / len(arrangement.pipelines)
    if own[0] != readers[0]:
        there = [submesh_of(p, stage_of(p, readers[0])) for p in arrangement.pipelines]
        return sum(topology.transfer_s(here, submesh, share) for submesh in there if submesh != here), 0
    there = [
        submesh_of(p, s)
        for p in arrangement.pipelines
        for s in sorted({stage_of(p, r) for r in readers} - {stage_of(p, readers[0])})
    ]
    times_s = [topology.transfer_s(here, submesh, share) for submesh in there if submesh != here]
    return sum(times_s), len(times_s)

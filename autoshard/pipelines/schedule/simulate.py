"""A step of pipelines, replayed with the time that every part of it takes.

Each submesh runs its tasks strictly in order; a task starts when its submesh is free and all that it waits for has
arrived. Transfers overlap with computation; on one direction of a link they follow each other in the order in which
they were made. As all of that order is known beforehand, one pass over the tasks gives the time of each.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from autoshard.errors import ScheduleError
from autoshard.garbage import collection_paused
from autoshard.pipelines.schedule.durations import PipelineDurations, StepDurations
from autoshard.pipelines.schedule.orders import in_flight_bound
from autoshard.pipelines.schedule.peak_memory import peak_bytes
from autoshard.pipelines.schedule.task_graph import TaskGraph, task_graph
from autoshard.pipelines.schedule.timeline import GRADIENTS, UPDATE, WEIGHTS, Event, SubmeshSummary, Timeline, busy_time


def step_time(step: StepDurations) -> float:
    """Seconds that a step takes: the `step_s` of `simulate`, without the events.

    Raises:
      ScheduleError: As `simulate`.
    """
    _check(step)
    return _ends(step, [_replay(p, _wiring(p), None) for p in step.pipelines]).step_s


@collection_paused()
def simulate(
    step: StepDurations,
    limits_bytes: Sequence[Sequence[float]] = (),
    names: Sequence[Sequence[str]] = (),
) -> Timeline:
    """Replays a step.

    Args:
      step: Its pipelines, and what everything in them takes.
      limits_bytes: For each pipeline and submesh, the memory of one device; without it, unknown.
      names: For each pipeline and submesh, what to call it; without it, by number.

    Returns:
      All events and a summary of each submesh.

    Raises:
      ScheduleError: If the durations do not fit the schedules or are not numbers of at least 0, or an order cannot run.
    """
    _check(step)
    _check_submeshes(step, limits_bytes, "limits of memory")
    _check_submeshes(step, names, "names")
    sent: list[list[_Transfer]] = [[] for _ in step.pipelines]
    starts_s = [_replay(p, _wiring(p), made) for p, made in zip(step.pipelines, sent, strict=True)]
    ends = _ends(step, starts_s)
    events: list[Event] = []
    summaries: list[SubmeshSummary] = []
    for i, pipeline in enumerate(step.pipelines):
        schedule, peaks = pipeline.schedule, peak_bytes(pipeline)
        by_submesh: list[list[Event]] = [[] for _ in schedule.order]
        for event in itertools.chain(
            _task_events(i, pipeline, starts_s[i]),
            _transfer_events(i, pipeline, sent[i]),
            _other_events(i, pipeline, ends.stages_s[i], ends.gathered_s),
        ):
            by_submesh[event.submesh].append(event)
        for submesh, here in enumerate(by_submesh):
            busy_s = busy_time(here)
            summaries.append(
                SubmeshSummary(
                    pipeline=i,
                    submesh=submesh,
                    name=names[i][submesh] if names else f"submesh {submesh} of pipeline {i}",
                    busy_s=busy_s,
                    bubble_share=max(0.0, 1.0 - busy_s / ends.step_s) if ends.step_s else 0.0,
                    peak_bytes=peaks[submesh],
                    limit_bytes=limits_bytes[i][submesh] if limits_bytes else math.inf,
                    most_in_flight=max(
                        in_flight_bound(schedule, s)
                        for s in range(submesh, schedule.num_stages, schedule.num_submeshes)
                    ),
                )
            )
            events += here
    events.sort(key=lambda e: (e.start_s, e.stop_s))
    return Timeline(tuple(events), tuple(summaries), ends.step_s, "simulated")


@dataclasses.dataclass(frozen=True, slots=True)
class _Transfer:
    """One transfer that was made: for which task (its index), on which link (its index), when."""

    target: int
    link: int
    start_s: float
    stop_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Ends:
    """When a step is through.

    Attributes:
      stages_s: For each pipeline and stage, the end of its last task.
      gathered_s: When all gradients of all pipelines are where they are owned.
      step_s: When the last submesh has made its updates.
    """

    stages_s: tuple[tuple[float, ...], ...]
    gathered_s: float
    step_s: float


def _wiring(pipeline: PipelineDurations) -> TaskGraph:
    return task_graph(pipeline.schedule, tuple((t.source, t.target) for t in pipeline.transfers))


def _replay(pipeline: PipelineDurations, wiring: TaskGraph, sent: list[_Transfer] | None) -> list[float]:
    """For each task of `wiring`, when it starts; the transfers are added to `sent`, if given.

    The one loop of this file that must be fast: the planner runs it for hundreds of pipelines.
    """
    times_s = _task_times(pipeline)
    transfers_s = [t.forward_s for t in pipeline.transfers] + [t.backward_s for t in pipeline.transfers]
    submeshes_free_s = [0.0] * pipeline.schedule.num_submeshes
    links_free_s = [0.0] * len(wiring.links)
    ready_s = [0.0] * len(wiring.tasks)
    if pipeline.weights_s:  # forward tasks are the first in the list of times
        ready_s = [pipeline.weights_s[k] if k < len(pipeline.stages) else 0.0 for k in wiring.times]
    starts_s = []
    for ready, submesh, time, edges in zip(ready_s, wiring.submeshes, wiring.times, wiring.edges, strict=True):
        free = submeshes_free_s[submesh]
        start = ready if ready > free else free
        stop = start + times_s[time]
        submeshes_free_s[submesh] = stop
        starts_s.append(start)
        for target, link, transfer in edges:
            arrived = stop
            if link >= 0 and transfers_s[transfer]:
                sending = links_free_s[link]
                if sending < stop:
                    sending = stop
                arrived = sending + transfers_s[transfer]
                links_free_s[link] = arrived
                if sent is not None:
                    sent.append(_Transfer(target, link, sending, arrived))
            if arrived > ready_s[target]:
                ready_s[target] = arrived
    return starts_s


def _task_times(pipeline: PipelineDurations) -> list[float]:
    """Seconds of all forward tasks by stage, then of all backward tasks, then of all weight tasks."""
    stages, is_split = pipeline.stages, pipeline.schedule.splits_backward
    backward_s = [s.backward_s if is_split else s.backward_s + s.weight_s for s in stages]
    return [s.forward_s for s in stages] + backward_s + [s.weight_s for s in stages]


def _ends(step: StepDurations, starts_s: Sequence[Sequence[float]]) -> _Ends:
    stages_s = []
    gathered_s = update_s = 0.0
    for pipeline, starts in zip(step.pipelines, starts_s, strict=True):
        wiring, times_s = _wiring(pipeline), _task_times(pipeline)
        lasts = [0.0] * len(pipeline.stages)
        for task, time, start in zip(wiring.tasks, wiring.times, starts, strict=True):
            lasts[task.stage] = start + times_s[time]  # tasks of one stage are in the order in which they run
        stages_s.append(tuple(lasts))
        sums = pipeline.gradients_s or (0.0,) * len(lasts)
        gathered_s = max(gathered_s, *(last + s for last, s in zip(lasts, sums, strict=True)))
        num_submeshes = pipeline.schedule.num_submeshes
        update_s = max(update_s, *(sum(pipeline.update_s[p::num_submeshes]) for p in range(num_submeshes)))
    return _Ends(tuple(stages_s), gathered_s, gathered_s + update_s)


def _task_events(i: int, pipeline: PipelineDurations, starts_s: Sequence[float]) -> Iterator[Event]:
    wiring, times_s = _wiring(pipeline), _task_times(pipeline)
    for task, submesh, time, start in zip(wiring.tasks, wiring.submeshes, wiring.times, starts_s, strict=True):
        yield Event(i, submesh, str(task), start, start + times_s[time], task.phase, task.stage, task.micro_batch)


def _transfer_events(i: int, pipeline: PipelineDurations, sent: Sequence[_Transfer]) -> Iterator[Event]:
    wiring = _wiring(pipeline)
    for one in sent:
        task = wiring.tasks[one.target]
        here, there = wiring.links[one.link]
        yield Event(
            i,
            here,
            str(task),
            one.start_s,
            one.stop_s,
            stage=task.stage,
            micro_batch=task.micro_batch,
            to_submesh=there,
        )


def _other_events(i: int, pipeline: PipelineDurations, stages_s: Sequence[float], gathered_s: float) -> Iterator[Event]:
    """Copies of weights at the beginning, sums of gradients and updates at the end; of each stage that has any."""
    submesh_of = pipeline.schedule.submesh_of
    free_s = [gathered_s] * pipeline.schedule.num_submeshes
    for stage, takes_s in enumerate(pipeline.weights_s):
        if takes_s:
            yield Event(i, submesh_of(stage), WEIGHTS, 0.0, takes_s, stage=stage)
    for stage, takes_s in enumerate(pipeline.gradients_s):
        if takes_s:
            yield Event(i, submesh_of(stage), GRADIENTS, stages_s[stage], stages_s[stage] + takes_s, stage=stage)
    for stage, takes_s in enumerate(pipeline.update_s):
        if takes_s:
            submesh = submesh_of(stage)
            yield Event(i, submesh, UPDATE, free_s[submesh], free_s[submesh] + takes_s, stage=stage)
            free_s[submesh] += takes_s


def _check(step: StepDurations) -> None:
    if not step.pipelines:
        raise ScheduleError("A step has at least one pipeline; received none. Add one to `pipelines`.")
    for i, pipeline in enumerate(step.pipelines):
        num_stages = pipeline.schedule.num_stages
        if len(pipeline.stages) != num_stages:
            raise ScheduleError(
                f"Pipeline {i} has {num_stages} stages in its schedule, but durations of {len(pipeline.stages)}. Give "
                "one entry for each stage."
            )
        by_stage = {
            "weights_s": pipeline.weights_s,
            "gradients_s": pipeline.gradients_s,
            "update_s": pipeline.update_s,
        }
        for field, values in by_stage.items():
            if values and len(values) != num_stages:
                raise ScheduleError(
                    f"`{field}` has one time for each of the {num_stages} stages of pipeline {i}, or none at all; "
                    f"received {len(values)}."
                )
            for stage, value in enumerate(values):
                _check_number(value, f"{field} of stage {stage} of pipeline {i}")
        for stage, durations in enumerate(pipeline.stages):
            for field in dataclasses.fields(durations):
                _check_number(getattr(durations, field.name), f"{field.name} of stage {stage} of pipeline {i}")
        for transfer in pipeline.transfers:
            where = f"of the transfer from stage {transfer.source} to {transfer.target} of pipeline {i}"
            _check_number(transfer.forward_s, f"forward_s {where}")
            _check_number(transfer.backward_s, f"backward_s {where}")


def _check_number(value: float, what: str) -> None:
    if not 0 <= value < math.inf:
        raise ScheduleError(f"Times and sizes are finite numbers of at least 0; {what} is {value}.")


def _check_submeshes(step: StepDurations, given: Sequence[Sequence[object]], what: str) -> None:
    expected = [p.schedule.num_submeshes for p in step.pipelines]
    if given and [len(g) for g in given] != expected:
        raise ScheduleError(
            f"Of {what} there is one for each submesh of each pipeline, {expected} in this step; received "
            f"{[len(g) for g in given]}."
        )

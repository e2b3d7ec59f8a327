"""A step of pipelines, replayed with the time that every part of it takes.

Each place runs its tasks strictly in order; a task starts when its place is free and all that it waits for has arrived.
Transfers overlap with computation; on one direction of a link they follow each other in the order in which they were
made. As all of that order is known beforehand, one pass over the tasks gives the time of each.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence

from autoshard.errors import ScheduleError
from autoshard.schedule.durations import PipelineDurations, StepDurations
from autoshard.schedule.memory import peak_bytes
from autoshard.schedule.orders import in_flight_bound
from autoshard.schedule.tasks import Phase, Task
from autoshard.schedule.timeline import Event, Timeline, summarise
from autoshard.schedule.wiring import Wiring, wire


def step_time(step: StepDurations) -> float:
    """Seconds that a step takes; `simulate` without the events.

    Raises:
      ScheduleError: As `simulate`.
    """
    _check(step)
    gathered_s = max(_gradients_there_s(p, _replay(p, wiring_of(p)).task_stops_s) for p in step.pipelines)
    return gathered_s + max(max(_updates_s(p)) for p in step.pipelines)


def simulate(
    step: StepDurations,
    limits_bytes: Sequence[Sequence[float]] = (),
    names: Sequence[Sequence[str]] = (),
) -> Timeline:
    """Replays a step.

    Args:
      step: Its pipelines, and what everything in them takes.
      limits_bytes: For each pipeline and place, the memory of one device; without it, unknown.
      names: For each pipeline and place, what to call it; without it, by number.

    Returns:
      All events and a summary of each place.

    Raises:
      ScheduleError: If the durations do not fit the schedules or are not numbers of at least 0, or an order cannot run.
    """
    _check(step)
    _check_places(step, limits_bytes, "limits of memory")
    _check_places(step, names, "names")
    replays = [_replay(p, wiring_of(p)) for p in step.pipelines]
    gathered_s = max(_gradients_there_s(p, r.task_stops_s) for p, r in zip(step.pipelines, replays, strict=True))
    step_s = gathered_s + max(max(_updates_s(p)) for p in step.pipelines)
    events: list[Event] = []
    summaries = []
    for i, (pipeline, replay) in enumerate(zip(step.pipelines, replays, strict=True)):
        schedule = pipeline.schedule
        own = sorted(_events(i, pipeline, replay, gathered_s), key=lambda e: (e.start_s, e.stop_s))
        events.append(own)
        peaks = peak_bytes(pipeline)
        for place in range(schedule.num_places):
            stages = range(place, schedule.num_stages, schedule.num_places)
            summaries.append(
                summarise(
                    [e for e in own if e.place == place],
                    step_s,
                    pipeline=i,
                    place=place,
                    name=names[i][place] if names else f"{i}.{place}",
                    peak_bytes=peaks[place],
                    limit_bytes=limits_bytes[i][place] if limits_bytes else math.inf,
                    most_in_flight=max(in_flight_bound(schedule, s) for s in stages),
                )
            )
    return Timeline(tuple(events), tuple(summaries), step_s, "simulated")

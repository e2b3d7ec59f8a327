"""What waits for what in a pipeline: found once for a schedule and the transfers that it has, whatever they take."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autoshard.errors import ScheduleError
from autoshard.schedule.tasks import Phase, Schedule, Task

_MOST_NAMED = 8
"""Waiting tasks that an error lists."""


class Arrow(NamedTuple):
    """What one task sends to a later one; a tuple, since the replay unpacks very many.

    Attributes:
      target: Index of the receiving task.
      link: Index of the link's direction, into `Wiring.links`; -1 for a mere order between tasks, which takes no time.
      time: Where it is found how long it takes: index into the forward times of all transfers of the pipeline, followed
        by their backward times; -1 with link -1.
    """

    target: int
    link: int
    time: int


@dataclasses.dataclass(frozen=True, slots=True)
class Wiring:
    """The tasks of a pipeline, each after all that it waits for.

    Attributes:
      tasks: In an order in which they could run one by one. Those of one place are in the place's order, so they need
        no arrows between them.
      places: For each task, its place.
      times: For each task, where it is found how long it takes: index into the forward times of all stages, followed by
        their backward times and their weight times.
      arrows: For each task, what it sends.
      links: Pairs of places, from and to, that transfers go between.
    """

    tasks: tuple[Task, ...]
    places: tuple[int, ...]
    times: tuple[int, ...]
    arrows: tuple[tuple[Arrow, ...], ...]
    links: tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=16)
def wire(schedule: Schedule, pairs: tuple[tuple[int, int], ...]) -> Wiring:
    """Finds what every task of a pipeline waits for.

    A forward task waits for those of the stage before and of all stages that send to it; a backward task for its own
    forward task and for the backward tasks of the stage after and of all stages that it sent to; a weight task for its
    own backward task.

    Args:
      schedule: The order of the tasks.
      pairs: For each transfer, the stage that sends and the later stage that receives. Between stages of one place
        nothing is sent: they only keep their order.

    Raises:
      ScheduleError: If a task is missing, or is not where it belongs; if a transfer does not go from a stage to a later
        one, or is there twice; if the order deadlocks, with the tasks that wait for each other.
    """
    _check_pairs(schedule, pairs)
    _check_tasks(schedule)
    senders, receivers = _neighbours(schedule.num_stages, pairs)
    tasks = _runnable_order(schedule, senders, receivers)
    index = [0] * (len(Phase) * schedule.num_stages * schedule.num_micro_batches)
    for i, task in enumerate(tasks):
        index[_number(schedule, task.stage, task.phase, task.micro_batch)] = i
    transfers = {pair: i for i, pair in enumerate(pairs)}
    links: dict[tuple[int, int], int] = {}
    stages = range(schedule.num_stages)
    routes = [_routes(schedule, s, receivers[s], transfers, 0, links) for s in stages]
    routes += [_routes(schedule, s, senders[s], transfers, len(pairs), links) for s in stages]
    routes += [() for _ in stages]
    times = tuple(_number(schedule, t.stage, t.phase, 0) // schedule.num_micro_batches for t in tasks)
    arrows = tuple(
        tuple(
            Arrow(index[_number(schedule, route.stage, task.phase, task.micro_batch)], route.link, route.time)
            for route in routes[time]
        )
        for task, time in zip(tasks, times, strict=True)
    )
    return Wiring(tasks, tuple(schedule.place_of(t.stage) for t in tasks), times, arrows, tuple(links))


@dataclasses.dataclass(frozen=True, slots=True)
class _Route:
    """Where a stage sends to in one phase, for every micro-batch; the rest as in `Arrow`."""

    stage: int
    link: int
    time: int


def _routes(
    schedule: Schedule,
    stage: int,
    others: Sequence[int],
    transfers: Mapping[tuple[int, int], int],
    first_time: int,
    links: dict[tuple[int, int], int],
) -> tuple[_Route, ...]:
    """To `others` that are on another place; the times begin at `first_time`. Adds the links that are new."""
    here = schedule.place_of(stage)
    routes = []
    for other in others:
        there = schedule.place_of(other)
        if there == here:
            continue
        transfer = transfers.get((min(stage, other), max(stage, other)))
        if transfer is None:
            routes.append(_Route(other, -1, -1))
        else:
            routes.append(_Route(other, links.setdefault((here, there), len(links)), first_time + transfer))
    return tuple(routes)


def _neighbours(num_stages: int, pairs: Sequence[tuple[int, int]]) -> tuple[list[list[int]], list[list[int]]]:
    """For each stage, the stages that send to it, and those that it sends to; the next one is always among them."""
    chain = {(s, s + 1) for s in range(num_stages - 1)}
    senders: list[list[int]] = [[] for _ in range(num_stages)]
    receivers: list[list[int]] = [[] for _ in range(num_stages)]
    for source, target in sorted(chain | set(pairs)):
        senders[target].append(source)
        receivers[source].append(target)
    return senders, receivers


def _number(schedule: Schedule, stage: int, phase: Phase, micro_batch: int) -> int:
    """A number for each task that a pipeline could have; quicker to look up than the task."""
    rank = 0 if phase is Phase.FORWARD else 1 if phase is Phase.BACKWARD else 2
    return (rank * schedule.num_stages + stage) * schedule.num_micro_batches + micro_batch


def _runnable_order(
    schedule: Schedule, senders: Sequence[Sequence[int]], receivers: Sequence[Sequence[int]]
) -> tuple[Task, ...]:
    """Runs every place as far as it gets, and again when what it stopped for is done."""
    is_done = bytearray(len(Phase) * schedule.num_stages * schedule.num_micro_batches)
    found: list[Task] = []
    positions = [0] * schedule.num_places
    stopped_for: dict[int, list[int]] = {}  # places that wait, by the number of the task that they wait for
    to_run = list(range(schedule.num_places))
    while to_run:
        place = to_run.pop()
        order = schedule.order[place]
        while positions[place] < len(order):
            task = order[positions[place]]
            missing = next((n for n in _needed(schedule, task, senders, receivers) if not is_done[n]), None)
            if missing is not None:
                stopped_for.setdefault(missing, []).append(place)
                break
            positions[place] += 1
            number = _number(schedule, task.stage, task.phase, task.micro_batch)
            is_done[number] = True
            found.append(task)
            to_run.extend(stopped_for.pop(number, ()))
    if stopped_for:
        raise ScheduleError(_deadlock(schedule, positions, stopped_for))
    return tuple(found)


def _needed(
    schedule: Schedule, task: Task, senders: Sequence[Sequence[int]], receivers: Sequence[Sequence[int]]
) -> list[int]:
    """Numbers of the tasks that one waits for."""
    stage, m = task.stage, task.micro_batch
    if task.phase is Phase.FORWARD:
        return [_number(schedule, s, Phase.FORWARD, m) for s in senders[stage]]
    if task.phase is Phase.BACKWARD:
        later = [_number(schedule, s, Phase.BACKWARD, m) for s in receivers[stage]]
        return [_number(schedule, stage, Phase.FORWARD, m), *later]
    return [_number(schedule, stage, Phase.BACKWARD, m)]


def _deadlock(schedule: Schedule, positions: Sequence[int], stopped_for: Mapping[int, Sequence[int]]) -> str:
    waits = []
    for number, places in stopped_for.items():
        rest, m = divmod(number, schedule.num_micro_batches)
        rank, stage = divmod(rest, schedule.num_stages)
        missing = Task(stage, tuple(Phase)[rank], m)
        waits += [(p, f"place {p}: {schedule.order[p][positions[p]]} for {missing}") for p in places]
    shown = "; ".join(text for _, text in sorted(waits)[:_MOST_NAMED])
    more = f"; and {len(waits) - _MOST_NAMED} more places" if len(waits) > _MOST_NAMED else ""
    return (
        f"The order of the tasks must let each place go on, but in this schedule ({schedule}) these wait for ever: "
        f"{shown}{more}. Put the task that is waited for before the one that its own place has stopped at."
    )


def _check_tasks(schedule: Schedule) -> None:
    phases = (Phase.FORWARD, Phase.BACKWARD, *([Phase.WEIGHT] if schedule.splits_backward else []))
    expected = len(phases) * schedule.num_stages * schedule.num_micro_batches
    seen = bytearray(expected)
    for place, order in enumerate(schedule.order):
        for task in order:
            is_known = (
                0 <= task.stage < schedule.num_stages
                and 0 <= task.micro_batch < schedule.num_micro_batches
                and task.phase in phases
            )
            if not is_known or schedule.place_of(task.stage) != place:
                raise ScheduleError(
                    f"Place {place} runs {task}, which does not belong there in this schedule ({schedule}): stage s is "
                    "on place s modulo the number of places. Correct the order."
                )
            number = _number(schedule, task.stage, task.phase, task.micro_batch)
            if seen[number]:
                raise ScheduleError(f"Each task runs once, but place {place} runs {task} again. Correct the order.")
            seen[number] = True
    if not all(seen):
        rest, m = divmod(seen.index(0), schedule.num_micro_batches)
        rank, stage = divmod(rest, schedule.num_stages)
        raise ScheduleError(
            f"Each task runs once, but {seen.count(0)} never run in this schedule ({schedule}), the first of them "
            f"{Task(stage, phases[rank], m)}. Add them to the order."
        )


def _check_pairs(schedule: Schedule, pairs: Sequence[tuple[int, int]]) -> None:
    for i, (source, target) in enumerate(pairs):
        if not 0 <= source < target < schedule.num_stages:
            raise ScheduleError(
                f"A transfer goes from a stage to a later one; received {source} to {target} in a pipeline of "
                f"{schedule.num_stages} stages (gradients go back by the same entry). Correct the transfers."
            )
        if (source, target) in pairs[:i]:
            raise ScheduleError(f"Stages {source} and {target} have two transfers. Add their times in one entry.")

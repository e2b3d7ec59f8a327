"""What waits for what in a pipeline: found once for a schedule and the transfers that it has, whatever they take."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autoshard.errors import ScheduleError
from autoshard.garbage import collection_paused
from autoshard.pipelines.schedule.tasks import Phase, Schedule, Task

_MOST_NAMED = 8
"""Waiting tasks that an error lists."""


class Edge(NamedTuple):
    """What one task sends to a later one; a tuple, since the replay unpacks very many.

    Attributes:
      target: Index of the receiving task.
      link: Index of the link's direction, into `TaskGraph.links`; -1 for a mere order between tasks, which takes no
        time.
      time: Where it is found how long it takes: index into the forward times of all transfers of the pipeline, followed
        by their backward times; -1 with link -1.
    """

    target: int
    link: int
    time: int


@dataclasses.dataclass(frozen=True, slots=True)
class TaskGraph:
    """The tasks of a pipeline, each after all that it waits for.

    Attributes:
      tasks: In an order in which they could run one by one. Those of one submesh are in its order, so they need
        no edges between them.
      submeshes: For each task, its submesh.
      times: For each task, where it is found how long it takes: index into the forward times of all stages, followed by
        their backward times and their weight times.
      edges: For each task, what it sends.
      links: Pairs of submeshes, from and to, that transfers go between.
    """

    tasks: tuple[Task, ...]
    submeshes: tuple[int, ...]
    times: tuple[int, ...]
    edges: tuple[tuple[Edge, ...], ...]
    links: tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=16)
@collection_paused()
def task_graph(schedule: Schedule, pairs: tuple[tuple[int, int], ...]) -> TaskGraph:
    """Finds what every task of a pipeline waits for.

    A forward task waits for those of the stage before and of all stages that send to it; a backward task for its own
    forward task and for the backward tasks of the stage after and of all stages that it sent to; a weight task for its
    own backward task.

    Args:
      schedule: The order of the tasks.
      pairs: For each transfer, the stage that sends and the later stage that receives. Between stages of one submesh
        nothing is sent: they only keep their order.

    Raises:
      ScheduleError: If a task is missing, or is not where it belongs; if a transfer does not go from a stage to a later
        one, or is there twice; if the order deadlocks, with the tasks that wait for each other.
    """
    _check_pairs(schedule, pairs)
    numbers = _numbers(schedule)
    count, num_stages = schedule.num_micro_batches, schedule.num_stages
    senders, receivers = _neighbours(num_stages, pairs)
    runnable = _runnable_order(schedule, numbers, _needed(senders, receivers))
    index = [0] * (len(Phase) * num_stages * count)
    for i, (number, _) in enumerate(runnable):
        index[number] = i
    transfers = {pair: i for i, pair in enumerate(pairs)}
    links: dict[tuple[int, int], int] = {}
    routes = [_routes(schedule, s, receivers[s], transfers, False, links) for s in range(num_stages)]
    routes += [_routes(schedule, s, senders[s], transfers, True, links) for s in range(num_stages)]
    routes += [()] * num_stages
    times = tuple(number // count for number, _ in runnable)
    edges = tuple(
        tuple([Edge(index[r.phase * count + number % count], r.link, r.time) for r in routes[number // count]])
        for number, _ in runnable
    )
    submeshes = [schedule.submesh_of(s) for s in range(num_stages)] * len(Phase)
    return TaskGraph(tuple(t for _, t in runnable), tuple(submeshes[t] for t in times), times, edges, tuple(links))


@dataclasses.dataclass(frozen=True, slots=True)
class _Route:
    """Where a stage sends to in one phase, for every micro-batch.

    Attributes:
      phase: Number of the phase of the receiving stage: forward phases by stage, then backward, then weight phases.
      link, time: As in `Edge`.
    """

    phase: int
    link: int
    time: int


def _routes(
    schedule: Schedule,
    stage: int,
    others: Sequence[int],
    transfers: Mapping[tuple[int, int], int],
    is_backward: bool,
    links: dict[tuple[int, int], int],
) -> tuple[_Route, ...]:
    """To `others` that are on another submesh. Adds the links that are new."""
    here, routes = schedule.submesh_of(stage), []
    for other in others:
        there, phase = schedule.submesh_of(other), other + is_backward * schedule.num_stages
        transfer = transfers.get((min(stage, other), max(stage, other)))
        if there == here:
            continue
        if transfer is None:
            routes.append(_Route(phase, -1, -1))
        else:
            link = links.setdefault((here, there), len(links))
            routes.append(_Route(phase, link, transfer + is_backward * len(transfers)))
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


def _needed(senders: Sequence[Sequence[int]], receivers: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each phase of each stage, by number, the phases that it waits for with each micro-batch."""
    num_stages = len(senders)
    forward = [list(s) for s in senders]
    backward = [[s, *(num_stages + t for t in receivers[s])] for s in range(num_stages)]
    return forward + backward + [[num_stages + s] for s in range(num_stages)]


def _runnable_order(
    schedule: Schedule, numbers: Sequence[Sequence[int]], needed: Sequence[Sequence[int]]
) -> list[tuple[int, Task]]:
    """Runs each submesh as far as it gets, and again when what it stopped for is done: all tasks with their numbers."""
    count = schedule.num_micro_batches
    is_done = bytearray(len(needed) * count)
    found: list[tuple[int, Task]] = []
    positions = [0] * schedule.num_submeshes
    stopped_for: dict[int, list[int]] = {}  # submeshes that wait, by the number of the task that they wait for
    to_run = list(range(schedule.num_submeshes))
    while to_run:
        submesh = to_run.pop()
        for position in range(positions[submesh], len(numbers[submesh])):
            number = numbers[submesh][position]
            phase, m = divmod(number, count)
            missing = [n for other in needed[phase] if not is_done[n := other * count + m]]
            if missing:
                stopped_for.setdefault(missing[0], []).append(submesh)
                positions[submesh] = position
                break
            is_done[number] = True
            found.append((number, schedule.order[submesh][position]))
            if number in stopped_for:
                to_run += stopped_for.pop(number)
    if stopped_for:
        raise ScheduleError(_deadlock(schedule, positions, stopped_for))
    return found


def _deadlock(schedule: Schedule, positions: Sequence[int], stopped_for: Mapping[int, Sequence[int]]) -> str:
    waits = [
        (submesh, f"submesh {submesh}: {schedule.order[submesh][positions[submesh]]} for {_task(schedule, number)}")
        for number, submeshes in stopped_for.items()
        for submesh in submeshes
    ]
    shown = "; ".join(text for _, text in sorted(waits)[:_MOST_NAMED])
    more = f"; and {len(waits) - _MOST_NAMED} more submeshes" if len(waits) > _MOST_NAMED else ""
    return (
        f"The order of the tasks must let each submesh go on, but in this schedule ({schedule}) these wait for ever: "
        f"{shown}{more}. Put the task that is waited for before the one that its own submesh has stopped at."
    )


def _task(schedule: Schedule, number: int) -> Task:
    """The task with a number: forward tasks by stage and micro-batch, then backward tasks, then weight tasks."""
    phase, m = divmod(number, schedule.num_micro_batches)
    return Task(phase % schedule.num_stages, tuple(Phase)[phase // schedule.num_stages], m)


def _numbers(schedule: Schedule) -> list[list[int]]:
    """For each submesh, the numbers of its tasks (`_task`) in order; quicker to look up than the tasks.

    Raises:
      ScheduleError: If a task is missing or is not where it belongs.
    """
    num_stages, count = schedule.num_stages, schedule.num_micro_batches
    num_phases = 3 if schedule.splits_backward else 2
    submeshes = [schedule.submesh_of(s) for s in range(num_stages)]
    seen = bytearray(num_phases * num_stages * count)
    numbers: list[list[int]] = []
    for submesh, order in enumerate(schedule.order):
        numbers.append([])
        for task in order:
            stage, m, phase = task.stage, task.micro_batch, task.phase
            rank = 0 if phase is Phase.FORWARD else 1 if phase is Phase.BACKWARD else 2
            is_known = 0 <= stage < num_stages and 0 <= m < count and rank < num_phases
            if not is_known or submeshes[stage] != submesh:
                raise ScheduleError(
                    f"Submesh {submesh} runs {task}, which does not belong there in this schedule ({schedule}): stage "
                    "s is on submesh s modulo the number of submeshes. Correct the order."
                )
            number = (rank * num_stages + stage) * count + m
            if seen[number]:
                raise ScheduleError(f"Each task runs once, but submesh {submesh} runs {task} again. Correct the order.")
            seen[number] = True
            numbers[-1].append(number)
    if not all(seen):
        raise ScheduleError(
            f"Each task runs once, but {seen.count(0)} never run in this schedule ({schedule}), the first of them "
            f"{_task(schedule, seen.index(0))}. Add them to the order."
        )
    return numbers


def _check_pairs(schedule: Schedule, pairs: Sequence[tuple[int, int]]) -> None:
    for i, (source, target) in enumerate(pairs):
        if not 0 <= source < target < schedule.num_stages:
            raise ScheduleError(
                f"A transfer goes from a stage to a later one; received {source} to {target} in a pipeline of "
                f"{schedule.num_stages} stages (gradients go back by the same entry). Correct the transfers."
            )
        if (source, target) in pairs[:i]:
            raise ScheduleError(f"Stages {source} and {target} have two transfers. Add their times in one entry.")

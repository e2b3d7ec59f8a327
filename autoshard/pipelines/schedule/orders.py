"""The schedules: which task follows which on each submesh.

All four are static, so that every process of a run can work out the same order by itself. Micro-batches enter every
phase of every stage in ascending order, so that sums of gradients are made in one order whatever the schedule.
"""

import functools
from collections.abc import Iterator

from autoshard.errors import ScheduleError
from autoshard.garbage import collection_paused
from autoshard.pipelines.schedule.tasks import Phase, Schedule, ScheduleKind, Task


@functools.lru_cache(maxsize=16)
@collection_paused()
def make_schedule(kind: ScheduleKind, num_submeshes: int, num_stages: int, num_micro_batches: int) -> Schedule:
    """The tasks of one step of a pipeline, in order, for each submesh.

    Args:
      kind: The order wanted.
      num_submeshes: Device meshes of the pipeline.
      num_stages: Stages, at least one for each submesh; more than one only if interleaved, and then as many on each.
      num_micro_batches: Micro-batches of a step; any number.

    Returns:
      The schedule. The last few are kept, and what they wait for with them: ask again rather than hold many.

    Raises:
      ScheduleError: If the sizes do not fit together.
    """
    _check_sizes(kind, num_submeshes, num_stages, num_micro_batches)
    if kind is ScheduleKind.GPIPE:
        order = [_gpipe(p, num_micro_batches) for p in range(num_submeshes)]
    elif kind is ScheduleKind.ONE_F_ONE_B:
        order = [_one_f_one_b(p, num_stages, num_micro_batches) for p in range(num_submeshes)]
    elif kind is ScheduleKind.INTERLEAVED:
        order = [_interleaved(p, num_submeshes, num_stages, num_micro_batches) for p in range(num_submeshes)]
    else:
        order = [_zero_bubble(p, num_stages, num_micro_batches) for p in range(num_submeshes)]
    return Schedule(kind, num_stages, num_micro_batches, tuple(tuple(tasks) for tasks in order))


def in_flight_bound(schedule: Schedule, stage: int) -> int:
    """Most micro-batches that a stage holds at once: begun, and their last phase not yet done.

    GPipe: all M of them; 1F1B: min(M, S - s); ZB-H1: min(M, S) on every stage, of which the first holds them whole and
    the last mostly what its weight tasks read. Counted from the order, hence right for any.
    """
    held = most = 0
    for task in schedule.order[schedule.submesh_of(stage)]:
        if task.stage == stage:
            held += (task.phase is Phase.FORWARD) - (task.phase is schedule.last_phase)
            most = max(most, held)
    return most


def _check_sizes(kind: ScheduleKind, num_submeshes: int, num_stages: int, num_micro_batches: int) -> None:
    received = f"received {num_stages} stages on {num_submeshes} submeshes and {num_micro_batches} micro-batches"
    if min(num_submeshes, num_stages, num_micro_batches) < 1:
        raise ScheduleError(f"A pipeline has at least one submesh, one stage and one micro-batch; {received}.")
    if kind is ScheduleKind.INTERLEAVED:
        if num_stages % num_submeshes:
            raise ScheduleError(
                f"An interleaved schedule has equally many stages on each submesh; {received}. Make the number of "
                f"stages a multiple of {num_submeshes}."
            )
    elif num_stages != num_submeshes:
        raise ScheduleError(
            f"The schedule {kind.value} has one stage on each submesh; {received}. Give it as many submeshes as "
            f"stages, or ask for {ScheduleKind.INTERLEAVED.value}."
        )


def _gpipe(stage: int, num_micro_batches: int) -> Iterator[Task]:
    """All forward tasks, then all backward tasks."""
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for m in range(num_micro_batches):
            yield Task(stage, phase, m)


def _one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> Iterator[Task]:
    """As many forward tasks as it takes until the first gradient can be there, then backward and forward in turn."""
    yield from _in_turn(
        [Task(stage, Phase.FORWARD, m) for m in range(num_micro_batches)],
        [Task(stage, Phase.BACKWARD, m) for m in range(num_micro_batches)],
        num_stages - stage - 1,
    )


def _interleaved(submesh: int, num_submeshes: int, num_stages: int, num_micro_batches: int) -> Iterator[Task]:
    """Micro-batches in groups: a group passes all stages of a submesh before the next group comes.

    Where P divides M the groups have P micro-batches, and this is Megatron's order (arXiv:2104.04473, 2.2). Else there
    are as many groups as can have P, and the rest is spread over them: smaller ones would leave gaps, since a
    micro-batch that leaves a submesh is back there only P tasks later. Fewer than P micro-batches are one group.
    """
    per_submesh = num_stages // num_submeshes
    groups = _groups(num_submeshes, num_micro_batches)
    stages = range(submesh, num_stages, num_submeshes)
    num_before = num_submeshes - submesh - 1
    if per_submesh > 1:
        num_before = 2 * num_before + (per_submesh - 1) * len(groups[0])
    yield from _in_turn(
        [Task(s, Phase.FORWARD, m) for group in groups for s in stages for m in group],
        [Task(s, Phase.BACKWARD, m) for group in groups for s in reversed(stages) for m in group],
        num_before,
    )


def _groups(num_submeshes: int, num_micro_batches: int) -> list[range]:
    """Micro-batches in groups of at least `num_submeshes` if there are so many, the larger groups first."""
    num_groups = max(1, num_micro_batches // num_submeshes)
    size, rest = divmod(num_micro_batches, num_groups)
    groups, first = [], 0
    for i in range(num_groups):
        groups.append(range(first, first + size + (i < rest)))
        first = groups[-1].stop
    return groups


def _zero_bubble(stage: int, num_stages: int, num_micro_batches: int) -> Iterator[Task]:
    """ZB-H1 (arXiv:2401.10241, 2.1): 1F1B in which stage s puts its weight tasks off by s micro-batches.

    The first stage, which holds S micro-batches anyway, puts off none; the last, which holds one, puts off S - 1: so no
    stage ever holds more than S, and the weight tasks fill the time in which 1F1B waits for the last gradients.
    """
    order = _one_f_one_b(stage, num_stages, num_micro_batches)
    for task in order:
        yield task
        if task.phase is Phase.BACKWARD and task.micro_batch >= stage:
            yield Task(stage, Phase.WEIGHT, task.micro_batch - stage)
    for m in range(max(0, num_micro_batches - stage), num_micro_batches):
        yield Task(stage, Phase.WEIGHT, m)


def _in_turn(forward: list[Task], backward: list[Task], num_before: int) -> Iterator[Task]:
    """`num_before` forward tasks, then one forward and one backward in turn, then the backward tasks that remain."""
    num_before = min(num_before, len(forward))
    yield from forward[:num_before]
    for f, b in zip(forward[num_before:], backward, strict=False):
        yield f
        yield b
    yield from backward[len(forward) - num_before :]

"""Times that a step cannot fall below, in closed form: what the simulator is held against.

Write F_s, B_s, W_s for the times of a stage's phases, where B_s is the sum of both and W_s = 0 if the schedule does not
split the backward pass; x and y for the time of a transfer forward and of its gradients back; M for the micro-batches,
P for the submeshes, S for the stages. From what tasks wait for follow

- first_s[s], before which stage s starts nothing: its copies of weights must be there, and for each stage r that sends
  to it a forward task and a transfer: max(weights_s[s], max over r of first_s[r] + F_r + x).
- after_s[s], which remains of the pipeline's step after any backward task of stage s, as backward tasks of all stages r
  that send to s follow, and at last a sum of gradients: max(W_s + gradients_s[s], max over r of y + B_r + after_s[r]).
- round_s[s], from the start of a forward task of stage s to the end of its backward task, at least, since it goes to
  the last stage and back: F_s + B_s + max over the stages t that s sends to of x + round_s[t] + y.

Stage s - 1 always counts as one that sends to s, so first_s and after_s grow with s. The bounds:

1. A submesh is busy for M times all tasks of its stages, of which the lowest has the least first_s and after_s. If the
   backward pass is not split, the last task is a backward task, so first_s + M (F + B) + after_s. If it is, all forward
   and backward tasks are done with after_s still to come, and all tasks with the sum of gradients still to come.
2. A direction of a link is busy for M times all its transfers, after the least time until one of them can begin and
   before the least that remains after one.
3. Micro-batches pass in ascending order. So before the last one begins its round at stage s, M - 1 others have had
   their forward task there, or after the first one's round, M - 1 others have their backward task:
   first_s + (M - 1) max(F_s, B_s) + round_s + after_s. GPipe does both, as the last stage begins no backward task
   before its last forward task: (F_s + B_s) in place of the maximum. In 1F1B and ZB-H1, stage s begins a forward task
   only when it holds fewer than S - s micro-batches, so every (S - s)-th waits for the whole round of the one before:
   with q, r = divmod(M - 1, S - s), first_s + r max(F_s, B_s) + (q + 1) round_s + after_s. It is what slow transfers
   cost.

To the slowest pipeline is added the longest update of a submesh, as updates wait for the gradients of all pipelines.
"""

import dataclasses
from collections.abc import Sequence

from autoshard.pipelines.schedule.durations import StageDurations, StepDurations, TransferDurations
from autoshard.pipelines.schedule.tasks import ScheduleKind


def least_step_time(step: StepDurations) -> float:
    """Seconds that `step_time(step)` is never below, but for rounding."""
    slowest_s = longest_update_s = 0.0
    for pipeline in step.pipelines:
        schedule = pipeline.schedule
        least_s = least_pipeline_time(
            schedule.kind,
            schedule.num_submeshes,
            schedule.num_micro_batches,
            pipeline.stages,
            pipeline.transfers,
            pipeline.weights_s,
            pipeline.gradients_s,
        )
        slowest_s = max(slowest_s, least_s)
        updates_s = (sum(pipeline.update_s[p :: schedule.num_submeshes]) for p in range(schedule.num_submeshes))
        longest_update_s = max(longest_update_s, *updates_s)
    return slowest_s + longest_update_s


def least_pipeline_time(
    kind: ScheduleKind,
    num_submeshes: int,
    num_micro_batches: int,
    stages: Sequence[StageDurations],
    transfers: Sequence[TransferDurations] = (),
    weights_s: Sequence[float] = (),
    gradients_s: Sequence[float] = (),
) -> float:
    """Seconds until all gradients of a pipeline are there, at least; needs no schedule to be made.

    Args: As in `make_schedule` and `PipelineDurations`.
    """
    ways = _ways(kind, num_submeshes, stages, transfers, weights_s, gradients_s)
    return max(
        max(_of_submesh(ways, submesh, num_submeshes, num_micro_batches) for submesh in range(num_submeshes)),
        max(_of_stage(ways, kind, stage, num_micro_batches) for stage in range(len(stages))),
        _of_links(ways, num_submeshes, num_micro_batches),
    )


def equal_stages_time(
    num_submeshes: int, num_stages: int, num_micro_batches: int, forward_s: float, backward_s: float
) -> float:
    """Seconds that GPipe, 1F1B and interleaved 1F1B take exactly if all stages are equal and transfers take no time.

    The first submesh works M S / P times on a forward and a backward task, and waits P - 1 times for both; fewer than P
    micro-batches pass the pipeline one after the other. With one stage on each submesh it is (M + S - 1) (F + B).
    """
    work = num_micro_batches * num_stages // num_submeshes + num_submeshes - 1
    return max(work, num_stages + num_micro_batches - 1) * (forward_s + backward_s)


@dataclasses.dataclass(frozen=True, slots=True)
class _Ways:
    """The times of the module's docstring, for each stage; `routes`: all transfers and the steps between neighbours."""

    forward_s: list[float]
    backward_s: list[float]
    weight_s: list[float]
    sums_s: list[float]
    first_s: list[float]
    after_s: list[float]
    round_s: list[float]
    routes: list[TransferDurations]


def _ways(
    kind: ScheduleKind,
    num_submeshes: int,
    stages: Sequence[StageDurations],
    transfers: Sequence[TransferDurations],
    weights_s: Sequence[float],
    gradients_s: Sequence[float],
) -> _Ways:
    is_split = kind is ScheduleKind.ZERO_BUBBLE
    forward_s = [s.forward_s for s in stages]
    backward_s = [s.backward_s + (0.0 if is_split else s.weight_s) for s in stages]
    weight_s = [s.weight_s if is_split else 0.0 for s in stages]
    sums_s = list(gradients_s) or [0.0] * len(stages)
    routes = _routes(len(stages), num_submeshes, transfers)
    first_s = list(weights_s) or [0.0] * len(stages)
    after_s = [w + g for w, g in zip(weight_s, sums_s, strict=True)]
    round_s = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    for r in sorted(routes, key=lambda r: r.target):
        first_s[r.target] = max(first_s[r.target], first_s[r.source] + forward_s[r.source] + r.forward_s)
        after_s[r.target] = max(after_s[r.target], r.backward_s + backward_s[r.source] + after_s[r.source])
    for r in sorted(routes, key=lambda r: -r.source):
        through_s = forward_s[r.source] + r.forward_s + round_s[r.target] + r.backward_s + backward_s[r.source]
        round_s[r.source] = max(round_s[r.source], through_s)
    return _Ways(forward_s, backward_s, weight_s, sums_s, first_s, after_s, round_s, routes)


def _routes(num_stages: int, num_submeshes: int, transfers: Sequence[TransferDurations]) -> list[TransferDurations]:
    """All transfers, which take no time within a submesh, and the steps from each stage to the next."""
    given = [t for t in transfers if (t.target - t.source) % num_submeshes]
    return given + [TransferDurations(s, s + 1, 0.0, 0.0) for s in range(num_stages - 1)]


def _of_submesh(ways: _Ways, submesh: int, num_submeshes: int, count: int) -> float:
    """Bound 1."""
    here = slice(submesh, None, num_submeshes)
    rounds_s = count * (sum(ways.forward_s[here]) + sum(ways.backward_s[here]))
    weights_s = count * sum(ways.weight_s[here])
    return ways.first_s[submesh] + rounds_s + max(ways.after_s[submesh], weights_s + min(ways.sums_s[here]))


def _of_stage(ways: _Ways, kind: ScheduleKind, stage: int, count: int) -> float:
    """Bound 3."""
    forward_s, backward_s = ways.forward_s[stage], ways.backward_s[stage]
    num_rounds, others_s = 1, (count - 1) * max(forward_s, backward_s)
    if kind is ScheduleKind.GPIPE:
        others_s = (count - 1) * (forward_s + backward_s)
    elif kind is not ScheduleKind.INTERLEAVED:
        waits, rest = divmod(count - 1, len(ways.forward_s) - stage)
        num_rounds, others_s = waits + 1, rest * max(forward_s, backward_s)
    return ways.first_s[stage] + others_s + num_rounds * ways.round_s[stage] + ways.after_s[stage]


def _of_links(ways: _Ways, num_submeshes: int, count: int) -> float:
    """Bound 2, over all links; 0 if nothing takes time."""
    before_s: dict[tuple[int, int], float] = {}
    busy_s: dict[tuple[int, int], float] = {}
    rest_s: dict[tuple[int, int], float] = {}

    def add(link: tuple[int, int], before: float, takes: float, rest: float) -> None:
        if takes:
            before_s[link] = min(before_s.get(link, before), before)
            busy_s[link] = busy_s.get(link, 0.0) + count * takes
            rest_s[link] = min(rest_s.get(link, rest), rest)

    for r in ways.routes:
        here, there = r.source % num_submeshes, r.target % num_submeshes
        round_s, backward_s = ways.round_s[r.target], ways.backward_s[r.source]
        sent_s = ways.first_s[r.source] + ways.forward_s[r.source]
        add((here, there), sent_s, r.forward_s, round_s + ways.after_s[r.target])
        add((there, here), ways.first_s[r.target] + round_s, r.backward_s, backward_s + ways.after_s[r.source])
    return max((before_s[link] + busy_s[link] + rest_s[link] for link in busy_s), default=0.0)

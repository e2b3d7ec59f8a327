"""When each stage works on which batch, as prices predict it: a pipeline with credits.

Batch n enters a stage when it has left the one before and batch n - 1 has left this one; it enters the first when a
credit is free: when batch n - k has left the last, with k credits. In the long run a batch then leaves every
max(longest stage, sum of all / k) seconds, the time of a step in `search.py`.
"""

import dataclasses

from autoshard.host_tables.options import Execution
from autoshard.offloading.search import Stages


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A stage at work on a batch.

    Attributes:
      stage: Its number in `Stages.all_s`. batch: From 0. start_s, stop_s: When.
    """

    stage: int
    batch: int
    start_s: float
    stop_s: float


def pace(execution: Execution, stages: Stages, num_batches: int) -> tuple[Span, ...]:
    """What each stage does, for the first so many batches, in the order of batches."""
    spans: list[Span] = []
    free_s = [0.0] * len(stages.all_s)
    left_s: list[float] = []
    for batch in range(num_batches):
        now_s = left_s[batch - execution.num_slots] if batch >= execution.num_slots else 0.0
        for stage, takes_s in enumerate(stages.all_s):
            start_s = max(now_s, free_s[stage])
            now_s = free_s[stage] = start_s + takes_s
            spans.append(Span(stage, batch, start_s, now_s))
        left_s.append(now_s)
    return tuple(spans)

"""Batches over time: a pipeline drawn by hand, and that it runs as fast as the search says."""

import numpy as np
import pytest

from autoshard.host_tables.options import Execution
from autoshard.offloading.pace import Span, pace
from autoshard.offloading.search import Stages


def test_two_batches_with_one_credit_by_hand():
    stages = Stages(2.0, 0.0, 1.0, 3.0, 1.0)
    assert pace(Execution("sync"), stages, 2) == (
        Span(0, 0, 0, 2), Span(1, 0, 2, 2), Span(2, 0, 2, 3), Span(3, 0, 3, 6), Span(4, 0, 6, 7),
        Span(0, 1, 7, 9), Span(1, 1, 9, 9), Span(2, 1, 9, 10), Span(3, 1, 10, 13), Span(4, 1, 13, 14),
    )  # fmt: skip
    ahead = pace(Execution("pipelined"), stages, 2)
    assert ahead[5:] == (Span(0, 1, 2, 4), Span(1, 1, 4, 4), Span(2, 1, 4, 5), Span(3, 1, 6, 9), Span(4, 1, 9, 10))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("execution", [Execution("sync"), Execution("pipelined"), Execution("async", max_staleness=1)])
def test_in_the_long_run_a_batch_leaves_in_every_step(execution, seed):
    """And meanwhile no stage has two batches, none overtakes, and no more are under way than there are credits."""
    stages = Stages(*np.random.default_rng(seed).exponential(1.0, 5))
    spans, count, slots = pace(execution, stages, 60), len(stages.all_s), execution.num_slots
    left_s = [span.stop_s for span in spans if span.stage == count - 1]
    step_s = max(*stages.all_s, stages.sum_s / slots)
    assert (left_s[-1] - left_s[-1 - 3 * slots]) / (3 * slots) == pytest.approx(step_s)
    for stage in range(count):
        own = [span for span in spans if span.stage == stage]
        assert all(later.start_s >= before.stop_s for before, later in zip(own, own[1:], strict=False))
    for batch in range(60):
        own = spans[batch * count : (batch + 1) * count]
        assert all(later.start_s >= before.stop_s for before, later in zip(own, own[1:], strict=False))
        assert batch < slots or own[0].start_s >= left_s[batch - slots]

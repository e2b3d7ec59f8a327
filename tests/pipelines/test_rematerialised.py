"""Which stages of a submesh are computed again: exactly the least choices that fit, by the replayed order."""

import itertools

import numpy as np
import pytest

from autoshard.pipelines.schedule.durations import PipelineDurations, StageDurations
from autoshard.pipelines.schedule.orders import make_schedule
from autoshard.pipelines.schedule.peak_memory import greatest_live, peak_bytes
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.rematerialised import least_rematerialised


def stage(residual, working, fixed=1.0):
    return StageDurations(1.0, 1.0, 1.0, residual, 0.0, fixed, working)


def peaks(schedule, plain, again, chosen):
    stages = tuple(a if c else p for p, a, c in zip(plain, again, chosen, strict=True))
    return peak_bytes(PipelineDurations(schedule, stages))


@pytest.mark.parametrize("seed", range(6))
def test_brute_force(seed):
    """Of all choices that fit, those that contain no other, and in the order of their numbers."""
    rng = np.random.default_rng(seed)
    num_submeshes, chunks, number = int(rng.integers(1, 4)), int(rng.integers(1, 6)), int(rng.integers(1, 9))
    num_stages = num_submeshes * chunks
    schedule = make_schedule(ScheduleKind.INTERLEAVED, num_submeshes, num_stages, number)
    plain = [stage(r, 0.3) for r in rng.uniform(1.0, 2.0, num_stages)]
    again = [stage(r, 0.3 + p.residual_bytes) for r, p in zip(rng.uniform(0.1, 1.1, num_stages), plain, strict=True)]
    for submesh, held in enumerate(greatest_live(schedule)):
        here = range(submesh, num_stages, num_submeshes)
        all_peaks = {}
        for way in itertools.product((False, True), repeat=chunks):
            chosen = [False] * num_stages
            for s, is_again in zip(here, way, strict=True):
                chosen[s] = is_again
            all_peaks[way] = peaks(schedule, plain, again, chosen)[submesh]
        for limit in np.quantile(list(all_peaks.values()), [0.0, 0.2, 0.5, 0.9]) * (1 + 1e-6):
            fitting = [way for way, peak in all_peaks.items() if peak <= limit]
            least = [w for w in fitting if not any(o != w and all(np.array(o) <= w) for o in fitting)]
            found = least_rematerialised(
                held, num_submeshes, *([x[s] for s in here] for x in (plain, again)), limit, 99
            )
            assert sorted(found) == sorted(least)
            assert [sum(w) for w in found] == sorted(sum(w) for w in found)
            some = least_rematerialised(held, num_submeshes, *([x[s] for s in here] for x in (plain, again)), limit, 2)
            assert some == found[:2]
        nothing = min(all_peaks.values()) * (1 - 1e-6)
        assert not least_rematerialised(
            held, num_submeshes, *([x[s] for s in here] for x in (plain, again)), nothing, 9
        )


def test_by_hand():
    """One submesh holds both stages of one micro-batch at once: 2 x 1 of weights, 2 x 3 of residuals, 1 for a task.

    Computed again, a stage holds 1 in place of 3, and needs 3 more while it runs.
    """
    schedule = make_schedule(ScheduleKind.INTERLEAVED, 1, 2, 1)
    plain, again = [stage(3.0, 1.0)] * 2, [stage(1.0, 4.0)] * 2
    held = greatest_live(schedule)[0]
    assert least_rematerialised(held, 1, plain, again, 9.0, 9) == [(False, False)]
    # the first again: 2 + 1 + 3 + 1 while the last runs, 2 + 1 + 3 + 1 while it runs itself; the last: 2 + 3 + 1 + 4
    assert least_rematerialised(held, 1, plain, again, 8.9, 9) == [(True, False)]
    assert least_rematerialised(held, 1, plain, again, 7.0, 9) == [(True, False)]
    assert not least_rematerialised(held, 1, plain, again, 6.9, 9)

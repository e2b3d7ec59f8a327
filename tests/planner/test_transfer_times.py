"""When what hides is sent: as early as possible for sums of gradients, as late as possible for gathers."""

import dataclasses

import pytest

from autoshard.cost.exposure import Hideable, exposure
from autoshard.planner.timeline import Timeline
from autoshard.planner.transfer_times import earliest_ends, latest_spans


def timeline(kernels_s: list[float], hideable: list[Hideable]) -> Timeline:
    """A timeline of kernels and of what hides behind them alone."""
    found = exposure(kernels_s, hideable, 1.0)
    return Timeline((), (), tuple(kernels_s), 1.0, tuple(hideable), found.stretches, (), (), found)


def test_one_collective_runs_first_or_last_in_its_window():
    """One second beside kernels 0 to 3, a second each: done before 1 at the earliest, begun beside 3 at the latest."""
    planned = timeline([1.0] * 5, [Hideable(0, 4, 1.0)])
    assert earliest_ends(planned) == [1]
    assert latest_spans(planned) == [(3, 4)]


def test_two_collectives_make_room_for_each_other():
    """Both are needed by 4, and take 1.5 s: backwards, one is sent beside 3 and half of 2, the other from 1 on."""
    planned = timeline([1.0] * 5, [Hideable(0, 4, 1.5), Hideable(0, 4, 1.5)])
    assert sorted(latest_spans(planned)) == [(1, 3), (2, 4)]
    assert sorted(earliest_ends(planned)) == [2, 3]


def test_what_does_not_hide_begins_when_it_can_and_ends_when_it_must():
    planned = timeline([1.0, 1.0, 1.0], [Hideable(0, 2, 5.0)])
    assert (latest_spans(planned), earliest_ends(planned)) == ([(0, 2)], [2])


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_mirrored_schedule_lets_kernels_wait_as_long(stop):
    """Waiting is the same both ways: the formula is symmetric (`cost/exposure.py`)."""
    kernels_s, hideable = [0.5, 1.0, 0.25, 2.0], [Hideable(0, stop, 1.6), Hideable(1, 4, 2.5), Hideable(0, 1, 0.7)]
    mirrored = [dataclasses.replace(c, start=4 - c.stop, stop=4 - c.start) for c in hideable]
    one, other = exposure(kernels_s, hideable, 1.0), exposure(kernels_s[::-1], mirrored, 1.0)
    assert one.total_s == pytest.approx(other.total_s)

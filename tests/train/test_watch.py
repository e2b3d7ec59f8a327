"""Who is slow, and what shares gained, however many steps are told at once."""

import pytest
from slow_rank import FROM, RANKS, SLOW, UNTIL, Trace, TwoAtOnce

from autoshard.train.watch import Watch


@pytest.mark.parametrize("times", [Trace, TwoAtOnce])
@pytest.mark.parametrize("start", [0, 1])
def test_a_slow_rank_is_news_within_five_steps_and_so_is_its_end(times, start):
    trace = times()
    for _ in range(start):  # the slowdown begins at the first or at the second of two steps told at once
        Trace.after_step(trace, 0.1)
    watch, told, news = Watch(trace, range(RANKS), 1.3), 0, []
    for number in range(1, 50 - start):
        told += watch.after_step(number, 0.1)
        if watch.is_new:
            news.append((number, [rank for rank, _ in watch.slow]))
    (named, slow), (ended, nobody) = news
    assert FROM - start + 3 <= named <= FROM - start + 4 and slow == [SLOW]
    assert UNTIL - start < ended <= UNTIL - start + 6 and nobody == []
    assert told == number - (times is TwoAtOnce and number % 2 != start)


def test_ranks_are_as_slow_as_their_slowest_device():
    watch = Watch(Trace(), [0, 1, 2, 1, 3, 2, 0, 3], 1.3)  # device 3 is slow
    for number in range(1, 12):
        watch.after_step(number, 0.1)
    assert [rank for rank, _ in watch.slow] == [1] and watch.slowness[1] == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize("times", [Trace, TwoAtOnce])
def test_what_a_change_gained_is_told_once_after_ten_steps(times):
    watch, gains = Watch(times(), range(RANKS), 1.3), []
    for number in range(1, UNTIL):
        if not watch.after_step(number, 0.1):
            continue
        if gain := watch.gain():
            gains.append((number, gain))
        if number == FROM - 2:
            watch.changed()
    ((number, gain),) = gains
    assert gain.since == FROM - 2 and number == FROM + 8
    assert gain.before_s == pytest.approx(0.1, rel=0.1) and gain.after_s == pytest.approx(0.4, rel=0.1)


def test_a_slowdown_that_goes_on_is_looked_at_every_ten_steps():
    watch, looked = Watch(Trace(), range(RANKS), 1.3), []
    for number in range(1, UNTIL):
        watch.after_step(number, 0.1)
        if watch.is_due(bool(watch.slow)):
            looked.append(number)
    first = looked[0]
    assert FROM + 3 <= first <= FROM + 4 and looked == list(range(first, UNTIL, 10))

"""Schedules as XLA:GPU's scheduler makes them: small ones by hand, and laws of all."""

import itertools

import numpy as np
import pytest

from autoshard.compiler.latency_hiding import Program, latency_hidden
from autoshard.cost.exposure import Hideable, exposure


def program(kernels_s, collectives, needed_by=None, again=()):
    in_order = tuple(range(1, len(kernels_s) + 1))
    return Program(tuple(kernels_s), needed_by or in_order, [Hideable(*c) for c in collectives], frozenset(again))


def waited_s(*args, has_room=False, **kwargs):
    return latency_hidden(program(*args, **kwargs), has_room).total_s


def drawn(seed):
    """Kernels, and collectives of windows of any length, of which some are awaited at once."""
    random = np.random.default_rng(seed)
    kernels_s = random.uniform(0.1, 2.0, 12) * (random.random(12) < 0.8)
    starts, lengths = random.integers(0, 13, 10), random.integers(0, 6, 10)
    times_s = random.uniform(0.1, 2.5, 10)
    return kernels_s.tolist(), [
        (int(s), int(min(s + n, 12)), float(t)) for s, n, t in zip(starts, lengths, times_s, strict=True)
    ]


def test_what_has_a_kernel_beside_it_hides():
    assert waited_s([1.0, 1.0, 1.0], [(1, 2, 0.5)]) == 0
    assert waited_s([1.0, 1.0, 1.0], [(1, 2, 1.5)]) == pytest.approx(0.5)


def test_what_is_awaited_at_once_stands_in_line():
    """One in flight: the long one begins behind the short one, and 0.5 of it are left at the end. Two: it begins first,
    and the short one waits for 0.5 of it. Interrupted, it would hide but for nothing."""
    kernels_s, collectives = [1.0, 1.0], [(0, 2, 1.5), (1, 1, 0.2)]
    assert waited_s(kernels_s, collectives) == pytest.approx(0.7)
    best = exposure(kernels_s, [Hideable(*c) for c in collectives], 1.0)
    assert best.total_s == pytest.approx(0.2)


def test_with_room_nothing_is_gathered_again():
    kernels_s, collectives = [1.0, 1.0], [(0, 1, 1.0), (1, 2, 1.5)]
    assert waited_s(kernels_s, collectives, again=(1,)) == pytest.approx(0.5)
    assert waited_s(kernels_s, collectives, again=(1,), has_room=True) == 0


def test_with_room_a_kernel_that_is_needed_late_comes_later():
    """What the second kernel makes is sent to the third; the first is needed at the end."""
    assert waited_s([1.0, 1.0, 1.0], [(2, 2, 0.8)], needed_by=(3, 2, 3)) == pytest.approx(0.8)
    assert waited_s([1.0, 1.0, 1.0], [(2, 2, 0.8)], needed_by=(3, 2, 3), has_room=True) == 0
    assert waited_s([1.0, 1.0, 1.0], [(2, 2, 0.8)], needed_by=(1, 2, 3), has_room=True) == pytest.approx(0.8)


@pytest.mark.parametrize("seed", range(30))
def test_no_order_of_these_kernels_lets_them_wait_less_than_the_best(seed):
    kernels_s, collectives = drawn(seed)
    found = latency_hidden(program(kernels_s, collectives), has_room=True)
    best = exposure(kernels_s, [Hideable(*c) for c in collectives], 1.0)
    assert found.total_s >= best.total_s - 1e-9


@pytest.mark.parametrize("seed", range(30))
def test_all_that_is_sent_is_beside_kernels_or_waited_for(seed):
    kernels_s, collectives = drawn(seed)
    late = np.random.default_rng(seed).integers(1, 13, 12)
    needed_by = tuple(int(max(k + 1, n)) for k, n in enumerate(late))
    found = latency_hidden(program(kernels_s, collectives, needed_by), has_room=True)
    for number, (_, _, time_s) in enumerate(collectives):
        pieces = [p for p in found.pieces if p.collective == number]
        hidden_s = sum((p.stop_share - p.start_share) * kernels_s[p.kernel] for p in pieces)
        waited = sum(w.time_s for w in found.waits if w.collective == number)
        assert hidden_s + waited == pytest.approx(time_s)
        assert found.exposed_s[number] == pytest.approx(waited)
    for kernel in range(12):
        beside = [p for p in found.pieces if p.kernel == kernel]
        assert all(a.stop_share <= b.start_share + 1e-9 for a, b in itertools.pairwise(beside))

"""Schedules of the search over parts are those of the cost model, and what it finds is the best where that is known."""

import itertools

import numpy as np
import pytest

from autoshard.cost.exposure import Hideable, exposure
from autoshard.solver.primal.schedule_search import anneal, waited_s
from autoshard.solver.warm_up import SELDOM


def random_windows(rng, num_ends):
    """Starts and stops, ascending by stop, and the windows by rising start."""
    ends = [sorted(rng.choice(num_ends + 1, 2, replace=False)) for _ in range(int(rng.integers(1, 12)))]
    starts, stops = np.array(sorted(ends, key=lambda own: own[1]), np.int64).T
    return np.ascontiguousarray(starts), np.ascontiguousarray(stops), np.argsort(starts, kind="stable")


def test_kernels_wait_as_in_the_schedule_of_two_streams():
    rng = np.random.default_rng(0)
    for _ in range(300):
        num_ends, share = int(rng.integers(1, 9)), float(rng.choice([0.0, 0.4, 1.0]))
        starts, stops, by_start = random_windows(rng, num_ends)
        amounts = rng.random(num_ends + len(starts)) * rng.integers(0, 2, num_ends + len(starts))
        sent = [Hideable(*c) for c in zip(starts.tolist(), stops.tolist(), amounts[num_ends:].tolist(), strict=True)]
        expected_s = exposure(amounts[:num_ends].tolist(), sent, share).total_s
        found_s = waited_s(amounts, starts, stops, by_start, num_ends, share, np.inf)
        np.testing.assert_allclose(found_s, expected_s, atol=1e-12)
        limit_s = float(rng.random())
        cut_s = waited_s(amounts, starts, stops, by_start, num_ends, share, limit_s)
        assert cut_s == found_s if expected_s <= limit_s else limit_s < cut_s <= found_s


@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_all_that_parts_can_do_is_found(seed, is_tight):
    """From wherever the search begins. Where memory is tight, what fits is found if anything does, and no other option
    of one part is better."""
    rng = np.random.default_rng(seed)
    num_ends, num_parts, num_options, share = 6, 4, 3, 0.8
    starts, stops, by_start = random_windows(rng, num_ends)
    places, count = num_ends + len(starts), num_parts * num_options + 1
    place = rng.integers(places, size=3 * count)
    amount, least_s = rng.random(3 * count), rng.random(count)
    used = rng.random((count, 2)) * (is_tight / 3)
    entry = np.arange(count + 1) * 3

    def step_s(taken):
        own = [*taken, count - 1]
        amounts = np.zeros(places)
        for option in own:
            np.add.at(amounts, place[3 * option : 3 * option + 3], amount[3 * option : 3 * option + 3])
        waits_s = waited_s(amounts, starts, stops, by_start, num_ends, share, np.inf)
        return float(least_s[own].sum()) + waits_s, bool((used[own].sum(axis=0) <= 1.0).all())

    every = itertools.product(*(range(num_options * p, num_options * (p + 1)) for p in range(num_parts)))
    timed = {taken: step_s(taken) for taken in every}
    fitting = {taken: own for taken, (own, fits) in timed.items() if fits}
    option = rng.integers(num_parts * num_options, size=10000)
    begin = np.arange(num_parts) * num_options + rng.integers(num_options, size=num_parts)
    cooling = -np.log1p(-rng.random(len(option))) * np.geomspace(1.0, 1e-3, len(option))
    adds, windows = (least_s, entry, place, amount, used), (starts, stops, by_start, num_ends)
    found = anneal(*adds, *windows, share, 100.0, begin, option // num_options, option, cooling)
    assert (tuple(found.tolist()) in fitting) == bool(fitting)
    near = [own for taken, own in fitting.items() if not is_tight or (found != taken).sum() <= 1]
    assert not fitting or fitting[tuple(found.tolist())] <= min(near) * (1 + 1e-9)


def test_the_search_is_compiled_for_the_types_that_plans_have():
    (kernel,) = (k for stage in SELDOM for k in stage.kernels if k.function is anneal)
    kernel.load()
    assert len(anneal.signatures) == 1

"""Schedules of the search over parts are those of the cost model, and what it finds is the best where that is known."""

import itertools

import numpy as np
import pytest

from autoshard.cost.exposure import Hideable, exposure
from autoshard.solver.primal.schedule_intervals import intervals_of
from autoshard.solver.primal.schedule_search import anneal
from autoshard.solver.warm_up import SELDOM

PENALTY = 100.0


class Parts:
    """A schedule with random windows, and parts with as many options each, which add to it at random places."""

    def __init__(self, rng, num_ends, num_windows, num_parts, num_options, share, used_most, places=3):
        ends = [sorted(rng.choice(num_ends + 1, 2, replace=False)) for _ in range(num_windows)]
        starts, stops = np.array(sorted(ends, key=lambda own: own[1]), np.int64).T
        self.starts, self.stops = np.ascontiguousarray(starts), np.ascontiguousarray(stops)
        self.num_ends, self.num_parts, self.num_options, self.share = num_ends, num_parts, num_options, share
        self.places, self.count = num_ends + num_windows, num_parts * num_options + 1
        self.place = rng.integers(self.places, size=places * self.count)
        self.amount, self.least_s = rng.random(places * self.count), rng.random(self.count)
        self.used = rng.random((self.count, 2)) * used_most
        self.entry = np.arange(self.count + 1) * places

    def step_s(self, taken):
        """The step by the cost model, and by which share the budget is exceeded."""
        own, amounts = [*taken, self.count - 1], np.zeros(self.places)
        for option in own:
            at = slice(self.entry[option], self.entry[option + 1])
            np.add.at(amounts, self.place[at], self.amount[at])
        sent = zip(self.starts.tolist(), self.stops.tolist(), amounts[self.num_ends :].tolist(), strict=True)
        waits_s = exposure(amounts[: self.num_ends].tolist(), [Hideable(*c) for c in sent], self.share).total_s
        return float(self.least_s[own].sum()) + waits_s, max(float((self.used[own].sum(axis=0) - 1).max()), 0.0)

    def annealed(self, rng, moves, every, hottest=1.0):
        """What the search finds from a random beginning, in intervals of so many ends, and what that costs, it says."""
        cut = intervals_of(self.starts, self.stops, self.num_ends, every)
        reached = [
            np.unique(cut.reached(self.place[a:b], self.starts, self.num_ends))
            for a, b in itertools.pairwise(self.entry)
        ]
        reach_entry = np.cumsum([0, *map(len, reached)])
        option = rng.integers(self.count - 1, size=moves)
        begin = np.arange(self.num_parts) * self.num_options + rng.integers(self.num_options, size=self.num_parts)
        cooling = -np.log1p(-rng.random(moves)) * np.geomspace(hottest, 1e-3 * hottest, moves)
        adds = self.least_s, self.entry, self.place, self.amount, self.used, reach_entry, np.concatenate(reached)
        windows = self.starts, self.stops, cut.by_start, cut.come, cut.first
        moves = begin, option // self.num_options, option, cooling
        return anneal(*adds, *windows, self.num_ends, every, self.share, PENALTY, *moves)


@pytest.mark.parametrize("every", [1, 2, 5, 100])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_kernels_wait_as_in_the_schedule_of_two_streams(every, share):
    """However many moves were accepted before, and wherever schedules came together again: many moves are."""
    rng = np.random.default_rng(0)
    for n in range(40):
        num_ends, num_windows = int(rng.integers(1, 40)), int(rng.integers(1, 60))
        parts = Parts(rng, num_ends, num_windows, 12, 3, share, 0.12)
        found, found_s = parts.annealed(rng, 40 * n, every, 0.1)
        step_s, excess = parts.step_s(found)
        unit_s = found_s - step_s if excess else 0.0  # the penalty is in steps of the beginning
        np.testing.assert_allclose(found_s, step_s + unit_s, rtol=1e-9)
        assert not excess or unit_s > 0


@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_all_that_parts_can_do_is_found(seed, is_tight):
    """From wherever the search begins. Where memory is tight, what fits is found if anything does, and no other option
    of one part is better."""
    rng = np.random.default_rng(seed)
    parts = Parts(rng, 6, int(rng.integers(1, 12)), 4, 3, 0.8, 1 / 3 if is_tight else 0.0)
    every = itertools.product(*(range(3 * p, 3 * (p + 1)) for p in range(4)))
    timed = {taken: parts.step_s(taken) for taken in every}
    fitting = {taken: own for taken, (own, excess) in timed.items() if not excess}
    found, _ = parts.annealed(rng, 10000, 2)
    assert (tuple(found.tolist()) in fitting) == bool(fitting)
    near = [own for taken, own in fitting.items() if not is_tight or (found != taken).sum() <= 1]
    assert not fitting or fitting[tuple(found.tolist())] <= min(near) * (1 + 1e-9)


def test_the_search_is_compiled_for_the_types_that_plans_have():
    (kernel,) = (k for stage in SELDOM for k in stage.kernels if k.function is anneal)
    kernel.load()
    assert len(anneal.signatures) == 1

"""Which units are left out: the least important ones, and none for ever."""

import numpy as np
import pytest

from autoshard.balance.places import Placing
from autoshard.balance.selection import ordered

PLACING = Placing(((0, 1, 2, 3), (4, 5, 6, 7)), (2, 4))


def computed(placing: Placing) -> set[int]:
    return {u for units, n in zip(placing.units, placing.active, strict=True) for u in units[:n]}


@pytest.mark.parametrize("priority", ["random", "change", "gradient"])
def test_units_stay_where_they_are(priority):
    found = ordered(PLACING, priority, list(range(8)), [0] * 8, seed=0)
    assert found.active == PLACING.active
    assert [set(u) for u in found.units] == [set(u) for u in PLACING.units]
    assert found.units[1] == PLACING.units[1]  # a device that computes all of its units has no reason to reorder them


@pytest.mark.parametrize("priority", ["change", "gradient"])
def test_those_with_the_highest_scores_are_computed(priority):
    assert computed(ordered(PLACING, priority, [1, 9, 3, 5, 0, 0, 0, 0], [0] * 8, seed=0)) == {1, 3, 4, 5, 6, 7}


@pytest.mark.parametrize("priority", ["random", "change"])
def test_every_unit_is_visited(priority):
    """A device that computes 2 of 4 units: those with constant low scores come in turn."""
    waited, visits = [0] * 8, np.zeros(8, int)
    for seed in range(40):
        now = computed(ordered(PLACING, priority, [9, 8, 1, 0, 0, 0, 0, 0], waited, seed, longest_wait=8))
        waited = [0 if u in now else w + 1 for u, w in enumerate(waited)]
        visits[list(now)] += 1
        assert max(waited) <= 9
    assert visits.min() >= 4


@pytest.mark.parametrize("priority", ["change", "gradient"])
def test_no_unit_is_left_out_three_times_in_a_row_for_its_score(priority):
    """Of four units 2 stay: those with the lowest scores come after two turns, for one turn."""
    waited, turns = [0] * 8, []
    for seed in range(6):
        turns.append(computed(ordered(PLACING, priority, [9, 8, 1, 0, 0, 0, 0, 0], waited, seed)) & {0, 1, 2, 3})
        waited = [0 if u in turns[-1] | {4, 5, 6, 7} else w + 1 for u, w in enumerate(waited)]
    assert turns == [{0, 1}, {0, 1}, {2, 3}] * 2


def test_random_choice_depends_on_the_seed_alone():
    chosen = [computed(ordered(PLACING, "random", None, [0] * 8, seed)) for seed in range(30)]
    again = [computed(ordered(PLACING, "random", None, [0] * 8, seed)) for seed in range(30)]
    assert chosen == again and len({frozenset(c) for c in chosen}) == 6

"""Arrangements against all permutations."""

import itertools
import math

import numpy as np
import pytest

from autoshard.placement.arrange import arrangements, best_arrangement


def renumbered(arrangement, shape):
    """All arrangements that come of one by renumbering the indices along each axis."""
    grid = np.array(arrangement).reshape(shape)
    for orders in itertools.product(*(itertools.permutations(range(n)) for n in shape)):
        yield tuple(grid[np.ix_(*orders)].reshape(-1).tolist())


@pytest.mark.parametrize(
    ("shape", "things"),
    [
        ((2, 3), range(6)),
        ((2, 2, 2), [0, 0, 0, 1, 1, 1, 2, 2]),
        ((6,), [0, 0, 1, 1, 2, 3]),
        ((3, 2), [0, 0, 0, 0, 0, 1]),
    ],
)
def test_every_arrangement_comes_once_or_renumbered(shape, things):
    listed = list(arrangements(shape, list(things)))
    assert len(set(listed)) == len(listed)
    every = set(itertools.permutations(things))
    assert {other for own in listed for other in renumbered(own, shape)} == every
    assert len(listed) < len(every)


def test_without_axes_all_are_listed():
    assert sorted(arrangements(None, [0, 0, 1, 2])) == sorted(set(itertools.permutations([0, 0, 1, 2])))


def test_there_may_be_thousands_of_things():
    things = list(range(3000))
    first, second = itertools.islice(arrangements(None, things), 2)
    assert first == tuple(things)
    assert second == (*things[:-2], things[-1], things[-2])


def cost_of_pairs(seed, shape, count):
    """The sum over neighbours along the axes of a random distance of their classes: a quadratic assignment."""
    random = np.random.default_rng(seed)
    distance = random.random((count, count))
    distance += distance.T
    weights = random.random(len(shape))

    def cost(arrangement):
        grid = np.array(arrangement).reshape(shape)
        total = 0.0
        for axis, weight in enumerate(weights):
            lines = np.moveaxis(grid, axis, -1).reshape(-1, shape[axis])
            total += weight * max(sum(distance[a, b] for a, b in itertools.combinations(line, 2)) for line in lines)
        return round(total, 9)

    return cost


@pytest.mark.parametrize("seed", range(4))
def test_few_arrangements_are_solved_exactly(seed):
    cost = cost_of_pairs(seed, (2, 3), 6)
    found = best_arrangement((2, 3), [tuple(range(6))], cost)
    assert found.is_exact
    assert found.cost == cost(found.arrangement) == min(map(cost, itertools.permutations(range(6))))


@pytest.mark.parametrize("seed", range(4))
def test_a_descent_ends_where_no_swap_helps(seed):
    cost, start = cost_of_pairs(seed, (4, 4), 16), tuple(range(16))
    found = best_arrangement((4, 4), [start], cost, most_tried=100, most_swaps=3000)
    assert not found.is_exact and found.cost < cost(start)
    assert sorted(found.arrangement) == list(start)
    assert found == best_arrangement((4, 4), [start], cost, most_tried=100, most_swaps=3000)


def test_the_descent_finds_what_is_known_to_be_best():
    """Four groups of four that belong together, dealt out in turn: the best cost is 0."""
    cost = lambda x: sum(len({k % 4 for k in x[row : row + 4]}) - 1 for row in range(0, 16, 4))
    found = best_arrangement((4, 4), [tuple(range(16))], cost, most_tried=100)
    assert found.cost == 0 and not found.is_exact
    assert math.prod((4, 4)) == len(found.arrangement)

"""Which moves a search over parts tries: by hand, and that the options which a mixture takes are the cheapest."""

import numpy as np
import pytest

from autoshard.plans.part_search import PartOptions


def options_of(price_s, least_s, amounts, used):
    """Two parts with two options each, over a schedule of three ends and no window; what all share is 4 s."""
    entries = [[(end, own) for end, own in enumerate(row) if own] for row in [*amounts, (0, 0, 0)]]
    return PartOptions(
        plans=np.array([[0, 0], [1, 1]]),
        parts=[np.array([0]), np.array([1])],
        plan=np.array([0, 1, 0, 1]),
        part=np.array([0, 0, 1, 1]),
        option=np.array([[0, 2], [1, 3]]),
        starts=np.zeros(0, np.int64),
        stops=np.zeros(0, np.int64),
        num_ends=3,
        least_s=np.array([*least_s, 4.0]),
        entry=np.cumsum([0, *map(len, entries)]),
        place=np.array([end for row in entries for end, _ in row], np.int64),
        amount=np.array([own for row in entries for _, own in row], np.float64),
        used=np.array([*used, [0.0]]),
        price_s=np.array(price_s),
    )


def test_what_options_cost_beside_the_cheapest_of_their_part():
    found = options_of([3.0, 2.0, 5.0, 5.5], [1, 1, 1, 1], [(0, 0, 0)] * 4, [[0.0]] * 4)
    assert found.reduced_s.tolist() == [1.0, 0.0, 0.0, 0.5]


def test_how_much_parts_matter():
    """Part 0: 0.5 s less at one end, 0.25 more at another, 0.125 of its own; part 1: a tenth of the budget, at the six
    seconds of a step that follows the first plan."""
    amounts = [(0.5, 0, 0), (0, 0.25, 0), (0, 0, 1), (0, 0, 1)]
    found = options_of([0.0] * 4, [1.0, 1.125, 1, 1], amounts, [[0.0], [0.0], [0.3], [0.2]])
    assert found.unit_s == 6.0
    assert found.differs_s.tolist() == pytest.approx([0.875, 0.875, 0.6, 0.6])


def test_what_is_tried_how_often():
    """Both parts matter more than is counted. Part 0 has an option that costs as much as moves may, so that it is tried
    1 / e as often; nothing else is told apart."""
    hottest = 1e-3
    price_s = [1.0 + 6.0 * hottest, 1.0, 2.0, 2.0]
    found = options_of(price_s, [1, 1, 1, 1], [(1, 0, 0), (0, 1, 0)] * 2, [[0.0]] * 4)
    odds = found.odds(hottest)
    np.testing.assert_allclose(odds / odds[1], [np.exp(-1), 1, 1, 1])
    assert odds.sum() == pytest.approx(1.0)


def test_parts_that_hardly_matter_are_tried_less_and_those_that_do_not_never():
    """Part 1 differs by a hundredth of what counts, and then by nothing; where none does, all are as good."""
    slight = 6.0e-6
    for own, expected in ((slight, 0.01), (0.0, 0.0)):
        found = options_of([0.0] * 4, [1, 1, 1, 1 + own], [(1, 0, 0), (0, 1, 0), (0, 0, 0), (0, 0, 0)], [[0.0]] * 4)
        odds = found.odds(1e-3)
        np.testing.assert_allclose(odds[2:] / odds[:2], expected, rtol=1e-6)
    none = options_of([0.0] * 4, [1, 1, 1, 1], [(1, 0, 0)] * 4, [[0.0]] * 4)
    np.testing.assert_allclose(none.odds(1e-3), 0.25)

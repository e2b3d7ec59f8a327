"""The price of capacity: derived by hand where that can be done, and as a bound against enumeration."""

import dataclasses
import math

import generate
import numpy as np
import pytest
from brute_force import brute_force

from autoshard.solver import Node, Problem, SolverOptions, Usage, solve

EXACT = SolverOptions(relative_gap=0.0)


def savers(costs: list[float], capacity: float) -> Problem:
    """Nodes that either cost something, or nothing but 10 units of capacity: a knapsack."""
    nodes = tuple(Node(f"n{i}", np.array([cost, 0.0])) for i, cost in enumerate(costs))
    usages = tuple(Usage(i, 0, 5, np.array([0.0, 10.0])) for i in range(len(costs)))
    return Problem(nodes, (), usages, (), capacity)


@pytest.mark.parametrize(
    ("costs", "capacity", "per_unit", "bound"),
    [
        # A unit buys at best 15/10, then 14/10, ... The fraction of the knapsack's last item sets the price:
        # 35 units take in 15, 14, 13 and half of 12, so that 10 + 11 + 12/2 = 27 remain, at 12/10 a unit.
        ([10.0, 11.0, 12.0, 13.0, 14.0, 15.0], 35.0, 1.2, 27.0),
        # 15 units take in 11 and half of 10: 5 remain.
        ([10.0, 11.0], 15.0, 1.0, 5.0),
        # Everything fits.
        ([10.0, 11.0], 20.0, 0.0, 0.0),
    ],
)
def test_a_knapsack_by_hand(costs, capacity, per_unit, bound):
    price = solve(savers(costs, capacity), EXACT).certificate.capacity_price
    assert price.per_unit == pytest.approx(per_unit, rel=1e-2)
    assert price.bound == pytest.approx(bound, rel=1e-2)


def test_prices_of_two_instants_add_up():
    """Two knapsacks that have nothing to do with each other: one more unit at both instants gains at both."""
    one = savers([10.0, 11.0], 15.0)
    nodes = (*one.nodes, Node("m0", np.array([30.0, 0.0])), Node("m1", np.array([40.0, 0.0])))
    later = tuple(Usage(2 + i, 7, 9, np.array([0.0, 10.0])) for i in range(2))
    price = solve(Problem(nodes, (), (*one.usages, *later), (), 15.0), EXACT).certificate.capacity_price
    assert price.per_unit == pytest.approx(1.0 + 3.0, rel=1e-2)
    assert price.bound == pytest.approx(5.0 + 15.0, rel=1e-2)


def test_no_capacity_gains_more_than_the_price_says():
    told = 0
    for seed in range(300):
        problem = generate.random_problem(seed)
        if problem.capacity is None:
            continue
        price = solve(problem, EXACT).certificate.capacity_price
        if price is None:
            continue
        for share in (0.0, 0.1, 0.5, 2.0):
            extra = share * problem.capacity
            best, choices = brute_force(dataclasses.replace(problem, capacity=problem.capacity + extra))
            if choices is not None:
                told += 1
                assert price.bound_with(extra) <= best + 1e-9 * max(abs(best), abs(price.bound)), seed
    assert told > 200


def test_a_problem_without_capacity_has_no_price():
    certificate = solve(generate.chain(6, 3, 0)[0], EXACT).certificate
    assert certificate.capacity_price.per_unit == 0
    assert math.isclose(certificate.capacity_price.bound, certificate.bound)

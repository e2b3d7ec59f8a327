"""Laws of the dual ascent: cores, price steps and bounds, on random small problems; and of a stopped presolve."""

import importlib.util
import itertools
import math
import pathlib

import numpy as np
import pytest

from autoshard.solver import evaluate
from autoshard.solver.bound.ascent import Ascent
from autoshard.solver.bound.core import Core
from autoshard.solver.bound.flat import Flat, flatten, message_count
from autoshard.solver.bound.messages import factor_minima, node_costs, price_tables, price_unary, sweep
from autoshard.solver.bound.prices import climb_prices
from autoshard.solver.exact.brute_force import brute_force
from autoshard.solver.primal.local_search import labels_cost, labels_usage, modest_labels
from autoshard.solver.reduce.network import Network
from autoshard.solver.reduce.presolve import presolve

_spec = importlib.util.spec_from_file_location("generate", pathlib.Path(__file__).with_name("generate.py"))
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)


def flats(seeds):
    """(seed, flat, nodes, network) of random problems without forbidden entries, not presolved."""
    for seed in seeds:
        network = Network(generate.random_problem(seed, 8, 4))
        finite = all(np.isfinite(own).all() for own in network.unary)
        finite &= all(np.isfinite(factor.table).all() for factor in network.factors.values())
        if finite and not network.infeasible:
            flat, nodes = flatten(network)
            yield seed, flat, nodes, network


def bound_at(flat: Flat, prices: np.ndarray, messages: np.ndarray) -> float:
    """The bound's definition."""
    unary, theta, tables = np.zeros(len(flat.unary)), np.zeros(len(flat.unary)), flat.tables.copy()
    price_unary(flat, prices, unary)
    price_tables(flat, prices, tables)
    node_costs(flat, unary, messages, theta)
    low = np.minimum.reduceat(theta, flat.label_start[:-1]).sum()
    return float(low + factor_minima(flat, tables, messages) - prices @ flat.capacity)


def test_whole_labels_are_the_cheapest_beside_the_core():
    peeled = 0
    for seed, flat, _, _ in flats(range(2000, 2150)):
        rng = np.random.default_rng(seed)
        core = Core(flat, rng.random(len(flat.capacity)) < 0.3)
        labels = np.array([int(rng.integers(size)) for size in np.diff(core.flat.label_start)], np.int64)
        whole = core.whole_labels(labels)
        assert (whole[core.nodes] == labels).all()
        small, large = labels_cost(core.flat, labels) + core.constant, labels_cost(flat, whole)
        assert small == large or math.isclose(small, large, rel_tol=1e-9, abs_tol=1e-12), seed
        assert np.allclose(labels_usage(core.flat, labels), labels_usage(flat, whole)[core.active])
        peeled += len(flat.label_start) - 1 - len(core.nodes)
    assert peeled > 50


def test_a_core_proves_the_same_bound_as_its_messages_prove_for_the_whole():
    for seed, flat, _, _ in flats(range(2200, 2350)):
        rng = np.random.default_rng(seed)
        core = Core(flat, rng.random(len(flat.capacity)) < 0.5)
        prices = np.where(core.active, rng.random(len(flat.capacity)) * 1e-7, 0.0)
        messages = rng.normal(size=message_count(core.flat))
        small = bound_at(core.flat, prices[core.active], messages) + core.constant if len(core.nodes) else core.constant
        large = bound_at(flat, prices, core.whole_messages(messages))
        assert small == large or math.isclose(small, large, rel_tol=1e-9, abs_tol=1e-9), seed


def test_climbing_prices_never_lowers_the_bound():
    rises = 0
    for _, flat, _, _ in flats(range(2400, 2600)):
        if not len(flat.capacity):
            continue
        ascent = Ascent(flat)
        prices, messages = np.zeros(len(flat.capacity)), np.zeros(message_count(flat))
        theta, tables = flat.unary.copy(), flat.tables.copy()
        labels = np.zeros(len(flat.label_start) - 1, np.int64)
        for turn in range(4):
            price_unary(flat, prices, theta)
            price_tables(flat, prices, tables)
            node_costs(flat, theta.copy(), messages, theta)
            sweep(flat, tables, messages, theta, turn % 2 == 0, ascent.scratch, labels)
            before = bound_at(flat, prices, messages)
            change = climb_prices(flat, theta, tables, messages, prices, 1e-9)
            prices = np.maximum(0.0, prices + change)
            after = bound_at(flat, prices, messages)
            assert after >= before - 1e-9 * max(abs(before), np.abs(flat.unary).max())
            rises += after > before
    assert rises > 20


@pytest.mark.parametrize("block", range(4))
def test_bounds_stay_below_every_solution(block):
    for seed in range(2700 + 100 * block, 2800 + 100 * block):
        problem = generate.random_problem(seed, 7, 3)
        expected, _ = brute_force(problem)
        network = Network(problem)
        presolve(network)
        if network.infeasible or not any(network.alive) or math.isinf(expected):
            continue
        flat, _ = flatten(network)
        ascent = Ascent(flat)
        for _ in range(6):
            ascent.climb(25, math.inf, math.inf, -1.0)
            assert ascent.bound + network.constant <= expected + 1e-9 * abs(expected), seed
        _, _, bound = ascent.state()
        assert math.isclose(bound, ascent.bound, rel_tol=1e-7, abs_tol=1e-9 * abs(expected)), seed


def test_modest_labels_take_least():
    for _, flat, _, _ in flats(range(3200, 3260)):
        labels = modest_labels(flat)
        for node, label in enumerate(labels):
            taken = np.zeros(flat.label_start[node + 1] - flat.label_start[node])
            for r in range(flat.usage_start[node], flat.usage_start[node + 1]):
                taken += flat.amounts[flat.usage_amounts[r] :][: len(taken)]
            cost = flat.unary[flat.label_start[node] : flat.label_start[node + 1]]
            assert (taken[label], cost[label]) == min(zip(taken, cost, strict=True))


def test_presolve_may_be_stopped_at_any_question(monkeypatch):
    monkeypatch.setattr("autoshard.solver.reduce.presolve.LOOKS", 1)
    for seed in range(3300, 3380):
        problem = generate.random_problem(seed, 6, 3)
        expected, _ = brute_force(problem)
        for patience in (0, 1, 3, 7):
            asked = itertools.count()
            network = Network(problem)
            presolve(network, lambda asked=asked, patience=patience: next(asked) >= patience)
            if network.infeasible:
                assert math.isinf(expected), seed
                continue
            kept = {node: own for node, own in enumerate(network.labels) if network.alive[node]}
            best = math.inf
            for combination in np.ndindex(*(len(own) for own in kept.values())):
                chosen = {node: int(own[k]) for (node, own), k in zip(kept.items(), combination, strict=True)}
                result = evaluate(problem, network.complete(chosen))
                best = min(best, result.objective if result.feasible else math.inf)
            assert best == expected or math.isclose(best, expected, rel_tol=1e-8), (seed, patience)

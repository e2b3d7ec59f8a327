"""Laws of the dual ascent: cores, price steps and bounds, on random small problems; and of a stopped presolve."""

import itertools
import math

import generate
import numpy as np
import pytest
from brute_force import brute_force

from autoshard.solver import evaluate
from autoshard.solver.bound.core import CoreGraph
from autoshard.solver.bound.dual_ascent import DualAscent
from autoshard.solver.bound.messages import factor_minima, node_costs, price_tables, price_unary, sweep
from autoshard.solver.bound.prices import ascend_prices
from autoshard.solver.factor_graph import FactorGraph, factor_graph_of, message_count, with_own_tables
from autoshard.solver.labelling import labels_cost, labels_usage
from autoshard.solver.primal.local_search import least_usage_labels
from autoshard.solver.reduce.network import Network
from autoshard.solver.reduce.presolve import presolve


def flats(seeds):
    """(seed, graph, nodes, network) of random problems without forbidden entries, not presolved."""
    for seed in seeds:
        network = Network(generate.random_problem(seed, 8, 4))
        finite = all(np.isfinite(own).all() for own in network.unary)
        finite &= all(np.isfinite(factor.table).all() for factor in network.factors.values())
        if finite and not network.infeasible:
            graph, nodes = factor_graph_of(network)
            yield seed, with_own_tables(graph), nodes, network


def bound_at(graph: FactorGraph, prices: np.ndarray, messages: np.ndarray) -> float:
    """The bound's definition."""
    unary, theta, tables = np.zeros(len(graph.unary)), np.zeros(len(graph.unary)), graph.tables.copy()
    price_unary(graph, prices, unary)
    price_tables(graph, prices, tables)
    node_costs(graph, unary, messages, theta)
    low = np.minimum.reduceat(theta, graph.label_start[:-1]).sum()
    return float(low + factor_minima(graph, tables, messages) - prices @ graph.capacity)


def test_whole_labels_are_the_cheapest_beside_the_core():
    peeled = 0
    for seed, graph, _, _ in flats(range(2000, 2150)):
        rng = np.random.default_rng(seed)
        core = CoreGraph(graph, rng.random(len(graph.capacity)) < 0.3)
        labels = np.array([int(rng.integers(size)) for size in np.diff(core.graph.label_start)], np.int64)
        whole = core.whole_labels(labels)
        assert (whole[core.nodes] == labels).all()
        small, large = labels_cost(core.graph, labels) + core.constant, labels_cost(graph, whole)
        assert small == large or math.isclose(small, large, rel_tol=1e-9, abs_tol=1e-12), seed
        assert np.allclose(labels_usage(core.graph, labels), labels_usage(graph, whole)[core.active])
        peeled += len(graph.label_start) - 1 - len(core.nodes)
    assert peeled > 50


def test_a_core_proves_the_same_bound_as_its_messages_prove_for_the_whole():
    for seed, graph, _, _ in flats(range(2200, 2350)):
        rng = np.random.default_rng(seed)
        core = CoreGraph(graph, rng.random(len(graph.capacity)) < 0.5)
        prices = np.where(core.active, rng.random(len(graph.capacity)) * 1e-7, 0.0)
        messages = rng.normal(size=message_count(core.graph))
        small = (
            bound_at(core.graph, prices[core.active], messages) + core.constant if len(core.nodes) else core.constant
        )
        large = bound_at(graph, prices, core.whole_messages(messages))
        assert small == large or math.isclose(small, large, rel_tol=1e-9, abs_tol=1e-9), seed


def test_climbing_prices_never_lowers_the_bound():
    rises = 0
    for _, graph, _, _ in flats(range(2400, 2600)):
        if not len(graph.capacity):
            continue
        ascent = DualAscent(graph)
        prices, messages = np.zeros(len(graph.capacity)), np.zeros(message_count(graph))
        theta, tables = graph.unary.copy(), graph.tables.copy()
        labels = np.zeros(len(graph.label_start) - 1, np.int64)
        for turn in range(4):
            price_unary(graph, prices, theta)
            price_tables(graph, prices, tables)
            node_costs(graph, theta.copy(), messages, theta)
            sweep(graph, tables, messages, theta, turn % 2 == 0, ascent.scratch, labels)
            before = bound_at(graph, prices, messages)
            change = ascend_prices(graph, theta, tables, messages, prices, 1e-9)
            prices = np.maximum(0.0, prices + change)
            after = bound_at(graph, prices, messages)
            assert after >= before - 1e-9 * max(abs(before), np.abs(graph.unary).max())
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
        graph, _ = factor_graph_of(network)
        ascent = DualAscent(graph)
        for _ in range(6):
            ascent.climb(25, math.inf, math.inf, -1.0)
            assert ascent.bound + network.constant <= expected + 1e-9 * abs(expected), seed
        bound = ascent.reparametrization().bound
        assert math.isclose(bound, ascent.bound, rel_tol=1e-7, abs_tol=1e-9 * abs(expected)), seed


def test_where_memory_is_dearer_labels_take_less_and_the_ascent_goes_on_as_before():
    """By what the prices weigh, and but for chance in decoding; and nothing of what they are decoded from changes."""
    less, more = 0, 0
    for _, graph, _, _ in flats(range(2600, 2700)):
        ascent, alone = DualAscent(graph), DualAscent(graph)
        ascent.climb(60, math.inf, math.inf, -1.0), alone.climb(60, math.inf, math.inf, -1.0)
        used = [
            float(ascent.prices @ labels_usage(graph, ascent.decoded_at(dearer * ascent.prices, 10)))
            for dearer in (0.0, 4.0)
        ]
        less, more = less + (used[1] < used[0] - 1e-9), more + (used[1] > used[0] + 1e-9)
        ascent.climb(20, math.inf, math.inf, -1.0), alone.climb(20, math.inf, math.inf, -1.0)
        assert ascent.bound == alone.bound and (ascent.prices == alone.prices).all()
    assert less > 10 and more == 0, (less, more)


def test_modest_labels_take_least():
    for _, graph, _, _ in flats(range(3200, 3260)):
        labels = least_usage_labels(graph)
        for node, label in enumerate(labels):
            taken = np.zeros(graph.label_start[node + 1] - graph.label_start[node])
            for r in range(graph.usage_start[node], graph.usage_start[node + 1]):
                taken += graph.amounts[graph.usage_amounts[r] :][: len(taken)]
            cost = graph.unary[graph.label_start[node] : graph.label_start[node + 1]]
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
                result = evaluate(problem, network.postsolve(chosen))
                best = min(best, result.objective if result.feasible else math.inf)
            assert best == expected or math.isclose(best, expected, rel_tol=1e-8), (seed, patience)

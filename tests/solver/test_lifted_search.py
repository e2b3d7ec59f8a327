"""Quotients: tied solutions cost what they cost expanded, and bounds of the folded problem are bounds of the whole."""

import dataclasses
import functools
import math

import generate
import numpy as np
import pytest
from brute_force import brute_force

from autoshard.errors import SolverError
from autoshard.solver import SolverOptions, Status, evaluate, solve
from autoshard.solver.bound.dual_ascent import DualAscent
from autoshard.solver.copied_messages import WholeBound, _laid_out
from autoshard.solver.factor_graph import factor_graph_of
from autoshard.solver.lifted_search import relax_lifted, search_lifted
from autoshard.solver.lifted_start import LiftedStart
from autoshard.solver.problem import Edge, Node, Problem
from autoshard.solver.reduce.colour_refinement import refine
from autoshard.solver.reduce.columns import columns_of, restricted, usage_over_time
from autoshard.solver.reduce.network import Network
from autoshard.solver.reduce.presolve import presolve
from autoshard.solver.reduce.quotient import quotient_of
from autoshard.solver.search import Search

LINKS = ("hub", "chain", "ring")
SEEDS = range(60)


@functools.cache
def repeated_optimum(seed, link):
    """That of `generate.repeated`, by brute force; several tests need it."""
    return brute_force(generate.repeated(seed, link))[0]


def quotient(problem, instants, rounds=12):
    columns = columns_of(problem)
    return quotient_of(problem, columns, refine(columns, instants, rounds), instants)


def all_instants(problem):
    return list(range(columns_of(problem).instants)) if problem.capacity is not None else []


@pytest.mark.parametrize("link", LINKS)
def test_tied_solutions_cost_what_they_cost_expanded(link):
    smaller = 0
    for seed in SEEDS:
        problem = generate.repeated(seed, link)
        f = quotient(problem, all_instants(problem), rounds=seed % 4)
        rng = np.random.default_rng(seed)
        choices = [int(rng.integers(len(node.costs))) for node in f.tied.nodes]
        whole, small = evaluate(problem, f.expanded(choices)), evaluate(f.tied, choices)
        assert whole.objective == pytest.approx(small.objective)
        if problem.capacity is not None:
            assert whole.peak_usage == pytest.approx(small.peak_usage)
        smaller += len(f.tied.nodes) < len(problem.nodes)
    assert smaller > 5


def bound_of_lifted(f, presolved):
    """A bound by message passing on the lifted problem; +inf if presolve proves that there is no solution."""
    network = Network(f.lifted.problem)
    network.lift(f.lifted.problem, f.lifted.multiplicity, f.lifted.copy_pairs)
    if presolved:
        presolve(network)
    if network.infeasible:
        return math.inf
    bound = network.constant + f.lifted.constant
    if any(network.alive):
        ascent = DualAscent(factor_graph_of(network)[0])
        ascent.climb(60, math.inf, math.inf, 0.0)
        bound += ascent.bound
    return bound


@pytest.mark.parametrize("link", ["hub", "ring"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_bounds_of_the_lifted_problem_hold_for_the_whole(link, share):
    """Whatever instants count. (A chain's copies are all told apart from its ends, or prove nothing.)"""
    proven = 0
    for seed in SEEDS:
        problem = generate.repeated(seed, link)
        optimum = repeated_optimum(seed, link)
        every = all_instants(problem)
        instants = every[:: max(int(1 / share), 1)] if share else []
        f = quotient(problem, instants, rounds=seed % 4)
        if not f.partition.is_equitable or len(f.tied.nodes) == len(problem.nodes):
            continue
        assert bound_of_lifted(f, bool(seed % 3)) <= optimum + 1e-6
        proven += 1
    assert proven > 5


@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2, 3))])
def test_bounds_hold_for_random_covers(block):
    """Covers of random graphs: parallel edges that join the same copies or others, cycles that close or do not."""
    proven = 0
    for seed in range(100 * block, 100 * block + 100):
        problem = generate.lifted(seed)
        f = quotient(problem, all_instants(problem))
        if not f.partition.is_equitable or len(f.tied.nodes) == len(problem.nodes):
            continue
        optimum, _ = brute_force(problem)
        bound = bound_of_lifted(f, presolved=True)
        assert bound <= optimum + 1e-6 * abs(optimum) or math.isinf(optimum), seed
        assert solve(problem, SolverOptions(relative_gap=0.0)).certificate.bound <= optimum * (1 + 1e-9) + 1e-12, seed
        proven += 1
    assert proven > 30


def test_a_hub_with_equal_copies_folds_to_two_nodes_and_its_bound_is_tight():
    """Ten copies; each costs 3 or 1, and 2 more if it differs from the hub, which costs 0 or 25 by choice.

    By hand: the hub at 0 with all copies at 0 costs 10 * 3 = 30; copies at 1 cost 10 * (1 + 2) = 30; the hub at 1 costs
    25 + 10 * 1 = 35. So 30, and the folded problem has two nodes and one edge.
    """
    identity = np.arange(2)
    penalty = np.array([[0.0, 2.0], [2.0, 0.0]])
    hub, copy = Node("hub", np.array([0.0, 25.0])), Node("copy", np.array([3.0, 1.0]))
    problem = Problem((hub, *(copy,) * 10), tuple(Edge(0, i, identity, identity, penalty) for i in range(1, 11)))
    f = quotient(problem, [])
    assert (len(f.tied.nodes), len(f.tied.edges), f.partition.is_equitable) == (2, 1, True)
    search = Search(problem, SolverOptions(), None)
    search_lifted(search)
    assert search.objective == 30.0
    assert search.bound == pytest.approx(30.0)


@pytest.mark.parametrize("others", [2, 14])
def test_a_bound_of_what_hardly_folds_is_proven_by_messages_alone(monkeypatch, others):
    """A hub with ten copies, and others that all cost something else: with 14 of them 16 of 25 nodes are distinct."""
    costs = [np.array([3.0, 1.0])] * 10 + [np.array([2.0, 0.1 * n]) for n in range(others)]
    identity, penalty = np.arange(2), np.array([[0.0, 2.0], [2.0, 0.0]])
    nodes = (Node("hub", np.array([0.0, 25.0])), *(Node("other", own) for own in costs))
    problem = Problem(nodes, tuple(Edge(0, n, identity, identity, penalty) for n in range(1, len(nodes))))
    optimum = min(nodes[0].costs[k] + sum((own + penalty[k]).min() for own in costs) for k in range(2))
    presolved = []
    monkeypatch.setattr("autoshard.solver.lifted_search.presolve", lambda *a: presolved.append(presolve(*a)))
    search = Search(problem, SolverOptions(), None)
    relaxed = relax_lifted(search)
    assert search.bound == pytest.approx(optimum) and relaxed is not None
    assert bool(presolved) == (others == 2)
    assert evaluate(problem, relaxed.choices[0]).objective == pytest.approx(optimum)


@pytest.mark.parametrize("link", LINKS)
def test_a_bound_that_is_enough_holds_and_leaves_choices(link):
    """Choices are of the problem, whether they fit or not; prices are of instants, and the bound is one."""
    found = 0
    for seed in SEEDS:
        problem = generate.repeated(seed, link)
        solution = solve(problem, SolverOptions(relative_gap=1e-3, is_bound_enough=True))
        optimum = repeated_optimum(seed, link)
        assert solution.certificate.bound <= optimum * (1 + 1e-9) + 1e-12 or math.isinf(optimum)
        if solution.relaxed is None:  # nothing is folded, or there is no solution: solved as ever
            status = solution.certificate.status
            assert (solution.choices is None) == math.isinf(optimum) == (status is Status.INFEASIBLE)
            continue
        found += 1
        assert solution.choices is None and solution.certificate.status is Status.UNKNOWN
        for choices in solution.relaxed.choices:
            assert math.isfinite(evaluate(problem, choices).objective) or math.isinf(optimum)
        assert all(0 <= t < columns_of(problem).instants and p > 0 for t, p in solution.relaxed.prices.items())
    assert found > 20 or link == "chain"  # whose copies are all told apart


def test_no_work_goes_to_a_bound_that_is_of_no_use():
    """A bound above the optimum is out of reach: some work is saved, and what is found holds as ever."""
    spent, saved = {}, 0
    for seed in SEEDS:
        problem, optimum = generate.repeated(seed, "hub"), repeated_optimum(seed, "hub")
        for useful in (-math.inf, 1.5 * optimum):
            options = SolverOptions(relative_gap=1e-3, is_bound_enough=True, work_limit=100.0, useful_bound=useful)
            search = Search(problem, options, None)
            relaxed = relax_lifted(search)
            spent[useful] = search.budget.elapsed()
            assert search.bound <= optimum * (1 + 1e-9) + 1e-12
            assert relaxed is None or math.isfinite(search.bound) and relaxed.choices
        assert spent[1.5 * optimum] <= spent[-math.inf]
        saved += spent[1.5 * optimum] < 0.9 * spent[-math.inf]
    assert saved > 5


def test_choices_that_fit_come_with_a_bound_although_the_best_ones_exceed_the_capacity():
    """Three copies of a block of two: at the price of its worst instant they take 11 of 6.19, or nothing."""
    problem = generate.repeated(151, "hub")
    relaxed = solve(problem, SolverOptions(relative_gap=1e-3, is_bound_enough=True)).relaxed
    first, *others = [evaluate(problem, choices) for choices in relaxed.choices]
    assert not first.feasible and any(own.feasible for own in others)


@pytest.mark.parametrize("link", ["chain", "hub"])
def test_a_search_that_begins_where_another_ended_finds_what_it_would_find(link):
    """The second problem has other costs; the first one's messages and prices are a start, and no more."""
    exact = SolverOptions(relative_gap=1e-6)
    for seed in range(4):
        first = generate.repeated(seed, link)
        kinds = {id(node.costs): 1 + 0.1 * n for n, node in enumerate(first.nodes)}  # copies stay copies
        scaled = {key: next(n.costs for n in first.nodes if id(n.costs) == key) * by for key, by in kinds.items()}
        nodes = tuple(dataclasses.replace(node, costs=scaled[id(node.costs)]) for node in first.nodes)
        second = dataclasses.replace(first, nodes=nodes)
        start = LiftedStart()
        solve(first, exact, start=start)
        begun, alone = solve(second, exact, start=start), solve(second, exact)
        assert begun.certificate.status == alone.certificate.status
        if alone.certificate.status is Status.OPTIMAL:
            assert begun.certificate.objective == pytest.approx(alone.certificate.objective, rel=1e-5)
            assert begun.certificate.bound <= alone.certificate.objective * (1 + 1e-9)


@pytest.mark.parametrize("link", LINKS)
def test_a_bound_is_proven_however_little_time_there_is(link):
    """What is priced next follows from the last bound, so that none at all would end the search."""
    options = SolverOptions(relative_gap=1e-3, time_limit_s=1e-9, is_bound_enough=True)
    proven = 0
    for seed in SEEDS:
        solution = solve(generate.repeated(seed, link), options)
        if solution.relaxed is not None:
            proven += 1
            assert math.isfinite(solution.certificate.bound)
            assert solution.certificate.bound <= repeated_optimum(seed, link) * (1 + 1e-9) + 1e-12
    assert proven > 5 or link == "chain"  # whose copies are all told apart


def test_irregular_partitions_prove_nothing():
    """A path of unequal ends: refinement that stops early leaves classes whose nodes see different things."""
    identity = np.arange(2)
    table = np.array([[0.0, 1.0], [1.0, 0.0]])
    node, end = Node("n", np.zeros(2)), Node("end", np.array([0.0, 9.0]))
    nodes = (end, *(node,) * 40)
    problem = Problem(nodes, tuple(Edge(i, i + 1, identity, identity, table) for i in range(40)))
    assert not refine(columns_of(problem), []).is_equitable


def laid_out(problem, *others):
    """The graph of `problem`, laid out after those of others."""
    laid = None
    for one in (*others, problem):
        laid = _laid_out(one, laid)
    return laid.graph


@pytest.mark.parametrize("link", LINKS)
def test_the_graph_of_a_problem_with_other_costs_is_that_of_the_problem(link):
    """With tables turned over, equal tables become different and different ones equal; other usages lay it out anew."""
    for seed in SEEDS[:10]:
        first = generate.repeated(seed, link)
        edges = tuple(dataclasses.replace(e, costs=e.costs + 0.5 * (n % 3)) for n, e in enumerate(first.edges))
        nodes = tuple(Node(n.name, n.costs + 1.0) for n in first.nodes)
        second = dataclasses.replace(first, nodes=nodes, edges=edges)
        fewer = dataclasses.replace(second, usages=second.usages[:-1])
        roomier = dataclasses.replace(second, capacity=2 * (second.capacity or 1.0))
        for problem in (second, fewer, roomier):
            made, afresh = laid_out(problem, first), laid_out(problem)
            for field in dataclasses.fields(made):
                if field.name != "places":  # addresses
                    np.testing.assert_array_equal(getattr(made, field.name), getattr(afresh, field.name), field.name)


def renumbered(numbers):
    """Numbers by first appearance."""
    first = dict.fromkeys(numbers.tolist())
    order = {own: n for n, own in enumerate(first)}
    return [order[own] for own in numbers.tolist()]


@pytest.mark.parametrize("link", LINKS)
def test_columns_of_a_problem_with_other_costs_are_those_of_the_problem(link):
    """Kinds are told apart as from the beginning, also where costs that differed are equal, and the other way round."""
    for seed in SEEDS[:10]:
        first = generate.repeated(seed, link)
        tables = {}  # shared by edges of one shape
        shared = lambda e, tables=tables: tables.setdefault(e.costs.shape, np.ones(e.costs.shape))
        alike = [dataclasses.replace(e, costs=shared(e)) for e in first.edges]
        apart = [dataclasses.replace(e, costs=e.costs + n % 3) for n, e in enumerate(first.edges)]
        for edges in (alike, apart):
            nodes = tuple(Node(n.name, n.costs + own % 2) for own, n in enumerate(first.nodes))
            second = dataclasses.replace(first, nodes=nodes, edges=tuple(edges))
            start = LiftedStart()
            start.columns(first)
            assert start.is_like(second)
            made, afresh = start.columns(second), columns_of(second)
            assert renumbered(made.node_kind) == renumbered(afresh.node_kind)
            assert renumbered(made.edge_kind) == renumbered(afresh.edge_kind)
            assert not start.is_like(dataclasses.replace(second, usages=second.usages[:-1]))
            assert not start.is_like(dataclasses.replace(second, capacity=2 * (second.capacity or 1.0)))


def test_new_costs_are_checked_though_all_else_is_known():
    problem, start = generate.repeated(3, "hub"), LiftedStart()
    solve(problem, SolverOptions(), start=start)
    wrong = dataclasses.replace(problem.edges[0], costs=np.full(problem.edges[0].costs.shape, np.nan))
    with pytest.raises(SolverError, match="edge 0"):
        solve(dataclasses.replace(problem, edges=(wrong, *problem.edges[1:])), SolverOptions(), start=start)


def climbed_and_copied(problem, f):
    """(bound of the tied problem of the quotient, the bound that its messages prove of the whole)."""
    network = Network(f.tied)
    ascent = DualAscent(factor_graph_of(network)[0])
    ascent.climb(60, math.inf, math.inf, 0.0)
    instants = [f.instants[t] for t in network.instants.tolist()]
    search = Search(problem, SolverOptions(relative_gap=0.0), None)
    WholeBound().prove(search, f, ascent, dict(zip(instants, ascent.prices.tolist(), strict=True)))
    return ascent.bound, search.bound


@pytest.mark.parametrize("link", LINKS)
def test_messages_of_any_partition_prove_a_bound_of_the_whole(link):
    irregular = 0
    for seed in SEEDS:
        problem = generate.repeated(seed, link)
        optimum = repeated_optimum(seed, link)
        f = quotient(problem, all_instants(problem)[:: 1 + seed % 3], rounds=seed % 3)
        _, bound = climbed_and_copied(problem, f)
        assert bound <= optimum + 1e-6
        irregular += not f.partition.is_equitable
    assert irregular > 5 or link != "chain"


def test_messages_of_an_equitable_partition_lose_nothing():
    """Sweeps only raise what the copied messages prove, and that is what they proved of the classes."""
    proven = 0
    for seed in SEEDS:
        problem = generate.repeated(seed, "hub")
        f = quotient(problem, all_instants(problem))
        if not f.partition.is_equitable or len(f.tied.nodes) == len(problem.nodes):
            continue
        tied, bound = climbed_and_copied(problem, f)
        assert bound >= tied - 1e-6 * abs(tied)
        proven += 1
    assert proven > 5


@pytest.mark.parametrize("copies", [40, 400])
def test_a_chain_of_layers_is_bounded_from_a_few_classes(copies):
    """Layers of two nodes in a chain, with a gift for the last one.

    By hand: a first node costs 0 or 2, a second one 5 or 0, the last -2 or 0, and neighbours that differ cost 1. A
    layer of labels (0, 1) pays 1 within and 1 to the layer before, 2 in all; (1, 1) pays 2, and nothing between. The
    first layer has none before it: (0, 1) pays 1. The last one pays 1 to the layer before, and is (0, 0): 1 - 2 = -1.
    """
    identity, differ = np.arange(2), np.array([[0.0, 1.0], [1.0, 0.0]])
    first, second = Node("first", np.array([0.0, 2.0])), Node("second", np.array([5.0, 0.0]))
    nodes = (*(first, second) * (copies - 1), first, Node("last", np.array([-2.0, 0.0])))
    edges = tuple(Edge(i, i + 1, identity, identity, differ) for i in range(2 * copies - 1))
    problem = Problem(nodes, edges)
    search = Search(problem, SolverOptions(relative_gap=0.0), None)
    search_lifted(search)
    assert search.bound == pytest.approx(1.0 + 2.0 * (copies - 2) - 1.0)


def test_what_copies_of_a_class_cannot_share_is_decoded_from_the_whole():
    """A chain in which neighbours that agree pay 1, and every other node 0.1. Nodes in the middle are one class, and
    with one choice for all of them nearly every edge pays."""
    identity, agree, count = np.arange(2), np.array([[1.0, 0.0], [0.0, 1.0]]), 61
    nodes = tuple(Node("n", np.array([0.0, 0.1])) for _ in range(count))
    problem = Problem(nodes, tuple(Edge(i, i + 1, identity, identity, agree) for i in range(count - 1)))
    search = Search(problem, SolverOptions(relative_gap=1e-6), None)
    relaxed = relax_lifted(search)
    assert relaxed is not None and search.bound == pytest.approx(3.0)
    objectives = [evaluate(problem, own).objective for own in relaxed.choices]
    assert objectives[0] > 30 and min(objectives) == pytest.approx(3.0)


def test_copies_are_told_apart_by_what_counts_only():
    """Equal costs but different lifetimes: copies until an instant counts at which only one of them is alive."""
    problem = generate.repeated(3, "hub")
    columns = columns_of(problem)
    assert columns.instants > 2
    few, many = refine(columns, []), refine(columns, range(columns.instants))
    assert len(few.first_node) < len(many.first_node)


@pytest.mark.parametrize("link", LINKS)
def test_repeated_problems_solve_to_their_optimum(link):
    for seed in SEEDS:
        problem = generate.repeated(seed, link)
        optimum = repeated_optimum(seed, link)
        got = solve(problem, SolverOptions(relative_gap=0.0)).certificate
        assert got.status is (Status.INFEASIBLE if math.isinf(optimum) else Status.OPTIMAL), seed
        if math.isfinite(optimum):
            assert got.objective == pytest.approx(optimum), seed
            assert got.bound <= optimum + 1e-6, seed


def test_usage_over_time_and_restriction_agree_with_the_definition():
    for seed in range(200):
        problem = generate.random_problem(seed)
        columns = columns_of(problem)
        if not columns.instants:
            continue
        rng = np.random.default_rng(seed)
        choices = np.array([int(rng.integers(len(node.costs))) for node in problem.nodes])
        usage = usage_over_time(problem, columns, choices)
        assert max(usage.max(), 0.0) == pytest.approx(evaluate(problem, choices).peak_usage, abs=1e-3)
        at = sorted({int(t) for t in rng.integers(0, columns.instants, 3)})
        part = restricted(problem, columns, at)
        assert evaluate(part, choices).peak_usage == pytest.approx(max(usage[at].max(), 0.0), abs=1e-3)

"""The solver's promises beyond small optima: certificates, hints, limits, reproducibility, refusals."""

import dataclasses
import math

import generate
import numpy as np
import pytest

from autoshard.errors import SolverError
from autoshard.solver import (
    Edge,
    EdgeUsage,
    Node,
    Problem,
    SolverOptions,
    Status,
    Usage,
    evaluate,
    least_capacity,
    solve,
)

EXACT = SolverOptions(relative_gap=0.0)


def five_nodes(
    forbid_first: int = 0, forbid_edge: bool = False, extra_edge: bool = False, budget: float | None = 1.5e6
) -> Problem:
    """The five-node case of XLA's solver test: costs 10 (i + 1) + j and ten times that; node 3 follows node 2 and
    node 4 is an alias of node 1, both as edges that forbid different choices."""
    counts = (4, 3, 4, 4, 3)
    scale = [11.0 * (10 * (i + 1) + np.arange(n)) for i, n in enumerate(counts)]
    scale[0][:forbid_first] = np.inf
    nodes = tuple(Node(f"n{i}", costs) for i, costs in enumerate(scale))

    def edge(source: int, target: int, base: int) -> Edge:
        rows, columns = np.arange(counts[source]), np.arange(counts[target])
        return Edge(source, target, rows, columns, 1000.0 * (rows[:, None] + base) + 100.0 * columns[None, :])

    def same(a: int, b: int) -> Edge:
        rows, columns = np.arange(counts[a]), np.arange(counts[b])
        return Edge(a, b, rows, columns, np.where(rows[:, None] == columns[None, :], 0.0, np.inf))

    first = edge(0, 2, 1)
    if forbid_edge:
        first.costs[0, 0] = np.inf
    edges = [first, edge(1, 2, 5), same(2, 3), same(1, 4)]
    if extra_edge:
        edges.append(Edge(1, 3, np.arange(3), np.arange(4), edge(1, 2, 5).costs))
    memory = [1e5 * (i + 1) + 1e4 * np.arange(n) for i, n in enumerate(counts)]
    memory[0][2] = 9.9e5
    usages = tuple(Usage(i, start, stop, memory[i]) for i, (start, stop) in enumerate([(0, 5), (0, 5), (2, 4), (3, 5)]))
    return Problem(nodes, tuple(edges), usages, capacity=budget)


@pytest.mark.parametrize(
    ("arguments", "choices", "objective"),
    [
        ({}, (0, 0, 0, 0, 0), 7650.0),
        ({"forbid_first": 3}, (3, 0, 0, 0, 0), 10683.0),
        ({"forbid_edge": True}, (0, 0, 1, 1, 0), 7872.0),
        ({"extra_edge": True}, (0, 0, 0, 0, 0), 12650.0),
    ],
)
def test_five_node_case(arguments, choices, objective):
    """Optima published with XLA's solver test."""
    solution = solve(five_nodes(**arguments), EXACT)
    assert solution.choices == choices
    assert solution.certificate.objective == pytest.approx(objective)
    assert solution.certificate.status is Status.OPTIMAL


def test_five_node_case_evaluated():
    problem = dataclasses.replace(five_nodes(budget=None), edges=five_nodes().edges[:2])
    result = evaluate(problem, (3, 1, 2, 2, 1))
    assert result.objective == pytest.approx(159 + 1590 + 10400)
    assert result.peak_usage == pytest.approx(1.08e6)
    assert result.peak_instant == 3
    assert result.feasible


def test_five_node_case_over_budget_is_proven_infeasible():
    solution = solve(five_nodes(budget=1e5), EXACT)
    assert solution.certificate.status is Status.INFEASIBLE
    best = least_capacity(five_nodes(budget=1e5))
    assert best.bound == pytest.approx(1e6, rel=2e-3)
    assert best.peak == pytest.approx(1e6)  # 1 + 2 + 3 + 4 hundred thousand
    assert best.choices[:2] == (0, 0)


def test_long_chain_equals_dynamic_programming():
    problem, optimum = generate.chain(2000, 12, 0)
    certificate = solve(problem, EXACT).certificate
    assert certificate.status is Status.OPTIMAL
    assert certificate.objective == pytest.approx(optimum, rel=1e-12)


def test_grid_is_closed_exactly_with_and_without_capacity():
    for capacity in (None, 0.3):
        problem = generate.grid(1, 5, 3, capacity)
        exact = solve(problem, SolverOptions(relative_gap=0.0))
        assert exact.certificate.status is Status.OPTIMAL
        loose = solve(problem, SolverOptions(relative_gap=0.05))
        assert loose.certificate.bound <= exact.certificate.objective * (1 + 1e-9)
        assert exact.certificate.objective <= loose.certificate.objective
        assert loose.certificate.objective <= exact.certificate.objective / (1 - 0.05)


def test_equal_calls_give_equal_answers():
    for problem in (generate.grid(2, capacity=0.4), generate.grid(2, capacity=None), generate.random_problem(4, 8)):
        first, second = solve(problem), solve(problem)
        assert first.choices == second.choices
        assert first.certificate.bound == second.certificate.bound


def test_result_is_never_worse_than_a_feasible_hint():
    problem = generate.grid(3, capacity=0.4)
    best = solve(problem, SolverOptions(relative_gap=1e-4))
    limited = SolverOptions(relative_gap=0.0, dual_passes=1, ilp_entries=0, neighbourhoods=0)
    again = solve(problem, limited, hint=best.choices)
    assert again.certificate.objective <= best.certificate.objective
    first = []
    solve(problem, hint=best.choices, on_progress=lambda progress: first.append(progress))
    assert first[0].objective == best.certificate.objective and first[0].phase == "hint"


def test_infeasible_hint_is_not_taken():
    problem = generate.grid(3, capacity=0.4)
    hungry = [int(np.argmax(usage.amounts)) for usage in problem.usages]
    assert not evaluate(problem, hungry).feasible
    solution = solve(problem, hint=hungry)
    assert evaluate(problem, solution.choices).feasible


def test_progress_is_monotonic():
    lines = []
    solution = solve(generate.grid(4, 5, capacity=0.4), on_progress=lines.append)
    assert all(a.objective >= b.objective for a, b in zip(lines, lines[1:], strict=False))
    assert all(a.elapsed_s <= b.elapsed_s for a, b in zip(lines, lines[1:], strict=False))
    assert all(line.bound <= line.objective for line in lines)
    assert lines[-1].objective == solution.certificate.objective


def test_stopping_early_is_told():
    problem = generate.grid(5, 9, 5, 0.4)
    solution = solve(problem, SolverOptions(time_limit_s=0.0))
    assert solution.certificate.status in (Status.UNKNOWN, Status.FEASIBLE)
    short = solve(problem, SolverOptions(relative_gap=0.0, dual_passes=30, ilp_entries=0, neighbourhoods=0))
    assert short.certificate.status is Status.FEASIBLE
    assert 0 < short.certificate.gap < 1
    certificate = short.certificate
    assert certificate.gap == pytest.approx((certificate.objective - certificate.bound) / certificate.objective)


def test_capacity_that_binds_through_edges_only():
    """Two nodes; equal choices cost nothing but fill the capacity on the edge."""
    nodes = (Node("a", np.zeros(2)), Node("b", np.zeros(2)))
    edge = Edge(0, 1, np.arange(2), np.arange(2), np.array([[0.0, 5.0], [7.0, 0.0]]))
    usage = EdgeUsage(0, 3, 4, np.array([[10.0, 1.0], [1.0, 10.0]]))
    problem = Problem(nodes, (edge,), (), (usage,), 9.0)
    solution = solve(problem, EXACT)
    assert solution.choices == (0, 1)
    assert solution.certificate.objective == 5.0
    assert solve(dataclasses.replace(problem, capacity=10.0), EXACT).certificate.objective == 0.0
    assert solve(dataclasses.replace(problem, capacity=0.5), EXACT).certificate.status is Status.INFEASIBLE


def test_instants_are_half_open():
    nodes = (Node("a", np.array([0.0, 1.0])), Node("b", np.array([0.0, 1.0])))
    amounts = np.array([6.0, 1.0])
    touching = Problem(nodes, (), (Usage(0, 0, 3, amounts), Usage(1, 3, 5, amounts)), capacity=6.0)
    assert solve(touching, EXACT).certificate.objective == 0.0
    overlapping = dataclasses.replace(touching, usages=(Usage(0, 0, 4, amounts), Usage(1, 3, 5, amounts)))
    assert solve(overlapping, EXACT).certificate.objective == 2.0
    assert evaluate(overlapping, (0, 1)).peak_usage == 7.0


def test_scales_from_microseconds_to_minutes_in_one_problem():
    problem = generate.grid(6, 4, 3, 0.4)
    factors = 10.0 ** np.random.default_rng(0).integers(-6, 3, len(problem.nodes))
    nodes = tuple(
        dataclasses.replace(node, costs=node.costs * factor)
        for node, factor in zip(problem.nodes, factors, strict=True)
    )
    exact = solve(dataclasses.replace(problem, nodes=nodes), EXACT)
    assert exact.certificate.status is Status.OPTIMAL
    tiny = tuple(dataclasses.replace(node, costs=node.costs * 1e-9) for node in nodes)
    edges = tuple(dataclasses.replace(edge, costs=edge.costs * 1e-9) for edge in problem.edges)
    scaled = solve(dataclasses.replace(problem, nodes=tiny, edges=edges), EXACT)
    assert scaled.certificate.objective == pytest.approx(1e-9 * exact.certificate.objective, rel=1e-8)


def test_empty_and_trivial_problems():
    assert solve(Problem((), ())).choices == ()
    assert solve(Problem((), ())).certificate.objective == 0.0
    assert solve(Problem((Node("a", np.array([np.inf])),), ())).certificate.status is Status.INFEASIBLE
    assert solve(Problem((Node("a", np.zeros(0)),), ())).certificate.status is Status.INFEASIBLE
    assert solve(Problem((Node("a", np.array([3.0, -2.0])),), ())).certificate.objective == -2.0


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (Problem((Node("a", np.array([np.nan])),), ()), "finite or \\+inf"),
        (Problem((Node("a", np.zeros(2)),), (Edge(0, 0, np.arange(2), np.arange(2), np.zeros((2, 2))),)), "different"),
        (
            Problem(
                (Node("a", np.zeros(2)), Node("b", np.zeros(2))),
                (Edge(0, 1, np.arange(2), np.arange(2), np.zeros((2, 1))),),
            ),
            "must lie in 0..0",
        ),
        (Problem((Node("a", np.zeros(2)),), (), (Usage(0, 0, 1, np.array([1.0, -1.0])),)), "non-negative"),
        (Problem((Node("a", np.zeros(2)),), (), (Usage(0, 0, 1, np.array([1.0])),)), "one amount per choice"),
        (Problem((Node("a", np.zeros(2)),), (), (), (), math.nan), "capacity must be finite"),
    ],
)
def test_malformed_problems_are_refused(problem, words):
    with pytest.raises(SolverError, match=words):
        solve(problem)


def test_malformed_choices_are_refused():
    problem = Problem((Node("a", np.zeros(2)),), ())
    with pytest.raises(SolverError, match="one choice per node"):
        evaluate(problem, ())
    with pytest.raises(SolverError, match="choices 0..1"):
        evaluate(problem, (2,))

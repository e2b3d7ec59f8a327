"""The solver against exhaustive enumeration on hundreds of small problems of every kind."""

import dataclasses
import math
import sys

import generate
import numpy as np
import pytest
from brute_force import brute_force

from autoshard.interrupts import StopRequest
from autoshard.solver import SolverOptions, Status, evaluate, least_capacity, solve
from autoshard.solver.least_capacity import exceeds
from autoshard.solver.reduce.network import Network
from autoshard.solver.reduce.presolve import presolve

EXACT = SolverOptions(relative_gap=0.0, time_limit_s=60)


def close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=1e-8, abs_tol=1e-15)


@pytest.mark.parametrize("block", range(10))
def test_equals_brute_force(block):
    for seed in range(40 * block, 40 * block + 40):
        problem = generate.random_problem(seed)
        expected, _ = brute_force(problem)
        solution = solve(problem, EXACT)
        certificate = solution.certificate
        if math.isinf(expected):
            assert certificate.status is Status.INFEASIBLE, seed
            assert solution.choices is None
        else:
            assert certificate.status is Status.OPTIMAL, seed
            assert close(certificate.objective, expected), seed
            assert evaluate(problem, solution.choices).objective == certificate.objective
            assert evaluate(problem, solution.choices).feasible
            assert certificate.bound <= certificate.objective


def test_bound_never_exceeds_the_optimum_at_any_gap_or_work_limit():
    for seed in range(500, 620):
        problem = generate.random_problem(seed)
        expected, _ = brute_force(problem)
        for options in (
            SolverOptions(relative_gap=0.3),
            SolverOptions(relative_gap=0.0, dual_passes=1, ilp_entries=0, neighbourhoods=0),
        ):
            lines = []
            solution = solve(problem, options, on_progress=lines.append)
            bounds = [line.bound for line in lines]
            bounds.append(solution.certificate.bound)
            if math.isfinite(expected):
                assert max(bounds) <= expected + 1e-9 * abs(expected), seed
                assert solution.certificate.status is not Status.INFEASIBLE, seed


def test_presolve_keeps_the_optimum():
    for seed in range(700, 900):
        problem = generate.random_problem(seed)
        expected, choices = brute_force(problem)
        network = Network(problem)
        presolve(network)
        if network.infeasible:
            assert math.isinf(expected), seed
            continue
        kept = {node: own for node, own in enumerate(network.labels) if network.alive[node]}
        best = math.inf
        for combination in np.ndindex(*(len(own) for own in kept.values())):
            chosen = {node: int(own[k]) for (node, own), k in zip(kept.items(), combination, strict=True)}
            result = evaluate(problem, network.postsolve(chosen))
            best = min(best, result.objective if result.feasible else math.inf)
        assert best == expected or close(best, expected), seed


def test_whether_a_capacity_would_do_is_answered_as_the_least_peak_tells():
    proven = 0
    for seed in range(40):
        problem = generate.random_problem(seed, 5)
        exact = least_capacity(problem, SolverOptions(relative_gap=1e-6))
        if exact.choices is None or exact.peak == 0:
            continue
        for question in (0.5 * exact.peak, 0.98 * exact.bound, 1.02 * exact.peak, 2 * exact.peak):
            found = least_capacity(problem, SolverOptions(relative_gap=1e-3), question=question)
            assert found.bound <= exact.peak * (1 + 1e-9) and found.peak >= exact.bound * (1 - 1e-9), seed
            assert (found.peak <= question) == (question >= exact.peak), seed
            assert (found.bound > question) == (question < exact.bound), seed
            proven += found.bound > question
    assert proven > 20


def test_what_is_said_to_exceed_the_capacity_does():
    stop = StopRequest()
    known = {True: 0, False: 0, None: 0}
    for seed in range(60):
        of_copies = generate.repeated(seed, ("hub", "chain", "ring")[seed % 3])
        problem = of_copies if seed % 2 else generate.random_problem(seed, 5)
        least = least_capacity(problem, SolverOptions(relative_gap=1e-6))
        if least.choices is None or least.peak == 0:
            continue
        for capacity in (0.5 * least.peak, 0.98 * least.bound, 1.02 * least.peak, 2 * least.peak):
            answer = exceeds(dataclasses.replace(problem, capacity=capacity), SolverOptions(), stop)
            assert answer is None or answer == (capacity < least.bound), (seed, capacity)
            known[answer] += 1
    assert min(known[True], known[False]) > 40 and known[None] < 0.2 * sum(known.values())


def test_presolve_settles_trees_without_capacity():
    rng = np.random.default_rng(3)
    for _ in range(20):
        problem = generate.random_tree(rng, 12)
        network = Network(problem)
        presolve(network)
        assert not any(network.alive)
        expected, _ = brute_force(problem, limit=10**7) if len(problem.nodes) < 8 else (None, None)
        solution = solve(problem, EXACT)
        assert solution.certificate.gap <= 1e-9
        if expected is not None:
            assert close(solution.certificate.objective, expected)


def test_the_least_peak_is_sought_from_what_costs_least_too(monkeypatch):
    """What takes least node by node may need edges that take more than all else: then what costs least takes less."""
    monkeypatch.setattr(sys.modules["autoshard.solver.least_capacity"], "ROUNDS", 0)  # only what the search starts from
    better = 0
    for seed in range(200):
        problem = generate.random_problem(seed, 5)
        free = dataclasses.replace(problem, capacity=None)
        cheapest = solve(free).choices
        found = least_capacity(problem)
        if cheapest is None:
            assert found.choices is None
            continue
        frugal = [np.zeros(len(node.costs)) + np.where(np.isinf(node.costs), np.inf, 0.0) for node in problem.nodes]
        for usage in problem.usages:
            frugal[usage.node] = frugal[usage.node] + usage.amounts * (usage.stop - usage.start)
        alone = evaluate(free, tuple(int(np.argmin(amounts)) for amounts in frugal))
        peaks = [evaluate(free, cheapest).peak_usage] + [alone.peak_usage] * math.isfinite(alone.objective)
        assert found.peak == min(peaks), seed
        better += found.peak < peaks[-1]
    assert better > 0


def test_least_capacity_brackets_the_least_peak():
    for seed in range(60):
        problem = generate.random_problem(seed, 5)
        free = dataclasses.replace(problem, capacity=None)
        least = math.inf
        for combination in np.ndindex(*(len(node.costs) for node in problem.nodes)):
            result = evaluate(free, combination)
            least = min(least, result.peak_usage if result.feasible else math.inf)
        found = least_capacity(problem, SolverOptions(relative_gap=1e-3))
        low, high = found.bound, found.peak
        if math.isinf(least):
            assert found.choices is None and low == high == math.inf
            continue
        assert low <= least * (1 + 1e-9) and least <= high <= low * 1.0011 + 1e-6, seed
        assert evaluate(free, found.choices) == dataclasses.replace(
            evaluate(free, found.choices), peak_usage=high, peak_instant=found.instant
        )
        assert sum(amount for _, amount in found.alive) == pytest.approx(high)
        if high > 0:
            assert solve(dataclasses.replace(problem, capacity=high), EXACT).choices is not None
            assert solve(dataclasses.replace(problem, capacity=0.998 * low), EXACT).certificate.status is (
                Status.INFEASIBLE
            ), seed

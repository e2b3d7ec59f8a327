"""Problems among known solutions, and searches that begin where others ended."""

import dataclasses
import itertools

import numpy as np
import pytest
from generate import random_problem, repeated

from autoshard.solver import SolverOptions, Status, evaluate, solve
from autoshard.solver.among import among
from autoshard.solver.lifted_start import LiftedStart


@pytest.mark.parametrize("seed", range(12))
def test_what_is_chosen_among_solutions_costs_what_it_costs_in_the_whole(seed):
    problem, rng = random_problem(seed), np.random.default_rng(seed)
    solutions = [[int(rng.integers(len(node.costs))) for node in problem.nodes] for _ in range(2)]
    part = among(problem, solutions)
    assert [sorted(own) for own in part.labels] == [sorted({*pair}) for pair in zip(*solutions, strict=True)]
    for choices in itertools.product(*(range(len(node.costs)) for node in part.problem.nodes)):
        assert evaluate(part.problem, choices) == evaluate(problem, part.whole(choices))


@pytest.mark.parametrize("link", ["chain", "hub"])
def test_a_search_that_begins_where_another_ended_finds_what_it_would_find(link):
    """The second problem has other costs; the first one's messages and prices are a start, and no more."""
    exact = SolverOptions(relative_gap=1e-6)
    for seed in range(4):
        first = repeated(seed, link)
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

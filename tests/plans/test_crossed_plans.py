"""Plans that follow one known plan in the first layers and another behind them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.compiler.schedule import Schedule
from autoshard.planner.step_times import StepTimes
from autoshard.planner.timeline import asked_for
from autoshard.plans import crossed_plans as crossed_plans_module
from autoshard.plans import master_problem
from autoshard.plans.crossed_plans import crossed_plans, levels
from autoshard.plans.master_problem import MasterProblem
from autoshard.solver import SolverOptions, evaluate, solve
from autoshard.solver.problem import Edge, Node, Problem
from autoshard.solver.tabulated import Tabulated


def tabulated(joined, count):
    """A problem whose decisions have two choices each, with these edges."""
    nodes = tuple(Node(f"n{i}", np.zeros(2)) for i in range(count))
    edges = tuple(Edge(a, b, np.arange(2), np.arange(2), np.array([[0.0, 1.0], [1.0, 0.0]])) for a, b in joined)
    return Tabulated(Problem(nodes=nodes, edges=edges))


def ladder(layers):
    """Forward and backward pass of layers: two decisions each, joined, in chains of opposite direction."""
    forward, backward = list(range(layers)), list(range(layers, 2 * layers))
    along = [(a, a + 1) for a in forward[:-1]] + [(b + 1, b) for b in backward[:-1]]
    return along + list(zip(forward, backward, strict=True))


def test_layers_are_as_far_along_as_they_are_deep():
    found = levels(tabulated(ladder(30), 60), np.random.default_rng(0).permutation(60))
    depth = np.random.default_rng(0).permutation(60) % 30
    order = found[np.argsort(depth, kind="stable")].reshape(30, 2)
    rising = order if order[0].min() < order[-1].min() else order[::-1]
    assert (np.diff(rising.min(axis=1)) == 1).all()  # one after another, from one end or the other
    assert (np.ptp(order, axis=1) <= 1).all()  # a layer's two passes together


@pytest.mark.parametrize("share", [0.25, 0.6])
def test_a_part_is_cut_across_where_the_mixture_divides_it(share):
    problem, plans = tabulated(ladder(40), 80), np.array([[0] * 80, [1] * 80])
    made = crossed_plans(problem, plans, np.arange(80), {0: share, 1: 1 - share})
    assert len(made) == 2  # one first, and the other
    source, target = problem.columns.source, problem.columns.target
    for plan in made:
        assert (plan == 0).mean() == pytest.approx(share, abs=0.02)
        assert (plan[source] != plan[target]).sum() <= 3  # along both passes, and within a layer
    assert made[0][0] != made[1][0]


def test_nothing_is_crossed_where_one_decision_ties_all_or_one_plan_is_followed():
    star = tabulated([(0, i) for i in range(1, 50)], 50)
    plans = np.array([[0] * 50, [1] * 50])
    assert crossed_plans(star, plans, np.arange(50), {0: 0.5, 1: 0.5}) == []
    chain = tabulated(ladder(40), 80)
    plans = np.array([[0] * 80, [1] * 80])
    assert crossed_plans(chain, plans, np.arange(80), {0: 0.97, 1: 0.03}) == []


@pytest.mark.parametrize("is_tight", [False, True])
def test_a_search_that_begins_with_crossed_plans_is_as_good_as_the_known_ones(
    formulated, gpus, many_layers, monkeypatch, is_tight
):
    """What it finds fits, takes what it says that it takes, and no more than any known plan or crossed one."""
    monkeypatch.setattr(crossed_plans_module, "_LEVELS", 2)  # few layers will do
    monkeypatch.setattr(master_problem, "_FAR", -math.inf)
    made = []

    def in_halves(problem, plans, part, shares):  # wherever the mixture would divide it
        made.extend(crossed_plans(problem, plans, part, dict.fromkeys(shares, 0.5)))
        return made

    monkeypatch.setattr(master_problem, "crossed_plans", in_halves)
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    args = ([f32(256, 256)] * 24, f32(2048, 256))
    f = formulated(many_layers, args, gpus(4), donate=(0,), schedule=Schedule.LATENCY_HIDING)
    rng, options, plans = np.random.default_rng(0), SolverOptions(time_limit_s=20.0), []
    for _ in range(3):  # plans that differ nearly everywhere
        nodes = tuple(dataclasses.replace(n, costs=n.costs + rng.random(len(n.costs))) for n in f.problem.nodes)
        plans.append(solve(dataclasses.replace(f.problem, nodes=nodes), options).chosen)
    peaks = sorted(evaluate(f.problem, own).peak_usage for own in plans)
    master = MasterProblem(StepTimes(f), 1.001 * peaks[0] if is_tight else None)
    assert all([master.add(own) for own in plans])
    known = master.fastest_known()
    assert known is not None
    found = master.improved(known.choices, math.inf)
    assert found is not None and made
    assert found.step_s == pytest.approx(asked_for(f, found.choices).step_s, rel=1e-9)
    assert not is_tight or evaluate(f.problem, found.choices).peak_usage <= 1.001 * peaks[0] * (1 + 1e-9)
    within = [own for own in made if not is_tight or evaluate(f.problem, own).peak_usage <= 1.001 * peaks[0]]
    assert found.step_s <= min([known.step_s, *(asked_for(f, own).step_s for own in within)]) * (1 + 1e-9)
    hasty = master.improved(known.choices, math.inf, enough_s=math.inf)  # whatever is found first
    assert hasty is not None and found.step_s <= hasty.step_s <= known.step_s * (1 + 1e-9)

"""What kernels wait in line for: the average over moments, its slopes, and the problem that prices it."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.compiler.schedule import Schedule
from autoshard.planner.overlap import StretchWeights
from autoshard.planner.step_times import InLine, StepTimes
from autoshard.solver import evaluate


def train(params, x):
    """Three layers whose products are reduced, and whose weights are gathered; and their update."""

    def loss(p):
        for up, down in p:
            h = jnp.tanh(x @ up) @ down
        return jnp.sum(h)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


@pytest.fixture(scope="module")
def problem(formulated, mesh_of):
    mesh = mesh_of(2, 2)
    mesh = dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, product_workspace_bytes=1024))
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    args = ([(f32(64, 128), f32(128, 64))] * 3, f32(512, 64))
    return formulated(train, args, mesh, donate=(0,), schedule=Schedule.LATENCY_HIDING)


def plans(f, count, seed=0):
    """Plans at random, of those that are allowed."""
    rng = np.random.default_rng(seed)
    while count:
        picks = np.array([rng.integers(len(node.costs)) for node in f.problem.nodes])
        if np.isfinite(evaluate(f.problem, picks.tolist()).objective):
            count -= 1
            yield picks


def test_the_wait_is_the_average_over_all_moments_of_a_step(problem):
    """A link that is busy from 0 to 2 and from 5 to 6 s of 10: who comes while it is waits until 2, or until 6."""
    times = StepTimes(problem)
    moments = (np.arange(100_000) + 0.5) / 1e4
    waits_s = np.where(moments < 2, 2 - moments, np.where((moments > 5) & (moments < 6), 6 - moments, 0.0))
    own = times.of(next(plans(problem, 1)))
    sent_s = np.zeros_like(own.hideable_s)
    owners = np.flatnonzero(times._num_parts == 1)[:2]
    sent_s[owners] = 2.0, 1.0
    at_once_s = np.zeros_like(sent_s)
    at_once_s[:3] = 0.5  # whatever they take
    changed = dataclasses.replace(own, kernels_s=np.zeros_like(sent_s), least_s=at_once_s, hideable_s=sent_s)
    prices = times.in_line(changed, 10.0, 1.0)
    assert prices.at_once_s == pytest.approx(waits_s.mean(), rel=1e-6) == pytest.approx(5 / 20)
    assert prices.per_square_s == pytest.approx(3 / 20)
    # both sums are counted near the plan, so that it counts twice what its kernels wait
    assert times.in_line_s(changed, prices).sum() == pytest.approx(2 * 3 * waits_s.mean(), rel=1e-6)


def test_prices_are_the_slopes_of_what_is_waited_for(problem):
    times = StepTimes(problem)
    waits_s = lambda n, s: 0.6 * n * s / (2 * 3.0)
    for picks in plans(problem, 5):
        own = times.of(picks)
        prices = times.in_line(own, 3.0, 0.6)
        ones, squares = (times.in_line_s(own, price).sum() for price in (InLine(1.0, 0.0), InLine(0.0, 1.0)))
        assert prices.at_once_s == pytest.approx(waits_s(ones + 1, squares) - waits_s(ones, squares))
        assert prices.per_square_s == pytest.approx(waits_s(ones, squares + 1) - waits_s(ones, squares))


def test_a_problem_that_prices_it_costs_that_much_more(problem):
    """With any weights, and in the same problem for all plans: it is linear in the choices."""
    times, stop = StepTimes(problem), len(problem.program.graph.operations)
    half = StretchWeights(((0.5, (0, stop)), (0.3, (0, stop // 2))))
    known = list(plans(problem, 20))
    num_apart = 0
    for weights, prices in itertools.product((StretchWeights(()), half), (InLine(2e-6, 0.0), InLine(1e-6, 3e3))):
        without, priced = times.priced(problem, weights), times.priced(problem, weights, prices)
        for picks in known:
            in_line_s = times.in_line_s(times.of(picks), prices).sum()
            cost, more = (evaluate(f.problem, picks.tolist()).objective for f in (without, priced))
            assert more == pytest.approx(cost + in_line_s, rel=1e-9)
            num_apart += in_line_s > 1e-3 * cost
    assert num_apart

"""Plans for a step whose collectives hide: prices bound it, and nothing that was not found is faster than the bound."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.compiler.schedule import Schedule
from autoshard.planner.build import repriced
from autoshard.planner.decode import estimate
from autoshard.planner.overlap import StretchWeights
from autoshard.planner.timeline import asked_for
from autoshard.plans.pricing import solved_as_scheduled
from autoshard.solver import SolverOptions, Status, evaluate, solve


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def train(params, x):
    """Two layers and their update."""
    loss = lambda p: jnp.sum(jnp.tanh(x @ p["one"]) @ p["two"])
    grads = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


@pytest.fixture(scope="module")
def gpus(mesh_of):
    """A mesh whose compiler has both schedules: a product's workspace is what tells a GPU."""

    def mesh(*sizes):
        made = mesh_of(*sizes)
        return dataclasses.replace(
            made, device_type=dataclasses.replace(made.device_type, product_workspace_bytes=1024)
        )

    return mesh


@pytest.fixture(scope="module")
def hiding(formulated, gpus):
    args = ({"one": f32(64, 128), "two": f32(128, 64)}, f32(512, 64))
    return formulated(train, args, gpus(4), donate=(0,), schedule=Schedule.LATENCY_HIDING)


def random_picks(f, number):
    rng = np.random.default_rng(0)
    return [[int(rng.integers(len(n.costs))) for n in f.problem.nodes] for _ in range(number)]


def test_the_price_of_a_plan_bounds_its_step(hiding):
    n = len(hiding.program.graph.operations)
    for sets in (((1.0, ()),), ((0.5, ()), (0.5, ((0, n),))), ((0.25, ((0, 3), (3, n))), (0.75, ((1, n - 1),)))):
        priced = repriced(hiding, StretchWeights(sets))
        for picks in random_picks(hiding, 50):
            assert evaluate(priced.problem, picks).objective <= asked_for(hiding, picks).step_s * (1 + 1e-9)


def test_at_the_stretches_that_bind_the_price_of_a_plan_is_its_step(hiding):
    for picks in random_picks(hiding, 50):
        times = asked_for(hiding, picks)
        priced = repriced(hiding, StretchWeights(((1.0, times.stretches),)))
        assert evaluate(priced.problem, picks).objective == pytest.approx(times.step_s)
        assert times.at_least(times.stretches) == pytest.approx(times.step_s)
        assert estimate(hiding, picks, as_compiled=False).step_s == pytest.approx(times.step_s)


def test_repricing_changes_costs_and_nothing_else(hiding):
    again = repriced(hiding, hiding.overlap.weights)
    for picks in random_picks(hiding, 10):
        assert evaluate(again.problem, picks) == evaluate(hiding.problem, picks)
    assert again.problem.usages is hiding.problem.usages


@pytest.mark.parametrize("slow", [1.0, 4.0, 16.0])
def test_no_plan_is_faster_than_the_bound(formulated, gpus, slow):
    """One layer, all of whose plans are tried, with more and more to compute beside what is sent."""
    mesh = gpus(4)
    rates = tuple((dtype, rate / slow) for dtype, rate in mesh.device_type.peak_flops_per_s)
    mesh = dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, peak_flops_per_s=rates))

    def one(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w)

    f = formulated(one, (f32(256, 128), f32(512, 256)), mesh, donate=(0,), schedule=Schedule.LATENCY_HIDING)
    choices = [range(len(n.costs)) for n in f.problem.nodes]
    assert math.prod(map(len, choices)) < 200_000
    possible = lambda picks: math.isfinite(evaluate(f.problem, picks).objective)
    fastest_s = min(asked_for(f, picks).step_s for picks in itertools.product(*choices) if possible(picks))
    solve_one = lambda formulation, *, hint: solve(formulation.problem, SolverOptions(relative_gap=0.0), hint=hint)
    at, found = solved_as_scheduled(f, None, 1e-6, solve_one)
    certificate = found.certificate
    assert certificate.bound <= fastest_s * (1 + 1e-9)
    assert certificate.objective == pytest.approx(asked_for(at, found.chosen).step_s)
    assert fastest_s * (1 - 1e-9) <= certificate.objective <= fastest_s * 1.02
    assert (certificate.status is Status.OPTIMAL) == (certificate.gap <= 1e-6)


def test_under_the_schedule_for_least_memory_all_times_add_up(formulated, gpus):
    args = ({"one": f32(64, 128), "two": f32(128, 64)}, f32(512, 64))
    f = formulated(train, args, gpus(4), donate=(0,), schedule=Schedule.LEAST_MEMORY)
    for picks in random_picks(f, 10):
        times = asked_for(f, picks)
        assert times.hidden_s == 0 and times.step_s == pytest.approx(times.compute_s + times.comm_s)
        assert evaluate(f.problem, picks).objective == pytest.approx(times.step_s)

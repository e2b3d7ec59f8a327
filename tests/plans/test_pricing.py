"""Plans for a step whose collectives hide: prices bound it, and nothing that was not found is faster than the bound."""

import collections
import dataclasses
import itertools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.compiler.schedule import Schedule
from autoshard.planner.build import branched, repriced, whole
from autoshard.planner.decode import estimate
from autoshard.planner.overlap import StretchWeights
from autoshard.planner.step_times import StepTimes
from autoshard.planner.timeline import asked_for
from autoshard.plans import as_scheduled
from autoshard.plans.as_scheduled import solved_as_scheduled
from autoshard.plans.master_problem import MasterProblem, tying_decision
from autoshard.plans.mesh_search import _Series
from autoshard.plans.pricing import priced
from autoshard.solver import SolverOptions, Status, evaluate, solve
from autoshard.solver.problem import Certificate, Solution


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def train(params, x):
    """Two layers and their update."""
    loss = lambda p: jnp.sum(jnp.tanh(x @ p["one"]) @ p["two"])
    grads = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def tpus(mesh):
    """The same mesh of devices that round what float32 products read, which is what tells a TPU."""
    rates = {"float32": 1e12, "bfloat16": 1e12}
    device = dataclasses.replace(mesh.device_type, product_workspace_bytes=0, peak_flops_per_s=rates)
    return dataclasses.replace(mesh, device_type=device)


@pytest.fixture(
    scope="module",
    params=[("gpu", "never"), ("gpu", "any"), ("tpu", "never")],
    ids=["whole products", "products in pieces", "tpus"],
)
def hiding(request, formulated, gpus):
    """TPUs hide no weight of less than 1 MiB."""
    kind, decompose = request.param
    width, mesh = (64, gpus(4)) if kind == "gpu" else (1024, tpus(gpus(4)))
    args = ({"one": f32(width, 2 * width), "two": f32(2 * width, width)}, f32(512, width))
    return formulated(train, args, mesh, donate=(0,), schedule=Schedule.LATENCY_HIDING, decompose=decompose)


class Exactly:
    """Solves problems as exactly as is asked for, without a limit of time."""

    def solve(self, formulation, *, hint, relative_gap, share, is_bound_enough=False, to_beat_s=math.inf, useful_s=0.0):
        options = SolverOptions(relative_gap=relative_gap, is_bound_enough=is_bound_enough, useful_bound=useful_s)
        return solve(formulation.problem, options, hint)

    def price(self, prices):
        assert all(price >= 0 for price in prices.values())


def master_of(f):
    return MasterProblem(StepTimes(f), f.problem.capacity)


def random_picks(f, number):
    rng = np.random.default_rng(0)
    return [[int(rng.integers(len(n.costs))) for n in f.problem.nodes] for _ in range(number)]


def test_the_price_of_a_plan_bounds_its_step(hiding):
    n = len(hiding.program.graph.operations)
    overlapping = ((0.25, (0, 3)), (0.25, (3, n)), (0.75, (1, n - 1)))
    for stretches in ((), ((0.5, (0, n)),), overlapping, ((1.0, (0, 5)), (0.5, (5, n)), (0.5, (7, n)))):
        priced = repriced(hiding, StretchWeights(stretches))
        for picks in random_picks(hiding, 50):
            assert evaluate(priced.problem, picks).objective <= asked_for(hiding, picks).step_s * (1 + 1e-9)


def test_a_gradient_that_is_added_in_place_lies_as_the_value(formulated, gpus):
    """XLA scatters into a momentum only what lies as it does; no prices make more of what is forbidden."""

    def step(momentum, ids, rows):
        return 0.9 * momentum + jnp.zeros((4096, 16)).at[ids].add(rows, mode="promise_in_bounds")

    args = f32(4096, 16), jax.ShapeDtypeStruct((32,), jnp.int32), f32(32, 16)
    f = formulated(step, args, gpus(2, 2), donate=(0,), schedule=Schedule.LATENCY_HIDING)
    (number,) = [n for n, flow in enumerate(f.flows) if flow.value in f.program.added_in_place]
    flow, times = f.flows[number], StepTimes(f)
    is_other = np.array([[s != t for t in flow.read_as.layouts] for s in flow.defined_as.layouts])
    assert is_other.any() and set(flow.read_as.layouts) <= set(flow.defined_as.layouts)
    for weights in (StretchWeights(()), StretchWeights(((0.5, (0, times.num_operations)),))):
        for made in (repriced(f, weights), times.priced(f, weights)):
            assert (np.isinf(made.problem.edges[number].costs) == is_other).all()
            assert not any(np.isnan(edge.costs).any() for edge in made.problem.edges)


def test_weights_count_where_a_stretch_holds_a_collective():
    """Of what can run beside operations 2 and 3; what can run beside nothing counts in full."""
    weights = StretchWeights(((0.25, (0, 4)), (0.5, (2, 6)), (0.125, (3, 4))))
    assert weights.of_collective((2, 4)) == 0.75 and weights.of_collective((1, 5)) == 0.0
    assert weights.of_collective((0, 4)) == 0.25 and weights.of_collective((4, 4)) == 1.0
    assert [weights.of_operation(o) for o in range(7)] == [0.25, 0.25, 0.75, 0.875, 0.5, 0.5, 0.0]


def test_at_the_stretches_that_bind_the_price_of_a_plan_is_its_step(hiding):
    for picks in random_picks(hiding, 50):
        times = asked_for(hiding, picks)
        priced = repriced(hiding, StretchWeights(tuple((1.0, stretch) for stretch in times.stretches)))
        assert evaluate(priced.problem, picks).objective == pytest.approx(times.step_s)
        assert times.least_s + times.waited_s(times.stretches).sum() == pytest.approx(times.step_s)
        assert estimate(hiding, picks, as_compiled=False).step_s == pytest.approx(times.step_s)


def test_times_of_plans_add_up_from_decisions_and_edges(hiding):
    """What is read off prices is what the timeline of the plan says."""
    times, n = StepTimes(hiding), len(hiding.program.graph.operations)
    for picks in random_picks(hiding, 50):
        own, planned = times.of(np.array(picks)), asked_for(hiding, picks)
        assert own.kernels_s.sum() == pytest.approx(planned.compute_s - planned.beside_s)
        assert own.least_s.sum() == pytest.approx(planned.least_s)
        stretches, exposed_s = times.exposed(own)
        assert own.least_s.sum() + exposed_s == pytest.approx(planned.step_s)
        waited_s = sum(times.waited_s(own, (stretch,)).sum() for stretch in stretches)
        assert waited_s == pytest.approx(planned.waited_s(planned.stretches).sum(), abs=1e-12)
        for stretch in ((0, n), (0, n // 2), (n // 3, n)):
            assert times.waited_s(own, (stretch,)).sum() == pytest.approx(planned.waited_s([stretch])[0], abs=1e-12)


def test_repricing_changes_costs_and_nothing_else(hiding):
    again = repriced(hiding, hiding.overlap.weights)
    for picks in random_picks(hiding, 10):
        assert evaluate(again.problem, picks) == evaluate(hiding.problem, picks)
    assert again.problem.usages is hiding.problem.usages


@pytest.fixture(scope="module", params=[1.0, pytest.param(4.0, marks=pytest.mark.exhaustive), 16.0])
def one_layer(request, formulated, gpus):
    """The problem of one layer with more and more to compute beside what is sent, and the steps of all its plans."""
    mesh = gpus(4)
    rates = tuple((dtype, rate / request.param) for dtype, rate in mesh.device_type.peak_flops_per_s)
    mesh = dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, peak_flops_per_s=rates))

    def one(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w)

    f = formulated(one, (f32(256, 128), f32(512, 256)), mesh, donate=(0,), schedule=Schedule.LATENCY_HIDING)
    choices = [range(len(n.costs)) for n in f.problem.nodes]
    assert math.prod(map(len, choices)) < 200_000
    possible = lambda picks: math.isfinite(evaluate(f.problem, picks).objective)
    return f, {picks: asked_for(f, picks).step_s for picks in itertools.product(*choices) if possible(picks)}


def test_no_plan_is_faster_than_the_bound(one_layer):
    f, steps_s = one_layer
    fastest_s = min(steps_s.values())
    scheduled = solved_as_scheduled(f, None, 1e-6, Exactly())
    at, found = scheduled.formulation, scheduled.solution
    certificate = found.certificate
    assert certificate.bound <= fastest_s * (1 + 1e-9)
    assert certificate.objective == pytest.approx(asked_for(at, found.chosen).step_s)
    assert fastest_s * (1 - 1e-9) <= certificate.objective <= fastest_s * 1.02
    assert (certificate.status is Status.OPTIMAL) == (certificate.gap <= 1e-6)


def test_branches_only_raise_the_bound(one_layer):
    """Without them the plan is no plan of less than the bound either."""
    f, steps_s = one_layer
    whole, alone = (
        solved_as_scheduled(f, None, 1e-6, Exactly(), branches=branches).solution.certificate
        for branches in (True, False)
    )
    assert alone.bound <= whole.bound * (1 + 1e-9)
    assert min(steps_s.values()) * (1 - 1e-9) <= alone.objective <= min(steps_s.values()) * 1.02


@pytest.mark.parametrize("is_enough", [False, True])
def test_a_problem_is_cut_in_two_only_if_improving_its_plan_is_not_enough(
    monkeypatch, formulated, gpus, many_layers, is_enough
):
    f = formulated(many_layers, ([f32(512, 512)] * 24, f32(512, 512)), gpus(4), schedule=Schedule.LATENCY_HIDING)
    cut, halves, improved = [], as_scheduled._halves, as_scheduled._improved
    to_bound = lambda priced_as, master, best, *_: dataclasses.replace(best, step_s=priced_as.bound.bound)
    monkeypatch.setattr(as_scheduled, "_improved", to_bound if is_enough else improved)
    monkeypatch.setattr(as_scheduled, "_halves", lambda *args: cut.append(args) or halves(*args))
    monkeypatch.setattr(as_scheduled, "tying_decision", lambda tabulated, undecided: 0)
    solved_as_scheduled(f, None, 1e-9, Exactly(), rounds=2)
    assert bool(cut) == (not is_enough)


@pytest.mark.parametrize(("gain", "little"), [(0.0, math.inf), (math.inf, math.inf), (math.inf, -1.0)])
def test_a_problem_is_cut_in_two_where_that_may_raise_the_bound_or_much_is_left(
    monkeypatch, formulated, gpus, many_layers, gain, little
):
    """Whatever is known of the halves, the bound holds for the plan that is found."""
    f = formulated(many_layers, ([f32(512, 512)] * 24, f32(512, 512)), gpus(4), schedule=Schedule.LATENCY_HIDING)
    priced_in, leaf = [], as_scheduled._leaf
    monkeypatch.setattr(as_scheduled, "_WORTH_BRANCHING", gain)
    monkeypatch.setattr(as_scheduled, "_LITTLE", little)
    monkeypatch.setattr(as_scheduled, "_leaf", lambda *args: priced_in.append(args) or leaf(*args))
    monkeypatch.setattr(as_scheduled, "tying_decision", lambda tabulated, undecided: 0)
    found = solved_as_scheduled(f, None, 1e-9, Exactly(), rounds=2).solution.certificate
    assert found.bound <= found.objective * (1 + 1e-9)
    assert bool(priced_in) == (gain == 0.0 or little < 0)


@pytest.mark.parametrize("share", [0.8, 1.1])
def test_a_plan_that_others_beat_is_not_sought(one_layer, share):
    """Either a bound says so, to the gap, or the plan is as fast as without."""
    f, steps_s = one_layer
    fastest_s = min(steps_s.values())
    scheduled = solved_as_scheduled(f, None, 0.01, Exactly(), to_beat_s=share * fastest_s)
    found = scheduled.solution
    assert found.certificate.bound <= fastest_s * (1 + 1e-9)
    assert (found.certificate.bound >= 0.99 * share * fastest_s) == (share < 1)
    if share > 1:
        assert asked_for(scheduled.formulation, found.chosen).step_s <= fastest_s * 1.02


@pytest.mark.parametrize("tells", [True, False])
def test_a_plan_that_takes_all_memory_is_improved_within_what_its_gaps_leave(
    monkeypatch, formulated, gpus, many_layers, tells
):
    """What is found fits what is left, and is slower by no more than the gap that is wanted; not where the plan is so
    far from the mixture that its gaps tell little."""
    monkeypatch.setattr(as_scheduled, "_TELLS", math.inf if tells else -1.0)
    args, gap = ([f32(512, 512)] * 24, f32(512, 512)), 0.03
    f = formulated(many_layers, args, gpus(4), donate=(0,), schedule=Schedule.LATENCY_HIDING)
    peak = lambda choices: evaluate(f.problem, choices).peak_usage
    capacity = 0.8 * peak(solved_as_scheduled(f, None, 1e-6, Exactly(), rounds=2).solution.chosen)
    tight = dataclasses.replace(f, problem=dataclasses.replace(f.problem, capacity=capacity))
    asked = []

    def limit_bytes(timed):
        asked.append(timed)
        return 0.98 * capacity

    found = solved_as_scheduled(tight, None, gap, Exactly(), limit_bytes=limit_bytes).solution
    if not tells:
        assert not asked and peak(found.chosen) <= capacity * (1 + 1e-9)
        return
    (before,) = asked
    assert capacity * (1 + 1e-9) >= peak(before.choices) > 0.98 * capacity >= peak(found.chosen) * (1 - 1e-9)
    assert found.certificate.objective <= before.step_s * (1 + gap)


class CutShort(Exactly):
    """Proves nothing of its first problem, as where the time is up; knows how exactly each is to be solved."""

    def __init__(self):
        self.gaps = []

    def solve(self, formulation, *, relative_gap, **how):
        self.gaps.append(relative_gap)
        found = super().solve(formulation, relative_gap=relative_gap, **how)
        if len(self.gaps) > 1:
            return found
        return dataclasses.replace(found, certificate=dataclasses.replace(found.certificate, bound=-math.inf))


def test_a_bound_is_sought_where_the_first_problem_was_cut_short(one_layer):
    f, _ = one_layer
    series = CutShort()
    found = priced(f, None, 1e-3, series, MasterProblem(StepTimes(f), f.problem.capacity))
    assert len(series.gaps) > 1 and max(series.gaps) < 1
    assert 0 < found.bound.bound <= found.best.step_s


def test_the_bound_is_tight_where_all_that_is_sent_hides(formulated, gpus):
    """A layer without memory limits, so slow that its transfers are nothing beside it."""
    mesh = gpus(4)
    rates = tuple((dtype, rate / 1000) for dtype, rate in mesh.device_type.peak_flops_per_s)
    mesh = dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, peak_flops_per_s=rates))
    args = ({"one": f32(256, 512), "two": f32(512, 256)}, f32(512, 256))
    f = formulated(train, args, mesh, donate=(0,), schedule=Schedule.LATENCY_HIDING)
    found = priced(f, None, 1e-4, Exactly(), master_of(f))
    times = asked_for(found.best.formulation, found.best.choices)
    assert times.hidden_s > 0 and times.step_s < 1.001 * times.compute_s
    assert found.bound.bound >= (1 - 1e-3) * found.best.step_s


def test_branches_bound_the_plans_that_are_theirs(one_layer):
    """Whatever decision is cut, and wherever: a branch has its own plans, no others, and none faster than its bound."""
    f, steps_s = one_layer
    for decision, node in enumerate(f.problem.nodes):
        for left in ((0,), tuple(range(1, len(node.costs)))):
            own = {picks: step_s for picks, step_s in steps_s.items() if picks[decision] in left}
            leaf = priced(branched(f, decision, left), None, 1e-6, Exactly(), master_of(f))
            assert (leaf.best is None) == (not own)
            if own:
                assert leaf.best.choices in own
                assert leaf.bound.bound <= min(own.values()) * (1 + 1e-9)
                assert leaf.best.step_s >= min(own.values()) * (1 - 1e-9)
            again = whole(leaf.formulation)
            for picks in itertools.islice(steps_s, 20):
                assert evaluate(again.problem, picks) == evaluate(repriced(f, again.overlap.weights).problem, picks)


def test_what_ties_most_is_cut(hiding):
    """Of the decisions in which the plans of a mixture differ, the one on which most edges hang."""
    ends = collections.Counter(end for e in hiding.problem.edges for end in (e.source, e.target))
    (most, number), *others = ends.most_common()
    tabulated = StepTimes(hiding).tabulated
    assert tying_decision(tabulated, [most, others[-1][0]]) == most
    assert tying_decision(tabulated, []) is None
    assert number > others[-1][1]


def test_under_the_schedule_for_least_memory_all_times_add_up(formulated, gpus):
    args = ({"one": f32(64, 128), "two": f32(128, 64)}, f32(512, 64))
    f = formulated(train, args, gpus(4), donate=(0,), schedule=Schedule.LEAST_MEMORY)
    for picks in random_picks(f, 10):
        times = asked_for(f, picks)
        assert times.hidden_s == 0 and times.step_s == pytest.approx(times.compute_s + times.comm_s)
        assert evaluate(f.problem, picks).objective == pytest.approx(times.step_s)


@pytest.mark.parametrize(
    ("is_tpu", "width", "kinds"),
    [
        (False, 64, {"all-gather", "all-reduce", "reduce-scatter"}),
        (True, 1024, {"all-gather", "all-to-all"}),
        (True, 64, set()),
    ],
)
def test_tpus_hide_what_is_gathered_and_large(formulated, gpus, is_tpu, width, kinds):
    """Of all that plans send, gathers of weights of 8 MiB hide on TPUs, and sums that are exchanged; none
    of 32 KiB, and no sum that is whole on each device."""
    mesh = tpus(gpus(4)) if is_tpu else gpus(4)
    args = ({"one": f32(width, 2 * width), "two": f32(2 * width, width)}, f32(512, width))
    f = formulated(train, args, mesh, donate=(0,), schedule=Schedule.LATENCY_HIDING)
    sent, hidden = set(), set()
    for picks in random_picks(f, 50):
        sent |= {c.kind for c in asked_for(f, picks).communication}
        hidden |= {c.kind for c in asked_for(f, picks).communication if c.hidden_s > 0}
    assert {"all-gather", "all-reduce", "reduce-scatter"} <= sent
    assert hidden - ({"all-to-all"} - kinds) == kinds  # weights may be moved by all-to-alls too


def test_a_problem_has_as_long_as_those_before_took_whatever_its_share(hiding):
    limits_s, took_s = [], 0.05

    def solved(formulation, limits, **_):
        limits_s.append(limits.time_limit_s)
        time.sleep(took_s)
        return Solution(None, Certificate(Status.UNKNOWN, 0.0, 0.0, 0.0, 0.0))

    series = _Series(SolverOptions(time_limit_s=100), solved)
    for share in (0.5, 1e-9, 1.0):
        series.solve(hiding, hint=None, relative_gap=0.0, share=share)
    first, second, third = limits_s
    assert first <= 50 and took_s < second < first and second < third < 100

"""The restricted master problem: what is made of known plans is the best that can be, and what it prices is right."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.compiler.schedule import Schedule
from autoshard.planner.step_times import StepTimes
from autoshard.planner.timeline import asked_for
from autoshard.plans import master_problem, master_program
from autoshard.plans.master_problem import MasterProblem
from autoshard.solver import evaluate


def train(params, x):
    """Four layers that are copies of one another, and their update."""
    loss = lambda p: jnp.sum(jnp.tanh(x @ p[0]) @ p[1] + jnp.tanh(x @ p[2]) @ p[3])
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


@pytest.fixture(scope="module", params=[1.0, pytest.param(30.0, marks=pytest.mark.exhaustive)])
def problem(request, formulated, mesh_of):
    """A problem whose collectives hide, with little and with much to compute beside them."""
    mesh = mesh_of(4)
    rates = tuple((dtype, rate / request.param) for dtype, rate in mesh.device_type.peak_flops_per_s)
    device_type = dataclasses.replace(mesh.device_type, product_workspace_bytes=1024, peak_flops_per_s=rates)
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    args = ([f32(64, 128), f32(128, 64), f32(64, 128), f32(128, 64)], f32(512, 64))
    mesh = dataclasses.replace(mesh, device_type=device_type)
    return formulated(train, args, mesh, donate=(0,), schedule=Schedule.LATENCY_HIDING)


def plans_apart(f, rng, num_parts):
    """Two plans that differ in some decisions, no two of which share an edge, so that each is a part."""
    joined = {frozenset((e.source, e.target)) for e in f.problem.edges}
    while True:
        base = [int(rng.integers(len(n.costs))) for n in f.problem.nodes]
        other, changed = list(base), []
        for node in rng.permutation(len(base)).tolist():
            apart = all(frozenset((node, own)) not in joined for own in changed)
            if apart and len(changed) < num_parts and len(f.problem.nodes[node].costs) > 1:
                changed.append(node)
                other[node] = (base[node] + 1) % len(f.problem.nodes[node].costs)
        if all(np.isfinite(evaluate(f.problem, picks).objective) for picks in (base, other)):
            return base, other, changed


def all_made(f, base, other, changed):
    """Every plan that is made of two, with its step and its peak."""
    for follows in itertools.product((0, 1), repeat=len(changed)):
        picks = list(base)
        for node, own in zip(changed, follows, strict=True):
            picks[node] = other[node] if own else base[node]
        yield tuple(picks), asked_for(f, picks).step_s, evaluate(f.problem, picks).peak_usage


@pytest.mark.parametrize("searched", [False, True], ids=["by programs", "by search"])
def test_the_fastest_plan_is_that_of_all_that_can_be_made(problem, searched):
    """With memory for all of them, for some, and for the least."""
    rng = np.random.default_rng(0)
    for _ in range(12):
        base, other, changed = plans_apart(problem, rng, 5)
        made = list(all_made(problem, base, other, changed))
        peaks = sorted(peak for *_, peak in made)
        for budget in (None, peaks[len(peaks) // 2], peaks[0]):
            master = MasterProblem(StepTimes(problem), None if budget is None else 1.001 * budget)
            assert master.add(base) and master.add(other) and not master.add(base)
            found, known = master.fastest(np.inf, 1e-9), master.fastest_known()
            if searched:
                found = master.improved(base, np.inf)
                assert found is not None
            fitting = {picks: step_s for picks, step_s, peak in made if budget is None or peak <= 1.001 * budget}
            step_s = min(p.step_s for p in (found, known) if p is not None)
            # what is sent although it hides costs a little, and of plans that are as fast any may be taken
            assert min(fitting.values()) * (1 - 1e-9) <= step_s <= min(fitting.values()) * 1.002
            if found is not None:
                assert found.step_s == pytest.approx(fitting[found.choices])
                assert master.fastest(found.step_s * (1 - 1e-3), 1e-9) is None


def test_a_plan_that_differs_everywhere_does_not_tie_what_others_leave_apart(problem, monkeypatch):
    """With it known, all is one part, which would follow one of three plans."""
    monkeypatch.setattr(master_problem, "_TIED", 1.0)  # as in a long chain, no decision ties all others
    monkeypatch.setattr(master_problem, "_LARGE_LEAST", 5)
    rng, num_mixed = np.random.default_rng(2), 0
    for _ in range(30):
        base, other, changed = plans_apart(problem, rng, 5)
        fitting = {picks: step_s for picks, step_s, _ in all_made(problem, base, other, changed)}
        master = MasterProblem(StepTimes(problem), None)
        everywhere = [(k + 2) % len(node.costs) for k, node in zip(base, problem.problem.nodes, strict=True)]
        everywhere = [k if k != own else 1 - k for k, own in zip(everywhere, base, strict=True)]  # of two choices
        if any(everywhere[node] in (base[node], other[node]) for node in changed):
            continue
        if not master.add(everywhere) or master.step_s(everywhere) < max(fitting.values()):
            continue
        master.add(base), master.add(other)
        found = master.improved(base, np.inf)
        assert found is not None and found.step_s <= min(fitting.values()) * 1.002
        num_mixed += fitting[tuple(base)] > 1.01 * found.step_s < fitting[tuple(other)]
    assert num_mixed > 2


def test_from_the_mixture_the_same_plan_is_found(problem):
    """Its program is not made again, though it does not know of the stretches and instants that the mixture lacks."""
    rng = np.random.default_rng(5)
    for n in range(12):
        base, other, changed = plans_apart(problem, rng, 5)
        made = list(all_made(problem, base, other, changed))
        budget = (None, 1.001 * sorted(peak for *_, peak in made)[len(made) // 2])[n % 2]
        fitting = [step_s for _, step_s, peak in made if budget is None or peak <= budget]
        master = MasterProblem(StepTimes(problem), budget)
        master.add(base), master.add(other)
        mixture = master.mixture()
        found = [p for p in (master.fastest(np.inf, 1e-9), master.fastest_known()) if p is not None]
        if mixture is None:  # even mixtures exceed the budget
            continue
        step_s = min(p.step_s for p in found)
        assert mixture.step_s <= step_s * (1 + 1e-6)
        assert min(fitting) * (1 - 1e-9) <= step_s <= min(fitting) * 1.002


def test_no_plan_takes_less_than_the_mixture_at_its_prices(problem):
    """By duality: least + what is waited for by weight + what is used by price, less the budget's, is at least that."""
    rng = np.random.default_rng(1)
    for n in range(12):
        base, other, changed = plans_apart(problem, rng, 5)
        made = list(all_made(problem, base, other, changed))
        peaks = sorted(peak for *_, peak in made)
        budget = 1.001 * peaks[(0, len(peaks) // 2, -1)[n % 3]]
        times = StepTimes(problem)
        master = MasterProblem(times, budget)
        master.add(base), master.add(other)
        mixture = master.mixture()
        if mixture is None:  # even mixtures exceed the budget, though a plan made of both need not
            assert not any(peak <= budget for *_, peak in made)
            continue
        slack = []
        for picks, step_s, peak in made:
            own, taken = times.of(np.array(picks)), times.tabulated.taken(np.array(picks))
            price_s = own.least_s.sum()
            price_s += sum(w * times.waited_s(own, (stretch,)).sum() for w, stretch in mixture.weights.stretches)
            used = times.tabulated.usage(taken)
            price_s += sum(price * (used[instant] - budget) for instant, price in mixture.prices.items())
            slack.append(price_s - mixture.step_s)
            assert step_s >= mixture.step_s * (1 - 1e-6) or peak > budget
        assert min(slack) == pytest.approx(0.0, abs=1e-6 * mixture.step_s)  # so much is reached, and no less


def test_what_is_dived_into_is_made_of_the_plans_and_mostly_the_fastest(problem, monkeypatch):
    """With no option too many for an integer program, and with none few enough."""
    rng, as_fast = np.random.default_rng(3), []
    for n in range(6):
        base, other, changed = plans_apart(problem, rng, 6)
        made = {picks: (step_s, peak) for picks, step_s, peak in all_made(problem, base, other, changed)}
        peaks = sorted(peak for _, peak in made.values())
        budget = (None, 1.001 * peaks[len(peaks) // 2])[n % 2]
        fitting = [step_s for step_s, peak in made.values() if budget is None or peak <= budget]
        for most in (10**6, 0):
            monkeypatch.setattr(master_program, "_MOST_OPTIONS", most)
            master = MasterProblem(StepTimes(problem), budget)
            master.add(base), master.add(other)
            found = master.fastest(math.inf, 0.0)
            if found is None:
                assert most == 0, "an integer program misses no plan"
                continue
            step_s, peak = made[found.choices]
            assert found.step_s == pytest.approx(step_s)
            assert budget is None or peak <= budget * (1 + 1e-6)
            as_fast.append(step_s <= min(fitting) * 1.01)
            assert as_fast[-1] or most == 0
    assert sum(as_fast) >= 9, "of six and six"


def test_a_stretch_that_binds_no_more_is_forgotten_and_found_again(problem):
    rng = np.random.default_rng(4)
    base, other, _ = plans_apart(problem, rng, 6)
    master = MasterProblem(StepTimes(problem), None)
    master.add(base), master.add(other)
    mixtures = [master.mixture().step_s for _ in range(5)]
    assert mixtures == pytest.approx([mixtures[0]] * 5)
    binding = {master.times.copies_of(stretch) for _, stretch in master.mixture().weights.stretches}
    assert binding <= set(master._stretches)
    assert len(master._stretches) <= len(binding) + 1, "and the whole"


def test_copies_count_together(problem):
    """Decisions that add the same are of one kind, of which any number may change."""
    times, base = StepTimes(problem), [0] * len(problem.problem.nodes)
    joined = {frozenset((e.source, e.target)) for e in problem.problem.edges}
    changed = lambda *nodes: [int(n in nodes) for n in range(len(base))]
    more = [n for n, node in enumerate(problem.problem.nodes) if len(node.costs) > 1]
    twins = 0
    for a, b in itertools.combinations(more, 2):
        plans = [changed(), changed(a), changed(b), changed(a, b)]
        if frozenset((a, b)) in joined or not all(np.isfinite(evaluate(problem.problem, p).objective) for p in plans):
            continue
        master = MasterProblem(times, None)
        master.add(plans[0]), master.add(plans[3])
        [group] = master._program([list(master._columns.values())]).groups
        if len(group.kinds) > 1:
            continue
        twins += 1
        steps_s = [asked_for(problem, picks).step_s for picks in plans]
        assert steps_s[1] == pytest.approx(steps_s[2])
        assert group.kinds == [[0, 1]] and len(group.kind) == 2
        of_base = group.followed.index([0, 0])
        for count, step_s in enumerate((steps_s[0], steps_s[1], steps_s[3])):
            taken = np.array([count, count])
            taken[of_base] = 2 - count
            assert asked_for(problem, group.made(taken)).step_s == pytest.approx(step_s)
    assert twins >= 2


def test_budgets_and_branches_keep_the_plans(problem):
    rng = np.random.default_rng(2)
    base, other, changed = plans_apart(problem, rng, 3)
    master = MasterProblem(StepTimes(problem), None)
    master.add(base), master.add(other)
    least = min(evaluate(problem.problem, picks).peak_usage for picks in (base, other))
    assert master.with_budget(0.5 * least).fastest_known() is None
    assert master.with_budget(1.01 * least).fastest_known() is not None
    decision = changed[0]
    branch = master.within(decision, [other[decision]])
    assert branch.fastest_known().choices == tuple(other)
    branch.take(master)
    assert branch.fastest_known() == master.fastest_known()


@pytest.mark.parametrize(("repairs", "expected"), [(0, [[1, 1, 0]]), (3, [[1, 1, 0], [1, 0, 0]])])
def test_a_plan_that_exceeds_the_memory_is_rounded_again_with_less(monkeypatch, repairs, expected):
    """Three parts take 0.2 of the memory each, or 0.45 and save 3, 2 and 1 s. Over the reals the second saves 60 % of
    its 2 s, and is rounded to all: 1.1 of the memory. With 0.9 of it, it would save 20 %, and is rounded to nothing."""
    monkeypatch.setattr(master_program, "_DIVES", 0)
    monkeypatch.setattr(master_program, "_REPAIRS", repairs)
    group = object.__new__(master_program.Group)  # of two plans, in numbers
    group.plans = np.array([[0, 0, 0], [1, 1, 1]])
    group.parts, group.kinds = [np.array([k]) for k in range(3)], [[0], [1], [2]]
    group.kind, group.followed = np.array([0, 0, 1, 1, 2, 2]), [[0], [1]] * 3
    group.costs_s, group.sent_s = np.array([0.0, 3.0, 0.0, 2.0, 0.0, 1.0, 0.0]), np.zeros(7)
    group.rows = np.array([[0.0, 0.2, 0.45, 0.2, 0.45, 0.2, 0.45]])
    program = master_program.MasterProgram(None, (group,), np.zeros((1, 0)), np.ones(1))
    relaxed = program.relaxed()
    assert relaxed.value_s == pytest.approx(6 - 3 - 0.6 * 2)
    dived = program._dived(group, relaxed, program._matrices(0.0), math.inf)
    assert [plan.tolist() for plan in dived] == expected


def test_the_plans_to_be_scheduled_fit_and_are_not_alike(problem, monkeypatch):
    """Those that take least, with a share of what they send, come first; one is left out only for one that is alike."""
    rng, share = np.random.default_rng(11), master_problem._NOT_HIDDEN
    num_left_out = 0
    for n in range(12):
        base, other, changed = plans_apart(problem, rng, 5)
        made = list(all_made(problem, base, other, changed))
        budget = (None, 1.001 * sorted(peak for *_, peak in made)[len(made) // 2])[n % 2]
        master = MasterProblem(StepTimes(problem), budget)
        for picks, *_ in made:
            master.add(picks)
        monkeypatch.setattr(master_problem, "_ALIKE", (1e-12, 0.05)[n % 3 == 0])
        most_s = (1 + rng.random()) * min(step_s for _, step_s, _ in made)
        columns = {c.made: c for c in master._columns.values() if not c.exceeded and c.step_s <= most_s}
        supposed_s = lambda m, of=columns: of[m].step_s + share * of[m].total_sent_s
        if not columns:
            continue
        found = master.promising(len(made), most_s)
        assert [supposed_s(m) for m in found] == sorted(map(supposed_s, found))
        assert set(found) <= set(columns)
        assert supposed_s(found[0]) == min(map(supposed_s, columns))
        alike = lambda a, b, of=columns: (
            abs(a.step_s - b.step_s) <= master_problem._ALIKE * a.step_s
            and abs(of[a].total_sent_s - of[b].total_sent_s) <= master_problem._ALIKE * a.step_s
        )
        assert not any(alike(b, a) for a, b in itertools.combinations(found, 2))
        left_out = set(columns) - set(found)
        assert all(any(alike(m, f) for f in found) for m in left_out)
        assert master.promising(2, most_s) == found[:2]
        assert master.promising(len(made), most_s, than=found[-1].choices) == found[:-1]
        num_left_out += len(left_out)
    assert num_left_out


def test_of_known_plans_one_is_made_that_sends_little(problem):
    """Of two plans that differ in a few parts, what takes least with a share of what it sends, as by trying all."""
    rng, share, num_made = np.random.default_rng(5), master_problem._NOT_HIDDEN, 0
    for n in range(8):
        base, other, changed = plans_apart(problem, rng, 5)
        made = list(all_made(problem, base, other, changed))
        budget = (None, 1.001 * sorted(peak for *_, peak in made)[len(made) // 2])[n % 2]
        every, master = (MasterProblem(StepTimes(problem), budget) for _ in range(2))
        for picks, *_ in made:
            every.add(picks)
        supposed_s = {c.made: c.step_s + share * c.total_sent_s for c in every._columns.values() if not c.exceeded}
        known = [m for m in supposed_s if m.choices in (tuple(base), tuple(other))]
        for m in known:
            master.add(m.choices)
        if len(known) < 2:  # one plan is nothing to make others of
            continue
        found = master.promising(4, math.inf)
        assert supposed_s[found[0]] == pytest.approx(min(supposed_s.values()), rel=1e-9)
        num_made += found[0] not in known
    assert num_made


def test_of_known_plans_one_is_made_of_which_kernels_wait_less_in_line(problem, monkeypatch):
    """What takes least with that, at the prices near the plan that it begins with, as by trying all."""
    monkeypatch.setattr(master_problem, "_ROUNDS_IN_LINE", 1)
    rng, num_made = np.random.default_rng(7), 0
    for n in range(8):
        base, other, changed = plans_apart(problem, rng, 5)
        made = list(all_made(problem, base, other, changed))
        budget = (None, 1.001 * sorted(peak for *_, peak in made)[len(made) // 2])[n % 2]
        times = StepTimes(problem)
        master = MasterProblem(times, budget)
        if not (master.add(base) and master.add(other)):
            continue
        prices = master.in_line(base)
        in_line_s = lambda picks, prices=prices, times=times: times.in_line_s(times.of(np.array(picks)), prices).sum()
        supposed_s = {p: step_s + in_line_s(p) for p, step_s, peak in made if budget is None or peak <= budget}
        for found in master.less_in_line(base, math.inf):
            assert supposed_s[found.choices] == pytest.approx(min(supposed_s.values()), rel=1e-9)
            assert found.step_s == pytest.approx(master.step_s(found.choices))
            assert master.less_in_line(base, found.step_s * (1 - 1e-6)) == ()
            num_made += found.choices != tuple(other)
    assert num_made

"""The integer program of a program: its optimum by brute force, and figures that agree wherever they are computed."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import brute_force
from jax import lax

from autoshard.errors import LayoutError
from autoshard.graph.layout import WHOLE, spec_entries
from autoshard.planner.allowed import Restrictions
from autoshard.planner.close import close_choices
from autoshard.planner.decode import decode, estimate
from autoshard.planner.ties import settle_ties
from autoshard.solver import SolverOptions, Status, evaluate, least_capacity, solve


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def two_products(x, v, w):
    return jnp.tanh(x @ v) @ w


def gradient(w, x):
    return w - 0.1 * jax.grad(lambda w: (jnp.sin(x @ w) ** 2).sum())(w)


def looked_up(table, ids):
    return table - 0.1 * jax.grad(lambda table: (table[ids] ** 2).sum())(table)


def loop(c, w):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), c, None, length=4)[0]


def train(params, x):
    def loss(p):
        h = jax.nn.relu(x @ p["up"] + p["bias"])
        return ((jax.nn.softmax(h @ p["down"]) - x) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def stacked(c, xs, ws):
    def body(c, row):
        c = jnp.sin(c @ ws + row)
        return c, c.sum(0)

    c, rows = lax.scan(body, c, xs)
    return lax.cond(rows.sum() > 0, lambda c: c @ c.T, lambda c: c @ c.T * 2, c)


PARAMS = {"up": f32(64, 128), "bias": f32(128), "down": f32(128, 64)}
TINY = {
    "two_products": (two_products, (f32(16, 64), f32(64, 64), f32(64, 32)), ()),
    "gradient": (gradient, (f32(64, 32), f32(16, 64)), (0,)),
    "loop": (loop, (f32(32, 32), f32(32, 32)), ()),
    "sum_of_products": (lambda x, y, w: x @ w + y @ w, (f32(16, 32), f32(16, 32), f32(32, 16)), ()),
}
TINY["look_up"] = (looked_up, (f32(64, 8), jax.ShapeDtypeStruct((16,), jnp.int32)), (0,))
LARGER = {
    "train": (train, (PARAMS, f32(32, 64)), (0,)),
    "stacked": (stacked, (f32(16, 16), f32(8, 16, 16), f32(16, 16)), ()),
}
EXACT = SolverOptions(time_limit_s=20.0, relative_gap=0.0)


@pytest.fixture(params=TINY)
def tiny(request, formulated, mesh_of):
    fn, args, donate = TINY[request.param]
    return formulated(fn, args, mesh_of(4), donate=donate)


@pytest.fixture(
    params=[(name, sizes) for name in (*TINY, *LARGER) for sizes in ((4,), (2, 4))], ids=str, scope="module"
)
def any_program(request, formulated, mesh_of):
    name, sizes = request.param
    fn, args, donate = {**TINY, **LARGER}[name]
    return formulated(fn, args, mesh_of(*sizes), donate=donate)


def random_picks(f, count: int):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield [int(rng.integers(len(n.costs))) for n in f.problem.nodes]


def limited(f, budget_bytes: float):
    return dataclasses.replace(f.problem, capacity=budget_bytes)


def test_the_solver_finds_what_brute_force_finds(tiny):
    best, choices = brute_force(tiny.problem)
    solution = solve(tiny.problem, EXACT)
    assert solution.certificate.status is Status.OPTIMAL
    assert solution.certificate.objective == pytest.approx(best, rel=1e-9)
    assert evaluate(tiny.problem, choices).objective == pytest.approx(best, rel=1e-12)


def test_the_solver_finds_what_brute_force_finds_within_a_budget(tiny):
    free = solve(tiny.problem, EXACT).choices
    peaks = sorted({evaluate(tiny.problem, p).peak_usage for p in random_picks(tiny, 50)})
    budget = 0.5 * (peaks[0] + evaluate(tiny.problem, free).peak_usage)
    problem = limited(tiny, budget)
    best, choices = brute_force(problem)
    solution = solve(problem, EXACT)
    if choices is None:
        assert solution.certificate.status is Status.INFEASIBLE
    else:
        assert solution.certificate.objective == pytest.approx(best, rel=1e-9)
        assert evaluate(problem, solution.choices).peak_usage <= budget * (1 + 1e-9)


def test_no_random_plan_beats_the_solver(any_program):
    f = any_program
    solution = solve(f.problem, EXACT)
    bound = solution.certificate.bound
    assert bound <= solution.certificate.objective * (1 + 1e-12)
    for picks in random_picks(f, 50):
        assert evaluate(f.problem, picks).objective >= max(bound, solution.certificate.objective) * (1 - 1e-3)


def test_the_estimate_is_what_the_solver_counts(any_program):
    f = any_program
    for picks in (solve(f.problem, EXACT).choices, *random_picks(f, 20)):
        counted, figures = evaluate(f.problem, picks), estimate(f, picks, as_compiled=False)
        assert estimate(f, picks).step_s <= figures.step_s * (1 + 1e-9)
        assert figures.step_s == pytest.approx(counted.objective, rel=1e-9)
        assert figures.peak_bytes == pytest.approx(counted.peak_usage, rel=1e-9)
        assert figures.step_s == pytest.approx(figures.compute_s + figures.comm_s)
        assert figures.comm_s == pytest.approx(sum(c.time_s for c in figures.communication))
        assert figures.compute_s == pytest.approx(sum(c.compute_s for c in figures.compute))
        assert sum(m.size_bytes for m in figures.memory) == pytest.approx(figures.peak_bytes)


def test_every_choice_decodes(any_program):
    f = any_program
    graph = f.program.graph
    names = {axis.name for axis in f.mesh.axes}
    for picks in random_picks(f, 5):
        decoded = decode(f, picks)
        assert len(decoded.argument_layouts) == len(graph.arguments)
        assert len(decoded.output_layouts) == len(decoded.output_steps) == len(graph.outputs)
        for output, layout, steps in zip(graph.outputs, decoded.output_layouts, decoded.output_steps, strict=True):
            if output.successor_of is not None:
                assert layout == decoded.argument_layouts[output.successor_of]
            rank = len(graph.values[output.value].shape) if output.value is not None else 0
            assert not steps or steps[-1] == spec_entries(layout, rank, f.mesh.axis_names)
        for number, shardings in decoded.shardings:
            assert 0 <= number < len(graph.equations)
            paths = [entries for _, steps in shardings.operands for entries in steps]
            for entries in (*paths, *(e for _, e in shardings.results), *(e for _, e in shardings.body)):
                used = [a for e in entries for a in e]
                assert len(set(used)) == len(used) and set(used) <= names


@pytest.mark.parametrize("name", ["train", pytest.param("stacked", marks=pytest.mark.exhaustive)])
def test_less_memory_costs_more_time(name, formulated, mesh_of):
    fn, args, donate = LARGER[name]
    f = formulated(fn, args, mesh_of(2, 4), donate=donate)
    free = solve(f.problem, EXACT)
    most = evaluate(f.problem, free.choices).peak_usage
    least = least_capacity(f.problem, EXACT).peak
    assert least <= most
    before = free.certificate.objective
    for share in (0.8, 0.5, 0.2, 0.0):
        budget = least + share * (most - least)
        problem = limited(f, budget)
        solution = solve(problem, EXACT)
        assert solution.choices is not None, "the least capacity is achievable"
        assert evaluate(problem, solution.choices).peak_usage <= budget * (1 + 1e-9)
        assert solution.certificate.objective >= before * (1 - 1e-9)
        before = solution.certificate.objective


def test_ties_go_to_the_layout_of_least_memory(any_program):
    f = any_program
    picks = solve(f.problem, EXACT).choices
    settled = settle_ties(f, picks)
    before, after = evaluate(f.problem, picks), evaluate(f.problem, settled)
    assert after.objective == pytest.approx(before.objective, rel=1e-8)
    held = lambda choice: sum(
        f.program.graph.values[a.value].size_bytes
        / math.prod(n for n, d in zip(f.mesh.shape, l, strict=True) if d != WHOLE)
        for a, l in zip(f.program.graph.arguments, decode(f, choice).argument_layouts, strict=True)
    )
    assert held(settled) <= held(picks)
    assert settle_ties(f, settled) == settled


def test_a_batch_that_is_converted_first_is_fed_in_pieces(formulated, mesh_of):
    """The conversion is computed inside its reader: it is as well made of the whole batch on every device, and sliced.

    So the batch may be anything in a best plan, each with the conversion laid out alike: all end as the piece.
    """

    def forward(images, w):
        return images.astype(jnp.bfloat16) @ w

    shapes = [jax.ShapeDtypeStruct((1 << 14, 1 << 10), jnp.float32), jax.ShapeDtypeStruct((1 << 10,) * 2, jnp.bfloat16)]
    f = formulated(forward, shapes, mesh_of(4))
    picks = list(solve(f.problem, EXACT).choices)
    best_s = evaluate(f.problem, picks).objective
    (edge,) = [e for e in f.problem.edges if 0 in (e.source, e.target)]
    reader = max(edge.source, edge.target)
    found = set()
    for own, read_as in itertools.product(range(len(f.decisions[0].rows)), range(len(f.decisions[reader].rows))):
        tried = [*picks]
        tried[0], tried[reader] = own, read_as
        if evaluate(f.problem, tried).objective <= best_s * (1 + 1e-12):
            found.add(decode(f, tried).argument_layouts[0])
            assert decode(f, settle_ties(f, tried)).argument_layouts[0] == (0,)
    assert found == {(WHOLE,), (0,)}


def test_near_ties_cost_what_they_say(any_program):
    """Changing one argument alone costs the stated surplus; no other choice of it costs less but the chosen one."""
    f = any_program
    picks = list(solve(f.problem, EXACT).choices)
    best = evaluate(f.problem, picks).objective
    ties = {t.name: t.extra_s for t in close_choices(f, picks)}
    assert list(ties.values()) == sorted(ties.values())
    for i, argument in enumerate(f.program.graph.arguments):
        others = []
        for k in range(len(f.decisions[i].rows)):
            extra = evaluate(f.problem, [*picks[:i], k, *picks[i + 1 :]]).objective - best
            others += [extra] if extra > 1e-12 else []
        if argument.name in ties:
            assert ties[argument.name] == pytest.approx(min(others), rel=1e-6)
        else:
            assert not others


def test_successors_pay_to_return_to_their_layout(formulated, mesh_of):
    """A state kept in pieces while its successor is made whole: the return is a slice, for nothing; the other way
    around, the new state is gathered, 3 of 4 pieces of 64 x 32 x 4 B over a ring.
    """
    f = formulated(lambda s: s * 2, (f32(64, 32),), mesh_of(4), donate=(0,))
    layouts = {l: k for k, l in enumerate(f.argument_layouts[0])}
    (table,) = f.tables
    group = {r: k for k, r in enumerate(table.reads[0])}
    gather = 3 * 1e-6 + 0.75 * 8192 / 1e10 + 1e-6
    cost = lambda state, inside: estimate(f, [layouts[state], group[inside]]).comm_s
    assert cost((0,), (0,)) == cost((WHOLE,), (WHOLE,)) == 0
    assert cost((0,), (WHOLE,)) == pytest.approx(gather), "gathered to be read; sliced at the end"
    assert cost((WHOLE,), (0,)) == pytest.approx(gather), "sliced to be read; gathered at the end"


def test_loops_pay_for_every_iteration(formulated, mesh_of):
    """A carry kept whole while the body makes it in pieces is gathered in each of 4 iterations."""
    f = formulated(loop, (f32(32, 32), f32(32, 32)), mesh_of(4))
    counts = {c.count for picks in random_picks(f, 40) for c in estimate(f, picks).communication}
    assert counts == {1.0, 4.0}


def test_pins_leave_only_what_they_allow(formulated, mesh_of):
    fn, args, donate = TINY["two_products"]
    pins = [None, ((), ("c",)), ((), ())]
    f = formulated(fn, args, mesh_of(2, 2, 2), pins=pins)
    v, w = (f.argument_layouts[i] for i in (1, 2))
    assert {v[k] for k in f.decisions[1].rows} == {(WHOLE, WHOLE, 1)}
    assert {w[k] for k in f.decisions[2].rows} == {(WHOLE, WHOLE, WHOLE)}


def test_demands_that_cannot_be_met_are_refused(formulated, mesh_of):
    with pytest.raises(LayoutError, match="`x` with shape \\(16, 6\\)"):
        formulated(lambda x: x + 1, (f32(16, 6),), mesh_of(4), pins=[((), ("a",))])
    nothing = Restrictions(argument=lambda index, layout: False)
    with pytest.raises(LayoutError, match="leave no layout"):
        formulated(lambda x: x + 1, (f32(16, 6),), mesh_of(4), restrictions=nothing)


def test_restrictions_hold(formulated, mesh_of):
    only_a = Restrictions(
        argument=lambda index, layout: layout[1] == WHOLE,
        group=lambda index, choice: choice.assignment[1] == WHOLE,
    )
    f = formulated(*TINY["two_products"][:2], mesh_of(2, 4), restrictions=only_a)
    for picks in random_picks(f, 20):
        decoded = decode(f, picks)
        assert all(l[1] == WHOLE for l in decoded.argument_layouts)
        assert all(c.assignment[1] == WHOLE for c in decoded.choices)

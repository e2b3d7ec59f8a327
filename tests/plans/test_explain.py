"""The explanation holds the facts of the plan, in lines that fit a terminal, and does not grow with the layers."""

import dataclasses
import math
import pathlib
import re

import jax
import pytest
from autoshard_models import train_step
from autoshard_models.presets import preset

import autoshard
from autoshard import Plan
from autoshard.cluster import Cluster
from autoshard.compiler.orders import Order, OrderKind
from autoshard.planner.allowed import ArgumentDecision
from autoshard.planner.build import formulate
from autoshard.planner.program import prepare
from autoshard.plans.explain import MORE, explain
from autoshard.plans.make import Origin, plan_of_choices
from autoshard.plans.text import layout_text, pattern
from autoshard.printing import amount, seconds
from autoshard.solver.problem import Certificate, Status
from autoshard.trace.trace import trace

WIDTH = 118


@pytest.fixture(scope="module")
def deep_plan():
    """A GPT of 24 layers with everything whole, as data parallelism without data: no solver is needed."""
    cluster = Cluster.from_file(pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x8.yaml")
    config = preset("tiny", num_layers=24, embed_dim=32, num_heads=4, context_length=16)
    functions = train_step.build(config, train_step.adamw())
    args = (jax.eval_shape(functions.init, 0), train_step.batch_shapes(batch_size=8, sequence_length=16))
    traced = trace(functions.step, args, (0,))
    mesh = cluster.slices()[0].logical_mesh({"data": 2, "tensor": 4})
    f = formulate(prepare(traced.graph), mesh, None, [None] * len(traced.graph.arguments))
    certificate = Certificate(Status.FEASIBLE, 1.0, 0.5, 0.5, 1.0)
    picks = tuple(
        0 if isinstance(d, ArgumentDecision) else len(n.costs) - 1
        for d, n in zip(f.decisions, f.problem.nodes, strict=True)
    )
    made = plan_of_choices(traced, f, picks, origin=Origin("deep", cluster.name, (0,)), certificate=certificate)
    return Plan.of(made)


def test_one_path_is_shown_as_it_is_and_several_as_their_pattern():
    """A path that stands for itself can be pinned; a pattern of it would pin the optimizer's state, too."""
    cluster = Cluster.from_file(pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "cpux8.yaml")
    layer = lambda width: {"w": jax.ShapeDtypeStruct((64, width), "float32")}
    state = ([layer(64), layer(64), layer(512)], {"mu": [layer(64), layer(64), layer(512)]})
    made = autoshard.plan(lambda state: jax.tree.map(lambda w: w * 2, state), state, cluster=cluster, mesh={"data": 8})
    text = made.explain(full=True)
    assert re.search(r"state\.\*\.\*\.w +2  64x64", text) and re.search(r"state\.0\.2\.w +1  64x512", text)
    assert re.search(r"1 +state +64x512 +state\.1\.mu\.2\.w", text)


def test_the_key_facts_are_there(plan):
    text, e = plan.explain(full=True), plan.estimate
    first = text.splitlines()[0]
    assert first.startswith("Plan `autoshard` for cluster `cpux8`: 8 x CPU-generic as ")
    for axis, size in plan.axes:
        assert f"{axis}={size}" in first
    facts = [
        f"step     {seconds(e.step_s)} predicted = {seconds(e.compute_s)} compute + {seconds(e.comm_s)} communication",
        f"{amount(e.comm_bytes)} sent per device and step",
        f"{amount(e.peak_bytes)} per device at the peak of {amount(plan.budget_bytes)} allowed",
        f"proof    optimal: cost {seconds(plan.certificate.objective)}",
    ]
    for fact in facts:
        assert fact in text
    for a in plan.arguments:
        assert not a.shape or any(a.name in l and layout_text(a.entries) in l for l in text.splitlines())
    for c in plan.candidates:
        assert ", ".join(f"{a}={n}" for a, n in c.axes) in text and c.verdict in text


def test_lines_fit_a_terminal(plan, deep_plan):
    for p in (plan, deep_plan):
        assert max(map(len, (p.explain() + p.explain(full=True)).splitlines())) <= WIDTH


def rows_of(text: str) -> list[str]:
    """The lines of `text` with single spaces; a long source, which takes a second line, is one with its row."""
    joined = re.sub(r"\n {40,}\(", " (", text)
    return [" ".join(line.split()) for line in joined.splitlines()]


def test_one_screen_is_the_beginning_of_each_part(plan, deep_plan):
    for p in (plan, deep_plan):
        screen, whole = rows_of(p.explain()), rows_of(p.explain(full=True))
        assert str(p) == p.explain() and len(screen) <= 46
        assert screen[: screen.index("")] == whole[: whole.index("")], "the summary is the same"
        rows = {row for row in screen[:-1] if not re.match(r"and \d+ more", row)}
        assert screen[-1] == MORE and rows <= set(whole), "every row is one of the whole's"
    assert {row.split(".")[0] for row in deep_plan.explain().splitlines()} >= {"state", "batch"}


def test_layers_fall_together(deep_plan):
    lines = deep_plan.explain(full=True).splitlines()
    assert len(lines) <= 110
    (row,) = [
        l for l in lines if "state.params.blocks.*.mlp.up.kernel" in l and "32x128" in l and " 24 " in l and "same" in l
    ]
    assert "(-, -)" in row
    assert not any("blocks.7." in l for l in lines)


def test_the_tables_add_up(plan, deep_plan):
    for p in (plan, deep_plan):
        e = p.estimate
        assert e.step_s == pytest.approx(e.compute_s + e.comm_s)
        assert sum(c.time_s for c in e.communication) == pytest.approx(e.comm_s)
        assert sum(c.wire_bytes for c in e.communication) == pytest.approx(e.comm_bytes)


def test_odd_figures_are_shown(plan):
    odd = dataclasses.replace(
        plan,
        budget_bytes=None,
        certificate=Certificate(Status.FEASIBLE, 1.0, -math.inf, math.inf, 0.0),
        candidates=tuple(dataclasses.replace(c, step_s=None, bound_s=math.inf) for c in plan.candidates) * 2,
        warnings=("something [odd] with [/brackets]",),
    )
    text = odd.explain()
    assert "gap unknown" in text and "allowed" not in text
    assert "something [odd] with [/brackets]" in text, "text of the user is not markup"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("state.params.blocks.12.mlp.kernel", "state.params.blocks.*.mlp.kernel"),
        ("params.h_3.w", "params.h_*.w"),
        ("params.conv2d.w1", "params.conv2d.w1"),
        ("0.1", "*.*"),
        ("opt_state.1.0.mu.h_10", "opt_state.*.*.mu.h_*"),
    ],
)
def test_numbers_become_patterns(name, expected):
    assert pattern(name) == expected


def test_units():
    assert [seconds(s) for s in (0, 3e-9, 1.5e-6, 0.25, 2.0, 90)] == ["0", "3 ns", "1.5 µs", "250 ms", "2 s", "90 s"]
    assert [amount(b) for b in (0, 999, 1e3, 2.5e9, 1e15)] == ["0 B", "999 B", "1 kB", "2.5 GB", "1 PB"]
    assert amount(3e12, "FLOP") == "3 TFLOP"
    assert layout_text((("data", "fsdp"), (), ("tensor",))) == "(data+fsdp, -, tensor)"


def test_orders_are_summed_by_kind_with_the_largest_tensor(plan):
    stored = [
        Order(OrderKind.MATERIALIZED, f"result of {name}", (8, rows), 4e3 * rows, f"m.py:{rows}", rows)
        for rows, name in ((1, "mul"), (2, "tanh"))
    ]
    waiting = Order(OrderKind.WAITS, "0.params.up.kernel", (32, 64), 1e3, "m.py:7", 7)
    lines = explain(dataclasses.replace(plan, orders=(*stored, waiting)), full=True).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("What the compiler is made to order or keep"))
    assert [re.split(r"\s{2,}", line.strip()) for line in lines[start + 2 : start + 4]] == [
        ["2", OrderKind.MATERIALIZED.value, "8 kB", "result of tanh 8x2", "m.py:2"],
        ["1", OrderKind.WAITS.value, "1 kB", "*.params.up.kernel 32x64", "m.py:7"],
    ]
    assert "order or keep" not in explain(dataclasses.replace(plan, orders=()), full=True)

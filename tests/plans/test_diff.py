"""The difference of two plans: nothing for equal ones, by hand for a small one, and sums that add up for real ones."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

import autoshard
from autoshard.cli import app
from autoshard.compiler.orders import Order, OrderKind
from autoshard.planner.estimate import CommunicationItem, ComputeItem, Estimate, MemoryItem
from autoshard.plans.diff import diff, fold_paths
from autoshard.plans.differences import OrderChange
from autoshard.plans.plan_diff import signed
from autoshard.plans.program_plan import PlannedTensor
from autoshard.printing import seconds


@pytest.fixture(scope="module")
def plans(train, shapes, cluster) -> list[autoshard.Plan]:
    """Three plans of one program on several meshes."""
    settings = {"cluster": cluster, "donate_argnums": 0}
    return [
        autoshard.plan(train, *shapes(), mesh={"data": 4, "tensor": 2}, **settings),
        autoshard.baselines.zero(train, *shapes(), mesh={"data": 4, "tensor": 2}, **settings),
        autoshard.baselines.data_parallel(train, *shapes(), mesh={"data": 8}, **settings),
    ]


def estimate(compute, communication, memory) -> Estimate:
    """An estimate with the sums of its items."""
    compute_s, comm_s = sum(c.compute_s for c in compute), sum(c.time_s for c in communication)
    return Estimate(
        compute_s + comm_s,
        compute_s,
        comm_s,
        sum(c.wire_bytes for c in communication),
        sum(m.size_bytes for m in memory),
        sum(c.flops for c in compute),
        "",
        tuple(compute),
        tuple(communication),
        tuple(memory),
    )


def tensor(name, *entries) -> PlannedTensor:
    return PlannedTensor(name, (8,) * len(entries), "float32", entries)


def moved(kind, value, wire_bytes, time_s, source="m.py:1") -> CommunicationItem:
    return CommunicationItem(kind, ("data",), value, (8, 8), source, wire_bytes, time_s, 2.0)


def hand_made(plan: autoshard.Plan, arguments, figures: Estimate) -> autoshard.Plan:
    return dataclasses.replace(
        plan,
        axes=(("data", 4), ("tensor", 2)),
        arguments=tuple(arguments),
        outputs=(),
        output_steps=(),
        shardings=(),
        equations=("one",),
        estimate=figures,
    )


def test_by_hand(plan):
    """Two layers' kernels become whole (saving their gathers), a bias stays, a product takes longer."""
    whole, split = (), ("data",)
    a = hand_made(
        plan,
        [tensor("s.p.0.w", split, whole), tensor("s.p.1.w", split, whole), tensor("s.p.0.b", whole)],
        estimate(
            [ComputeItem("dot_general", 0, "m.py:2", 100.0, 5.0)],
            [moved("all-gather", f"s.p.{i}.w", 30.0, 3.0) for i in range(2)] + [moved("all-reduce", "add", 7.0, 0.5)],
            [
                MemoryItem("s.p.0.w", "state", (8, 8), 16.0),
                MemoryItem("copy of s.p.1.w", "resharded copies", (8, 8), 64.0),
            ],
        ),
    )
    b = hand_made(
        plan,
        [tensor("s.p.0.w", whole, whole), tensor("s.p.1.w", whole, whole), tensor("s.p.0.b", whole)],
        estimate(
            [ComputeItem("dot_general", 0, "m.py:2", 140.0, 7.0)],
            [moved("reduce-scatter", "add", 9.0, 0.75), moved("all-reduce", "dot", 1.0, 0.125)],
            [MemoryItem("s.p.0.w", "state", (8, 8), 64.0), MemoryItem("dot at m.py:2", "intermediates", (8,), 32.0)],
        ),
    )  # fmt: skip
    found = diff(a, b)
    (layout,) = found.layouts
    assert (layout.path, layout.count, layout.before, layout.after) == ("s.p.*.w", 2, "(data, -)", "(-, -)")
    assert (layout.comm_s, layout.comm_bytes, layout.memory_bytes) == (-6.0, -60.0, -16.0)
    assert [(c.tensor, c.before, c.after, c.comm_s, c.comm_bytes) for c in found.communication] == [
        ("add", "2 all-reduce data", "2 reduce-scatter data", 0.25, 2.0),
        ("dot", "", "2 all-reduce data", 0.125, 1.0),
    ]
    assert [(c.operation, c.compute_s, c.flops) for c in found.compute] == [("dot_general", 2.0, 40.0)]
    assert [(m.memory_class, m.tensor, m.memory_bytes) for m in found.memory] == [
        ("intermediates", "dot at m.py:*", 32.0)
    ]
    assert found.step_s == -6.0 + 0.25 + 0.125 + 2.0 and found.rest_s == 0
    assert found.peak_bytes == -16.0 + 32.0 and found.rest_bytes == 0
    lines = [" ".join(line.split()) for line in str(found).splitlines()]
    assert "-6 s -60 B -16 B 2 8x8 (data, -) (-, -) s.p.*.w" in lines
    assert "-3.62 s +16 B in all" in lines


def test_what_no_item_accounts_for_is_named(plan):
    e = plan.estimate
    found = diff(plan, dataclasses.replace(plan, estimate=dataclasses.replace(e, step_s=2 * e.step_s, peak_bytes=0.0)))
    assert found.rest_s == pytest.approx(e.step_s) and found.rest_bytes == -e.peak_bytes
    assert not found.is_empty and not found.layouts
    assert f"+{seconds(e.step_s)}" in next(l for l in str(found).splitlines() if "not accounted for" in l)


def test_a_plan_does_not_differ_from_itself(plans):
    for plan in plans:
        found = diff(plan, dataclasses.replace(plan, name="other"))
        assert found.is_empty and found.step_s == 0
        assert "cost the same" in str(found)


def test_the_parts_add_up_and_turn_around(plans):
    for a in plans:
        for b in plans:
            found, back = diff(a, b), diff(b, a)
            assert found.is_empty == (a is b)
            assert found.rest_s == 0 and found.rest_bytes == 0
            step_s = sum(c.comm_s for c in (*found.layouts, *found.communication))
            step_s += sum(c.compute_s for c in found.compute)
            assert step_s == pytest.approx(b.estimate.step_s - a.estimate.step_s, rel=1e-9, abs=1e-15)
            memory = sum(c.memory_bytes for c in (*found.layouts, *found.memory))
            assert memory == pytest.approx(b.estimate.peak_bytes - a.estimate.peak_bytes, rel=1e-9)
            turned = {(c.path, c.after, c.before): (-c.comm_s, -c.memory_bytes) for c in back.layouts}
            straight = {(c.path, c.before, c.after): (c.comm_s, c.memory_bytes) for c in found.layouts}
            assert straight.keys() == turned.keys()
            for key, figures in straight.items():
                assert figures == pytest.approx(turned[key], rel=1e-9)


def test_layouts_are_compared_by_what_devices_hold(plan):
    """On (4, 2), both axes on one dimension are what the one axis of (8,) is there; a single one is not."""
    both, one = ("data", "tensor"), ("data",)
    names = ["s.both", "s.data"]
    two_axes = hand_made(plan, [tensor(names[0], both), tensor(names[1], one)], estimate((), (), ()))
    one_axis = dataclasses.replace(two_axes, axes=(("x", 8),), arguments=tuple(tensor(n, ("x",)) for n in names))
    (change,) = diff(two_axes, one_axis).layouts
    assert (change.path, change.before, change.after) == ("s.data", "(data=4)", "(x=8)")
    renamed = dataclasses.replace(
        two_axes, axes=(("a", 4), ("b", 2)), arguments=(tensor(names[0], ("a", "b")), tensor(names[1], ("a",)))
    )
    assert diff(two_axes, renamed).layouts == ()


def test_other_programs(plan, train, shapes, cluster):
    wider = autoshard.plan(train, *shapes(128), cluster=cluster, mesh=plan.mesh_axes, donate_argnums=0)
    found = diff(plan, wider)
    assert not found.is_same_program and found.inside is None
    rows = {(c.path, c.shape, c.before is None) for c in found.layouts}
    assert {("state.params.up.kernel", (32, 64), False), ("state.params.up.kernel", (32, 128), True)} <= rows
    assert "different programs" in str(found)


def test_paths_that_differ_in_one_component_join():
    paths = {"o.mu.up.w": ["1"], "o.nu.up.w": ["2"], "o.mu.down.w": ["3"], "o.nu.down.w": ["4"], "step": ["5"]}
    assert fold_paths(paths) == {"o.{mu,nu}.{up,down}.w": ("1", "3", "2", "4"), "step": ("5",)}
    ragged = {"o.mu.up.w": ["1"], "o.nu.down.w": ["2"], "w": ["3"]}
    assert fold_paths(ragged) == {path: tuple(members) for path, members in ragged.items()}
    assert fold_paths({}) == {}


def test_signs():
    assert [signed(x, seconds) for x in (0.0, 2.0, -3e-3)] == ["0", "+2 s", "-3 ms"]


def test_the_command(plans, tmp_path):
    for name, plan in zip(("a", "b"), plans, strict=False):
        plan.save(tmp_path / name)
    result = CliRunner().invoke(
        app, ["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(tmp_path / "c.json")]
    )
    assert result.exit_code == 0, result.output
    assert "What the differences are made of" in result.stdout
    document, found = json.loads((tmp_path / "c.json").read_text()), diff(*plans[:2])
    assert document["step_s"] == found.step_s and document["a"]["name"] == "autoshard"
    assert [row["path"] for row in document["layouts"]] == [c.path for c in found.layouts]


def test_orders_that_only_one_plan_has_are_counted_by_tensor_and_line(plans):
    plan = plans[0]
    order = lambda layer: Order(OrderKind.DELAYED, f"0.params.{layer}.kernel", (8, 8), 1e3, "m.py:3", 0)
    both = Order(OrderKind.WAITS, "operand of dot_general", (8, 8), 1e3, "m.py:4", 1)
    a, b = (
        dataclasses.replace(plan, orders=orders) for orders in ((both, order(0)), (order(0), order(1), order(2), both))
    )
    found = diff(a, b)
    (change,) = found.orders
    assert change == OrderChange(OrderKind.DELAYED.value, "*.params.*.kernel", "m.py:3", 1, 3)
    assert not found.is_empty and found.inside == 0 and OrderKind.DELAYED.value in str(found)
    assert diff(a, a).is_empty and diff(b, b).orders == ()

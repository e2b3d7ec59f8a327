"""Plans whose devices were put in order: faster than as listed, the same for a cluster by any name, kept, told, and
run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.cluster import Cluster, DeviceType, Link, NodeGroup, PairSpeeds, Tier, Torus
from autoshard.compiler.schedule import Schedule
from autoshard.hlo.collectives import compiled_collectives
from autoshard.hlo.module import parse
from autoshard.placement.level_bytes import level_bytes
from autoshard.planner.decode import evaluate
from autoshard.planner.timeline import asked_for
from autoshard.plans import pricing, search
from autoshard.plans.found import LEFT, NOT_FASTER, PASSED_BY
from autoshard.plans.make import pose, traced_program
from autoshard.plans.placing import flows_of, orders_of
from autoshard.plans.starts import same_choices
from autoshard.verify.level_traffic import level_traffic

CHIP = DeviceType("Chip", {"float32": 1e12}, 32e9, 1e12, 1e-8, "example")
INTRA = Link(1e-8, 100e9, 0, "example")
INTER = Link(1e-8, 20e9, 1, "example")
SPINE = Link(1e-8, 1e9, 2, "example")
OPTIONS = autoshard.PlanOptions(cache=False, memory_reserve=0.0)
MESH = {"data": 2, "tensor": 4}
BATCH, WIDTH = 512, 256


def spines(*part_of_node):
    group = NodeGroup("group", CHIP, 4, 2, INTRA, INTER, tiers=(Tier("spine", part_of_node, SPINE),))
    return Cluster("two spines", (group,))


def pair_cluster():
    """Single devices: 0, 3, 5, 6 reach each other fast, and so do the others."""
    near = {0, 3, 5, 6}
    rates = tuple(tuple(50e9 if (i in near) == (j in near) else 1e9 for j in range(8)) for i in range(8))
    pairs = PairSpeeds(rates, ((1e-8,) * 8,) * 8, "example")
    return Cluster("pairs", (NodeGroup("group", CHIP, 8, 1, INTRA, INTER, pairs=pairs),))


def torus():
    return Cluster("torus", (NodeGroup("chips", CHIP, 1, 8, INTRA, torus=Torus((2, 4), (True, True))),))


def init(seed):
    up, down = jax.random.split(jax.random.key(seed))
    return {
        "up": jax.random.normal(up, (WIDTH, 4 * WIDTH)) / 8,
        "down": jax.random.normal(down, (4 * WIDTH, WIDTH)) / 16,
    }


def step(params, x):
    def loss(p):
        return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def planned(cluster, mesh=MESH, device_order="sought"):
    options = autoshard.PlanOptions(cache=False, memory_reserve=0.0, device_order=device_order)
    shapes = jax.eval_shape(init, 0), jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    return autoshard.plan(step, *shapes, cluster=cluster, mesh=mesh, donate_argnums=0, options=options)


@pytest.mark.parametrize(("part_of_node", "share"), [((0, 1, 0, 1), 1.005), ((1, 0, 0, 1), 0.8)])
def test_nodes_listed_in_turn_cost_what_sorted_ones_do(part_of_node, share):
    """In the first case the axes only change their roles; in the second, as listed, both of them cross the spine."""
    best, found = planned(spines(0, 0, 1, 1)), planned(spines(*part_of_node))
    listed = planned(spines(*part_of_node), device_order="listed")
    assert found.estimate.step_s == pytest.approx(best.estimate.step_s, rel=1e-3)
    assert found.estimate.step_s < share * listed.estimate.step_s
    assert listed.logical_mesh.order == () and listed.placement is None
    groups = np.array(found.logical_mesh.order).reshape(2, 4) // 2
    assert {frozenset(np.array(part_of_node)[group].tolist()) for group in groups} == {frozenset({0}), frozenset({1})}
    assert found.placement.comm_s <= found.placement.listed_s


def test_all_meshes_are_searched_with_their_best_orders():
    found, listed = planned(pair_cluster(), mesh=None), planned(pair_cluster(), mesh=None, device_order="listed")
    assert found.estimate.step_s <= listed.estimate.step_s * (1 + OPTIONS.relative_gap)
    assert len({c.hardware for c in found.candidates}) == len(found.candidates)


def test_a_plan_in_order_comes_back_as_it_was(tmp_path):
    plan = planned(spines(0, 1, 1, 0))
    plan.save(tmp_path / "plan.json")
    again = autoshard.load(tmp_path / "plan.json")
    assert again == plan and again.logical_mesh.order == plan.logical_mesh.order != ()


def test_explain_and_diff_tell_the_order():
    plan, listed = planned(spines(0, 1, 1, 0)), planned(spines(0, 1, 1, 0), device_order="listed")
    text = " ".join(plan.explain(full=True).split())
    assert "devices in an order of their own: collectives take" in text and "as listed (-" in text
    assert "What each device sends over each level of the hardware" in text
    assert " ".join(map(str, plan.logical_mesh.order[:4])) in text
    told = str(autoshard.diff(listed, plan))
    assert "in turn" in told and "0 1 6 7" in told
    assert autoshard.diff(plan, plan).is_empty and not autoshard.diff(listed, plan).is_empty


@pytest.mark.parametrize("cluster", [spines(0, 1, 1, 0), spines(0, 1, 0, 0), pair_cluster(), torus()], ids=str)
def test_the_step_runs_in_the_order_and_equals_that_of_one_device(cluster):
    plan = planned(cluster)
    assert plan.estimate.communication
    devices = jax.devices()[:8]
    run = plan.jit(step, devices=devices)
    batch = jax.random.normal(jax.random.key(7), (BATCH, WIDTH))
    placed = jax.device_put(
        init(0), jax.tree.map(lambda s: jax.sharding.NamedSharding(plan.mesh(devices), s), plan.in_specs[0])
    )
    numbers = [devices.index(d) for d in plan.mesh(devices).devices.flat]
    assert tuple(numbers) == plan.logical_mesh.device_numbers
    after, loss = run(placed, batch)
    expected, wanted = jax.jit(step)(init(0), batch)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    for name in after:
        np.testing.assert_allclose(after[name], expected[name], rtol=1e-4, atol=1e-5)
        assert [devices.index(d) for d in after[name].sharding.mesh.devices.flat] == numbers


@pytest.mark.parametrize("cluster", [spines(0, 1, 1, 0), spines(0, 1, 0, 0), pair_cluster()], ids=str)
def test_bytes_over_each_level_are_those_of_the_compiled_program(cluster):
    """Groups of the compiled program, mapped to devices by the plan's order, and to levels by the cluster."""
    plan = planned(cluster)
    assert plan.estimate.communication
    compiled = (
        plan.jit(step, devices=jax.devices()[:8])
        .lower(jax.eval_shape(init, 0), jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))
        .compile()
    )
    assigned = [device.id for device in compiled.runtime_executable().local_devices()]
    assert assigned == [jax.devices()[n].id for n in plan.logical_mesh.device_numbers]
    collectives = compiled_collectives(parse(compiled.as_text()), plan.axes)
    (hardware,) = cluster.slices()
    found = level_traffic(collectives, plan.logical_mesh, hardware)
    wanted = level_bytes(flows_of(plan.estimate.communication, plan.logical_mesh), plan.logical_mesh.axes)
    assert [level.level for level in found] == [level.level for level in wanted]
    for own, ours in zip(found, wanted, strict=True):
        assert own.sent_bytes == pytest.approx(ours.sent_bytes, rel=0.05)


def pairs_of_gpus():
    """As `pair_cluster`, of devices whose compiler hides collectives: a product's workspace is what tells a GPU."""
    group = pair_cluster().groups[0]
    return Cluster(
        "pairs",
        (dataclasses.replace(group, device_type=dataclasses.replace(CHIP, product_workspace_bytes=1024)),),
    )


@pytest.mark.parametrize("is_wrong", [False, True], ids=["the other order is faster", "it is not"])
def test_a_mesh_is_left_for_another_order_and_searched_to_the_end_if_need_be(monkeypatch, is_wrong):
    """After its first plan already, however poor: what comes out is no slower, and its bound is that of all orders.
    Where no other order is faster, it is as if none had been left.
    """
    cluster = pairs_of_gpus()
    whole = planned(cluster)
    monkeypatch.setattr(pricing, "_KNOWN", ((0, 1.0),))
    if is_wrong:
        monkeypatch.setattr(search, "_has_better_order", lambda *_: True)
        monkeypatch.setattr(search, "better_order", lambda *_: None)
        whole = planned(cluster)
    begun, searched = [], search.search_meshes

    def told(question, *args, **named):
        begun.append((named.get("after"), question.to_beat_s))
        return searched(question, *args, **named)

    monkeypatch.setattr(search, "search_meshes", told)
    found = planned(cluster)
    assert all(after for after, _ in begun[1:]), "what was found before is where a later search begins"
    if not is_wrong:
        before, to_beat_s = begun[1]
        assert to_beat_s == before.cost_s, "another order has to be faster"
    verdicts = {c.verdict for c in found.candidates}
    assert bool(verdicts & {LEFT, NOT_FASTER}) == (not is_wrong)
    assert found.certificate.bound <= found.estimate.step_s * (1 + 1e-9)
    assert found.certificate.bound <= min(c.bound_s for c in found.candidates) * (1 + 1e-9)
    assert found.estimate.step_s == pytest.approx(min(c.step_s for c in found.candidates if c.step_s), rel=1e-6)
    if is_wrong:
        assert found.estimate.step_s == pytest.approx(whole.estimate.step_s, rel=OPTIONS.relative_gap)
        assert found.certificate.gap <= max(OPTIONS.relative_gap, whole.certificate.gap + 1e-6)


def nodes_of_gpus(nodes, each, inter_bytes_per_s):
    """Even nodes, of devices whose compiler hides collectives."""
    device = dataclasses.replace(CHIP, product_workspace_bytes=1024)
    inter = dataclasses.replace(INTER, bandwidth_bytes_per_s=inter_bytes_per_s)
    return Cluster("nodes", (NodeGroup("group", device, nodes, each, INTRA, inter),))


def residual_mlp(layers, width, batch):
    """Its step and the shapes of its arguments."""

    def step(params, x):
        def loss(p):
            y = x
            for up, down in p:
                y = y + jnp.tanh(y @ up) @ down
            return jnp.mean(y**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    return step, [(shape(width, 4 * width), shape(4 * width, width))] * layers, shape(batch, width)


CASES = [  # nodes, devices of each, bytes between nodes, layers, width, batch, mesh, what at least is gained
    (4, 8, 2e9, 1, 128, 512, {"data": 4, "tensor": 8}, 0.1),
    (8, 4, 10e9, 1, 64, 256, {"data": 8, "tensor": 4}, 0.2),
    (4, 8, 30e9, 2, 256, 1024, {"data": 2, "tensor": 16}, 0.0),
    (4, 8, 10e9, 1, 128, 512, {"data": 16, "tensor": 2}, 0.05),
    (2, 8, 10e9, 1, 1024, 128, {"data": 2, "tensor": 8}, 0.0),
    (8, 4, 10e9, 2, 1024, 2048, {"data": 8, "tensor": 4}, 0.0),
]


OFTEN = CASES[1], CASES[2], CASES[5]
"""In every run one with a better order and two without."""


@pytest.mark.parametrize(
    "case", [*OFTEN, *(pytest.param(c, marks=pytest.mark.exhaustive) for c in CASES if c not in OFTEN)], ids=str
)
def test_orders_close_to_that_of_a_plan_are_searched(monkeypatch, case):
    """From the first order, without being told a better one: no plan is slower than on the first order alone, and what
    can be gained is found. The bound is one of all orders but those that were passed by."""
    nodes, each, rate, *sizes, mesh, gain = case
    model, cluster = residual_mlp(*sizes), nodes_of_gpus(nodes, each, rate)
    monkeypatch.setattr(search, "_has_better_order", lambda *_: False)
    monkeypatch.setattr(search, "better_order", lambda *_: None)
    plan_it = lambda: autoshard.plan(*model, cluster=cluster, mesh=mesh, donate_argnums=0, options=OPTIONS)
    found = plan_it()
    monkeypatch.setattr(search, "close_orders", lambda *_: [])
    alone = plan_it()
    assert found.estimate.step_s <= alone.estimate.step_s * (1 - gain)
    assert len({c.hardware for c in found.candidates}) == len(found.candidates)
    proven = [c.bound_s for c in found.candidates if c.verdict != PASSED_BY]
    assert found.certificate.bound <= min(proven) * (1 + 1e-9)
    if gain:
        assert found.logical_mesh.axes != alone.logical_mesh.axes
    else:
        assert found.certificate.gap <= max(OPTIONS.relative_gap, alone.certificate.gap) + 1e-9


def test_a_step_in_another_order_is_what_the_plan_takes_there():
    """But for tensors that are moved in other steps there."""
    cluster, mesh = nodes_of_gpus(4, 4, 10e9), {"data": 4, "tensor": 4}
    model, *arguments = residual_mlp(2, 128, 512)
    program = traced_program(model, arguments, (0,), OPTIONS, 0.0)
    posed = pose(*program, cluster, mesh=mesh, donate_argnums=(0,), options=OPTIONS)
    question = dataclasses.replace(posed.question, schedule=Schedule.LATENCY_HIDING)
    formulation = question.formulation(posed.meshes[0])
    generator = np.random.default_rng(0)
    for _ in range(5):
        choices = [int(generator.integers(len(node.costs))) for node in formulation.problem.nodes]
        evaluation = evaluate(formulation, choices)
        times = asked_for(formulation, choices)
        assert times.step_with([c.time_s for c in times.communication]) == pytest.approx(times.step_s)
        orders = orders_of(posed.question.hardware, evaluation)
        assert len(orders) == 2 and orders[0][0] <= orders[1][0]
        for step_s, other in orders:
            there = question.formulation(other)
            same = same_choices(there, formulation, choices)
            if same is not None:
                assert step_s == pytest.approx(evaluate(there, same).times.step_s, rel=0.03)

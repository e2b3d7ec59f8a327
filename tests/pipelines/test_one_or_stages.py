"""A step on one kind of device is planned as one program and in stages, if asked for; the faster plan is taken."""

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard import Plan, PlanOptions, StagedPlan, StageOptions, TrainStep
from autoshard.errors import ConfigError, MemoryBudgetError, StageError
from autoshard.pipelines.search.search import search
from autoshard.report.considered_view import considered_in_stages, considered_parts
from autoshard.report.parts import Table

from .case import chain, cluster, plain_table

ONE_NODE = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "cpux8.yaml"
PAIR = """\
format: autoshard-cluster
version: 1
name: pair
groups:
  - {name: cpus, device_type: CPU-generic, num_nodes: 1, devices_per_node: 2, intra_node: Shared-memory}
"""
FOUR_NODES = """\
format: autoshard-cluster
version: 1
name: apart
groups:
  - {name: cpus, device_type: CPU-generic, num_nodes: 4, devices_per_node: 2, intra_node: Shared-memory,
     inter_node: Ethernet-10G}
"""
"""The eight CPU devices of the tests, as nodes that are badly joined."""
BOTH = PlanOptions(pipelines="search")
FEW = StageOptions(micro_batch_sizes=(16,), most_candidates=4)


def squares(params, batch):
    x = batch["x"]
    for w in params:
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return (x - batch["y"]) ** 2


def loss_fn(params, batch, rng):
    return jnp.mean(squares(params, batch)), {}


STEP = TrainStep(loss_fn, optax.adam(1e-3, eps=1e-4))  # with a smaller eps the first step magnifies rounding


def init(width, hidden, num_layers, seed=0):
    keys = jax.random.split(jax.random.key(seed), num_layers)
    draw = jax.random.normal
    return STEP.init([{"up": draw(k, (width, hidden)) / 12, "down": draw(k, (hidden, width)) / 24} for k in keys])


def shapes(width, hidden, batch, num_layers=4):
    state = jax.eval_shape(lambda: init(width, hidden, num_layers))
    return state, {k: jax.ShapeDtypeStruct((batch, width), jnp.float32) for k in "xy"}


WINS, LOSES = shapes(128, 512, 64), shapes(256, 1024, 128)
"""Where pipelines gain, and where the products are large enough to hide what one program sends."""


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    path = tmp_path_factory.mktemp("cluster") / "apart.yaml"
    path.write_text(FOUR_NODES)
    return path


@pytest.fixture(scope="module")
def alone(apart) -> Plan:
    """One program where stages gain, as it is planned by default."""
    plan = autoshard.plan(STEP, *WINS, cluster=apart, donate_argnums=0)
    assert isinstance(plan, Plan)
    return plan


@pytest.fixture(scope="module")
def staged(apart) -> StagedPlan:
    plan = autoshard.plan(STEP, *WINS, cluster=apart, donate_argnums=0, options=BOTH, stages=FEW)
    assert isinstance(plan, StagedPlan)
    return plan


@pytest.fixture(scope="module")
def whole(apart) -> Plan:
    """One program where stages do not gain."""
    plan = autoshard.plan(STEP, *LOSES, cluster=apart, donate_argnums=0, options=BOTH, stages=FEW)
    assert isinstance(plan, Plan)
    return plan


def test_stages_are_taken_where_they_are_faster(alone, staged):
    assert staged.step_s < alone.estimate.step_s * (1 - BOTH.relative_gap)
    told = staged.considered[-1]
    assert told.description.startswith("one program") and told.step_s == alone.estimate.step_s
    assert staged.certificate.bound_s <= alone.certificate.bound
    gap = (staged.certificate.searched_s - staged.certificate.bound_s) / staged.certificate.searched_s
    assert staged.certificate.gap == gap
    assert "one program, planned as a whole" in staged.explain(full=True)
    (table,) = [part for part in considered_in_stages(staged) if isinstance(part, Table)]
    assert any(row[0] == told.description for row in table.rows)


def test_the_step_in_stages_is_the_step_of_one_device(staged):
    rng = np.random.default_rng(0)
    data = {k: rng.normal(size=(64, 128)).astype(np.float32) for k in "xy"}
    expected, metrics = jax.jit(STEP)(init(128, 512, 4), data)
    run = staged.jit(STEP)
    run.prepare(*WINS)
    state = staged.init(lambda seed: init(128, 512, 4, seed), 0, run=run)
    found, found_metrics = run(state, data)
    close = lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=2e-6)
    jax.tree.map(close, (found.params, found.opt_state, found_metrics), (expected.params, expected.opt_state, metrics))


def test_one_program_is_taken_where_it_is_faster(whole, tmp_path):
    assert whole.choice is not None and whole.choice.variant.is_as_written
    own, stages = whole.choice.candidates
    assert own.step_s == whole.certificate.objective and stages.step_s is not None
    assert "stage" in stages.variant and stages.step_s > own.step_s * (1 - BOTH.relative_gap)
    c = whole.certificate
    assert c.bound == min(own.bound_s, stages.bound_s) and c.gap == (c.objective - c.bound) / c.objective
    assert "stages of" in whole.explain(full=True) and stages.verdict in whole.explain(full=True)
    tables = [part for part in considered_parts(whole, "program") if isinstance(part, Table)]
    assert any(row[0] == stages.variant for table in tables for row in table.rows)
    whole.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == whole


def test_by_default_stages_are_pointed_out(apart, whole):
    """What is waited for between nodes, by hand: axis `data` joins two nodes with two others, `tensor` all of two."""
    plan = autoshard.plan(STEP, *LOSES, cluster=apart, donate_argnums=0)
    assert plan.axes == (("data", 2), ("tensor", 4)) and plan.choice is None
    waits_s = sum(c.exposed_s for c in plan.estimate.collectives)
    assert waits_s > 0.1 * plan.estimate.step_s
    assert any(w.startswith(f"{waits_s / plan.estimate.step_s:.0%} of the step waits") for w in plan.warnings)
    never = autoshard.plan(STEP, *LOSES, cluster=apart, donate_argnums=0, options=PlanOptions(pipelines="never"))
    inside = autoshard.plan(STEP, *LOSES, cluster=ONE_NODE, donate_argnums=0)
    assert not any("of the step waits" in w for one in (never, inside, whole) for w in one.warnings)
    assert never.estimate == plan.estimate == whole.estimate


def test_one_stage_on_all_devices_costs_what_one_program_does():
    """The times of both are comparable: forward, backward and update of one stage add up to the step of one program."""
    width, hidden, batch = 256, 1024, 4096
    args, limit = shapes(width, hidden, batch), math.inf
    one = autoshard.plan(STEP, *args, cluster=ONE_NODE, mesh={"data": 8}, donate_argnums=0, memory_budget_bytes=limit)
    stages = StageOptions(num_stages=1, num_pipelines=1, num_micro_batches=1, micro_batch_sizes=(batch,))
    in_one = autoshard.plan(STEP, *args, cluster=ONE_NODE, donate_argnums=0, memory_budget_bytes=limit, stages=stages)
    assert in_one.meshes[0][0].axes == one.axes
    assert in_one.step_s == pytest.approx(one.estimate.step_s, rel=0.01)
    assert in_one.certificate.searched_s == pytest.approx(one.estimate.step_s, rel=0.01)


WIDTH, HIDDEN, LAYERS = 37, 149, 6
"""Primes: no axis splits the weights of such layers, so that one program holds them all on each device."""


def test_stages_are_tried_before_an_error_where_nothing_fits(tmp_path):
    (tmp_path / "pair.yaml").write_text(PAIR)
    args = shapes(WIDTH, HIDDEN, 4, LAYERS)
    held_bytes = 4 * 4 * 2 * WIDTH * HIDDEN * LAYERS  # weights, gradients and two moments, in float32
    request = {"cluster": tmp_path / "pair.yaml", "donate_argnums": 0, "memory_budget_bytes": 0.9 * held_bytes}
    plan = autoshard.plan(STEP, *args, options=PlanOptions(least_memory_s=0.0), **request)
    assert isinstance(plan, StagedPlan) and any("no plan of one program" in w for w in plan.warnings)
    assert any(c.description == "one program" and c.step_s is None for c in plan.considered)
    peak_bytes = max(s.peak_bytes for s in plan.timeline.submeshes)
    assert peak_bytes <= request["memory_budget_bytes"]
    with pytest.raises(MemoryBudgetError):
        autoshard.plan(STEP, *args, options=PlanOptions(least_memory_s=0.0, pipelines="never"), **request)

    def weighted(params, batch, rng):  # no plain mean over examples: micro-batches would be another step
        return jnp.sum(squares(params, batch)) / jnp.sum(batch["y"]), {}

    with pytest.raises(MemoryBudgetError, match=r"^No plan"):
        autoshard.plan(TrainStep(weighted, STEP.optimizer), *args, options=PlanOptions(least_memory_s=0.0), **request)
    halves = TrainStep(weighted, STEP.optimizer, parts=(2, 2))  # but not to a step that says them
    kept = autoshard.plan(halves, *args, options=PlanOptions(least_memory_s=0.0), **request)
    assert kept.parts == (2, 2) and any("It is the same step" in w for w in kept.warnings)
    request["memory_budget_bytes"] = 0.01 * held_bytes
    for pipelines in (None, "search"):
        with pytest.raises(
            MemoryBudgetError, match="neither in stages nor of one program. In stages: .* one program: No"
        ):
            autoshard.plan(STEP, *args, options=PlanOptions(least_memory_s=0.0, pipelines=pipelines), **request)


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({}, {"mesh": {"data": 8}}, "received mesh="),
        ({}, {"pins": {"batch.*": jax.sharding.PartitionSpec("data")}}, "received pins="),
        ({}, {"solution": "solution.json"}, "received solution="),
        ({"compile_check": True}, {}, "plan.check"),
        ({"adaptive": True}, {}, "stragglers.mode"),
        ({"offload": "state"}, {}, "plan.offload"),
        ({"pipelines": "never"}, {"stages": FEW}, "exclude each other"),
        ({"pipelines": "always"}, {}, '"never" or "search"'),
    ],
)
def test_what_cannot_be_combined_is_refused(options, more, message):
    with pytest.raises(ConfigError, match=message):
        autoshard.plan(STEP, *WINS, cluster=ONE_NODE, options=PlanOptions(**{"pipelines": "search", **options}), **more)


def test_only_a_training_step_is_cut():
    with pytest.raises(ConfigError, match="only a TrainStep"):
        autoshard.plan(lambda x: x + 1, jnp.ones(8), cluster=ONE_NODE, options=BOTH)
    with pytest.raises(ConfigError, match="plan.pipelines"):
        autoshard.compare(STEP, *WINS, cluster=ONE_NODE, options=BOTH)


def test_a_search_with_something_to_beat_ends_early_and_stays_right():
    """It finds what can win, and its bound holds for all arrangements that take less than what is to be beaten."""
    devices = cluster(8)
    layers, table = chain((0, 1, 0, 1), 1e6), plain_table(devices, 2, (1, 2, 4), (1, 2, 4), weight=1e8, residual=1e7)
    free = search(layers, table, devices, 16)
    slower = search(layers, table, devices, 16, to_beat_s=2 * free.step_s)
    assert slower.step_s == free.step_s and slower.bound_s == pytest.approx(free.bound_s)
    beaten = search(layers, table, devices, 16, to_beat_s=0.5 * free.bound_s)
    assert beaten.bound_s == 0.5 * free.bound_s and beaten.step_s >= free.step_s
    assert beaten.arrangement.batch_size == 16


def test_a_stage_is_planned_in_the_order_in_which_its_phases_are_compiled(tmp_path):
    """On GPUs too, where a plan of one program hides collectives; in a stage times add up, so that none may count as
    hidden."""
    (tmp_path / "gpus.yaml").write_text(
        "format: autoshard-cluster\nversion: 1\nname: gpus\ngroups:\n"
        "  - {name: new, device_type: H100-SXM, num_nodes: 1, devices_per_node: 2, intra_node: NVLink4}\n"
    )
    args = shapes(128, 512, 64)
    request = {"cluster": tmp_path / "gpus.yaml", "donate_argnums": 0}
    stages = StageOptions(num_stages=1, micro_batch_sizes=(64,), schedules=("gpipe",))
    options = PlanOptions(cache=False)
    plan = autoshard.plan(STEP, *args, options=options, stages=stages, **request)
    one = autoshard.plan(STEP, *args, options=options, mesh={"data": 2}, **request)
    assert one.schedule is autoshard.Schedule.LATENCY_HIDING
    assert {program.schedule for program in plan.programs} == {autoshard.Schedule.LEAST_MEMORY}
    with pytest.raises(StageError, match=r"options\.schedule .* least memory"):
        autoshard.plan(STEP, *args, options=PlanOptions(schedule=one.schedule), stages=stages, **request)

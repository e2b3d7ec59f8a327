"""Plans that can even out a slow device: what they gain, what memory they take, and when they are chosen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import Balance, PlanOptions
from autoshard.cluster import Cluster, DeviceType, Link, NodeGroup
from autoshard.plans.slack import Slack

LINK = Link(1e-9, 1e12, 0, "made up for this test")
CLUSTER = Cluster(
    "slow", (NodeGroup("slow", DeviceType("slow", {"float32": 1e9}, 10**9, 1e12, 0.0, "made up"), 1, 4, LINK),)
)
"""Arithmetic is slow and links are fast, so that plans of all kinds take about the same time."""


def step(params, x):
    loss = lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2)
    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def planned(**settings):
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    params = {"up": shape(64, 512), "down": shape(512, 64)}
    options = PlanOptions(adaptive=settings.pop("adaptive", True), cache=False)
    return autoshard.plan(step, params, shape(64, 64), cluster=CLUSTER, donate_argnums=0, options=options, **settings)


@pytest.mark.parametrize("slowdown", [1.0, 1.3, 2.0, 5.0, 40.0])
@pytest.mark.parametrize("free", [0.05, 0.3, 2.0])
def test_the_step_is_the_best_division(slowdown, free):
    """Against every division of what can move, by hundredths of a percent."""
    slack = Slack("tensor", 4, 1.0, 0.8, 0.1, free, 0.0)
    each = np.linspace(0, min(free, 1 / 3), 10_001)
    ends = np.maximum(1 + each * 0.8, slowdown * (1 - 3 * each * 0.8))
    assert slack.step_s(slowdown) == pytest.approx(ends.min() + 0.1, rel=1e-4)
    most = min(free, 1 / 3)  # of an even share, on each of the three others
    assert slack.step_s(slack.absorbed) == pytest.approx(1 + most * 0.8 + 0.1)
    assert slack.step_s(slack.absorbed * 1.1) > slack.step_s(slack.absorbed) * 1.05


def test_an_adaptive_plan_has_a_tensor_axis_and_says_what_it_absorbs():
    plain, adaptive = planned(adaptive=False), planned()
    assert plain.slack is None
    slack = adaptive.slack
    assert slack is not None and slack.ranks == 4 and slack.movable_s / slack.compute_s > 0.9
    assert adaptive.estimate.step_s < 1.1 * plain.estimate.step_s
    assert "slack" in str(adaptive) and "can move along" in str(adaptive)
    rooms = adaptive.jit(step, devices=jax.devices()[:4], balance=Balance(mode="migrate", sizes="switch")).balance.rooms
    assert [room.unit.size for room in rooms] == [512]
    assert slack.free == pytest.approx(rooms[0].capacity * 4 / 512 - 1)


def test_places_count_as_memory():
    """With just the memory that the plan needs without its places, another one is taken, or none with places."""
    free = planned()
    assert free.slack is not None and free.slack.places_bytes > 0
    tight = planned(memory_budget_bytes=free.estimate.peak_bytes + 0.5 * free.slack.places_bytes)
    assert tight.budget_bytes is not None
    needed = tight.estimate.peak_bytes + (tight.slack.places_bytes if tight.slack else 0)
    assert needed <= tight.budget_bytes


def test_slack_is_kept_in_files(tmp_path):
    plan = planned(mesh={"tensor": 4})
    plan.save(tmp_path / "plan.json")
    assert autoshard.Plan.load(tmp_path / "plan.json").slack == plan.slack
    assert dataclasses.replace(plan, slack=None).explain() != plan.explain()

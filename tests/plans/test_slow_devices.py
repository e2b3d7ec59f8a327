"""What a plan would make of slow devices: the published formula, limits, and refusals."""

import jax
import jax.numpy as jnp
import optax
import pytest

import autoshard
from autoshard.balance.control import Prices, decide
from autoshard.balance.options import Balance
from autoshard.balance.places import Room, even_placing
from autoshard.balance.units import UnitDimension
from autoshard.errors import ConfigError
from autoshard.plans.apply import argument_shapes, check
from autoshard.plans.slow_devices import Forecasts, batch_forecasts, forecasts, parse_slow

RANKS = 8


@pytest.mark.parametrize(
    ("r", "gamma", "gain"), [(0.5, 0.5, 1.80), (0.6, 0.5, 1.86), (0.8, 0.5, 1.95), (0.6, 0.875, 5.2)]
)
def test_resizing_gains_what_the_published_model_tells(r, gamma, gain):
    """A step of 1 s with the part r in products, 8 times slower on one rank: (1 - r + 8 r) / (1 - r + max(1, 8 (1 -
    gamma)) r)."""
    room = Room(UnitDimension(0, "up", "tensor", RANKS, 1600, (), 1.0, 1.0, 1, ()), 200, tuple(range(201)))
    prices = Prices(r / 200, most_dropped=gamma, may_move=False)
    found = decide(even_placing(room), (8.0, *(1.0,) * (RANKS - 1)), room, prices)
    assert (1 - r + 8 * r) / (1 - r + found.step_s) == pytest.approx(gain, abs=0.01)


@pytest.fixture(scope="module")
def planned():
    """Two layers over a tensor axis, and the trace."""

    def step(params, x):
        def loss(p):
            return jnp.mean(jnp.square(jnp.tanh(x @ p["up"]) @ p["down"]))

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    params = {"up": shape(64, 2048), "down": shape(2048, 64)}
    cluster = "configs/clusters/v100x8.yaml"
    plan = autoshard.baselines.megatron(step, params, shape(65536, 64), cluster=cluster, mesh={"tensor": RANKS})
    assert isinstance(plan, autoshard.Plan)
    return plan, check(plan, step, argument_shapes(plan)).graph


def told(planned, slow: dict[int, float]) -> Forecasts:
    plan, graph = planned
    return forecasts(plan, graph, slow, Balance(absorbs=8.0, most_buckets=32, tile=8), "gpu")


def test_modes_lie_between_doing_nothing_and_the_ideal(planned):
    found = told(planned, {3: 4.0})
    steps = {f.mode: f.step_s for f in found.modes}
    assert found.healthy_s < found.ideal_s * (1 + 1e-9) <= steps["migrate"] < steps["resize"] < steps["off"]
    assert found.healthy_s == pytest.approx(planned[0].estimate.step_s)
    assert steps["off"] == pytest.approx(found.healthy_s + 3 * planned[0].estimate.compute_s)
    by_mode = {f.mode: f for f in found.modes}
    assert by_mode["migrate"].dropped == 0 == by_mode["resize"].moved
    assert by_mode["migrate"].moved_bytes == by_mode["migrate"].moved * 2 * 64 * 4
    assert "device 3 4 times slower" in str(found) and "migrate" in str(found)


def test_a_device_as_fast_as_the_others_changes_nothing(planned):
    found = told(planned, {3: 1.0})
    assert [f.step_s for f in found.modes] == [pytest.approx(found.healthy_s)] * 4


def test_what_cannot_be_told_is_refused(planned):
    with pytest.raises(ConfigError, match="numbers from 0 to 7"):
        told(planned, {8: 2.0})
    with pytest.raises(ConfigError, match="at least 1"):
        told(planned, {1: 0.5})
    with pytest.raises(ConfigError, match="3:2.0"):
        parse_slow(["3=2"])
    assert parse_slow(["0:8,1:6", "7:1.5"]) == {0: 8.0, 1: 6.0, 7: 1.5}


def test_a_plan_without_a_tensor_axis_is_refused_with_the_reason(planned):
    def step(x):
        return jnp.sum(x * 2)

    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    plan = autoshard.plan(step, x, cluster="configs/clusters/v100x8.yaml", mesh={"data": RANKS})
    assert isinstance(plan, autoshard.Plan)
    with pytest.raises(ConfigError, match="tensor axis"):
        forecasts(plan, check(plan, step, (x,)).graph, {0: 2.0}, Balance())


def test_replicas_that_share_a_batch_out():
    """Eight replicas with 32 parts; the one that is four times slower gives three of its four away."""
    loss_fn = lambda params, x, rng: (jnp.mean(jnp.tanh(x @ params) ** 2), {})
    step = autoshard.UnevenStep(autoshard.TrainStep(loss_fn, optax.sgd(0.1)), RANKS, 32)
    args = jax.eval_shape(step.step.init, jax.ShapeDtypeStruct((64, 64), jnp.float32)), jnp.ones((64, 64)), step.even
    plan = autoshard.plan(step, *args, options=autoshard.PlanOptions(while_trips=step.mean_parts))
    found = batch_forecasts(plan, check(plan, step, args).graph, step, {3: 4.0})
    off, migrate = found.modes
    compute_s, comm_s = plan.estimate.compute_s, plan.estimate.exposed_s
    assert found.healthy_s == pytest.approx(compute_s + comm_s)
    assert off.step_s == pytest.approx(4 * compute_s + comm_s), "the slow one runs its four parts"
    part_s = found.movable * compute_s / 4
    fixed_s = compute_s - 4 * part_s
    assert step.shares([1, 1, 1, 4, 1, 1, 1, 1]).tolist() == [5, 5, 5, 1, 4, 4, 4, 4]
    assert migrate.step_s == pytest.approx(max(fixed_s + 5 * part_s, 4 * (fixed_s + part_s)) + comm_s)
    assert (migrate.moved, migrate.of) == (3, 32) and found.ideal_s <= migrate.step_s
    with pytest.raises(ConfigError, match="received 8:2"):
        batch_forecasts(plan, check(plan, step, args).graph, step, {8: 2.0})

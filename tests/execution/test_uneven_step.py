"""Steps whose replicas run unequal numbers of parts: the same step, whoever runs what, and nothing is compiled anew."""

import dataclasses

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autoshard_models.loss_scaling import LossScaling

import autoshard
from autoshard.errors import MeshError, StageError

REPLICAS, PARTS, BATCH, WIDTH = 8, 24, 48, 16


def loss_fn(params, batch, rng):
    """Layers in a loop, with dropout, so that parts and their random numbers must stay together."""
    h = batch["x"] * jax.random.bernoulli(rng, 0.9, batch["x"].shape)
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["inner"])
    return jnp.mean((h @ params["out"] - batch["y"]) ** 2), {"mean": h.mean()}


STEP = autoshard.TrainStep(loss_fn, optax.sgd(0.1, momentum=0.9))


def start(seed):
    first, second = jax.random.split(jax.random.key(seed))
    params = {"inner": jax.random.normal(first, (2, WIDTH, WIDTH)) / 4, "out": jax.random.normal(second, (WIDTH, 8))}
    return STEP.init(params, jax.random.key(seed + 1))


def batch_of(seed):
    x, y = jax.random.split(jax.random.key(seed))
    return {"x": jax.random.normal(x, (BATCH, WIDTH)), "y": jax.random.normal(y, (BATCH, 8))}


def planned(pins=None):
    step = autoshard.UnevenStep(STEP, REPLICAS, PARTS)
    options = autoshard.PlanOptions(while_trips=step.mean_parts)
    args = jax.eval_shape(start, 0), jax.eval_shape(batch_of, 0), step.even
    return step, autoshard.plan(step, *args, donate_argnums=0, options=options, pins=pins)


@pytest.fixture(scope="module")
def whole():
    return planned()


def in_pieces():
    """Parameters and momentum in pieces between steps (ZeRO-3)."""
    axis = jax.sharding.PartitionSpec("data")
    return planned({"state.params.out": axis, "state.opt_state.*.trace.out": axis})


@pytest.mark.parametrize("layout", ["whole", "in pieces"])
def test_three_steps_are_those_of_one_device(layout, whole):
    step, plan = whole if layout == "whole" else in_pieces()
    run, alone = plan.jit(step), jax.jit(step.alone(BATCH))
    sharded, reference = plan.init(start, 0, run=run), start(0)
    rng = np.random.default_rng(0)
    for number in range(3):
        counts = np.asarray(rng.multinomial(PARTS, rng.dirichlet(np.ones(REPLICAS))), np.int32)
        assert number == 0 or min(counts) < max(counts)
        sharded, found = run(sharded, batch_of(number), counts)
        reference, expected = alone(reference, batch_of(number))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        (sharded.params, sharded.opt_state),
        (reference.params, reference.opt_state),
    )


def test_the_loss_may_be_scaled():
    scaled = dataclasses.replace(STEP, scaling=LossScaling())
    step = autoshard.UnevenStep(scaled, REPLICAS, PARTS)
    begin = lambda seed: scaled.init(start(seed).params, jax.random.key(seed + 1))
    plan = autoshard.plan(step, jax.eval_shape(begin, 0), jax.eval_shape(batch_of, 0), step.even)
    run = plan.jit(step)
    found = run(plan.init(begin, 0, run=run), batch_of(0), step.shares([1, 1, 1, 5, 1, 1, 1, 1]))
    expected = jax.jit(step.alone(BATCH))(begin(0), batch_of(0))
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(compare, (found[0].params, found[1]), (expected[0].params, expected[1]))


def test_a_replica_that_is_slowed_computes_the_same():
    step = autoshard.UnevenStep(STEP, REPLICAS, PARTS, can_be_slowed=True)
    args = jax.eval_shape(start, 0), jax.eval_shape(batch_of, 0), step.even, np.ones(REPLICAS, np.int32)
    plan = autoshard.plan(step, *args)
    run, alone = plan.jit(step), jax.jit(step.alone(BATCH))
    found = run(plan.init(start, 0, run=run), batch_of(0), step.even, np.asarray([1, 3, 1, 1, 2, 1, 1, 1], np.int32))
    expected = alone(start(0), batch_of(0))
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(compare, (found[0].params, found[1]), (expected[0].params, expected[1]))


def test_other_shares_compile_nothing(whole):
    step, plan = whole
    run, batch = plan.jit(step), batch_of(1)
    state, _ = run(plan.init(start, 0, run=run), batch, step.even)
    slow = [step.shares([8.0 if r == own else 1.0 for r in range(REPLICAS)]) for own in range(3)]
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for counts in slow:
            state, _ = run(state, batch, counts)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


def test_replicas_meet_only_behind_their_loops(whole):
    """One sum over replicas for each gradient and metric, once a step."""
    _, plan = whole
    assert {(c.kind, c.count) for c in plan.estimate.communication} <= {("all-reduce", 1), ("reduce-scatter", 1)}


@pytest.mark.parametrize(("counts", "used"), [((1,) * 8, 8), ((24,) * 8, 24), ((0, 3, 0, 0, 0, 0, 0, 0), 3)])
def test_parts_too_few_or_too_many_make_the_step_of_those_that_ran(whole, counts, used):
    step, plan = whole
    run = plan.jit(step)
    _, found = run(plan.init(start, 0, run=run), batch_of(0), np.asarray(counts, np.int32))
    state, batch, key = start(0), batch_of(0), STEP.key(start(0))
    part = lambda m: jax.tree.map(lambda x: x[2 * m : 2 * m + 2], batch)
    losses = [STEP.objective(state.params, {}, part(m), STEP.part_key(key, m, PARTS))[0] for m in range(used)]
    np.testing.assert_allclose(found["loss"], np.mean(losses), rtol=1e-5)


def test_what_cannot_be_shared_out_is_refused():
    with pytest.raises(StageError, match=r"received parts=\(24, 24\)"):
        autoshard.UnevenStep(STEP.in_parts((24, 24)), 8, 24)
    with pytest.raises(StageError, match=r"mutable state cannot pass .*mean"):
        uneven = autoshard.UnevenStep(STEP, 8, 24)
        autoshard.plan(uneven, start(0).replace(mutable={"mean": jnp.zeros(3)}), batch_of(0), uneven.even)
    with pytest.raises(StageError, match=r"received can_be_slowed=False"):
        autoshard.plan(uneven, start(0), batch_of(0), uneven.even, uneven.even)
    with pytest.raises(StageError, match=r"received num_parts=4"):
        autoshard.UnevenStep(STEP, 8, 4)
    step = autoshard.UnevenStep(STEP, 8, 20)
    with pytest.raises(StageError, match=r"num_parts=20 for a batch of 48"):
        autoshard.plan(step, start(0), batch_of(0), step.even)
    with pytest.raises(StageError, match=r"8 replicas; received the slowness of 2"):
        step.shares((1, 2))
    four = autoshard.UnevenStep(STEP, 4, 24)
    with pytest.raises(MeshError, match=r"'data': 4.* there are 8 devices"):
        autoshard.plan(four, start(0), batch_of(0), four.even)

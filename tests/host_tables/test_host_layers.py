"""Dense layers at the host: modes, workers, meshes, staleness, checkpoints, evaluations; what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bags import ROWS, assert_close, batches

import autoshard
from autoshard.errors import AutoshardError

LAYERS = ("project", "shift", "tower")
SYNC = autoshard.Execution("sync")


def loss_fn(params, batch, _):
    """A tower over bags of one table beside a row of another; a third table and the last layer are the devices'."""
    wide = jnp.take(params["wide"], batch["bags"], axis=0, mode="fill", fill_value=0).sum(1)
    joined = jnp.concatenate([wide, params["other"][batch["bags"][:, 0] % 5]], 1)
    narrow = jnp.tanh(jax.nn.relu(joined @ params["project"] + params["shift"]) @ params["tower"])
    vectors = narrow * params["bias"][batch["bags"][:, 1] % ROWS][:, None]
    return jnp.mean((vectors @ params["dense"] - batch["y"][:, None]) ** 2), None


def state_of(step):
    normal = lambda n, *shape: jax.random.normal(jax.random.key(n), shape)
    tables = {"wide": normal(0, ROWS, 12), "other": normal(1, 5, 4), "bias": normal(2, ROWS)}
    layers = {"project": normal(3, 16, 8) / 4, "shift": normal(4, 8), "tower": normal(5, 8, 3) / 3}
    return step.init(tables | layers | {"dense": normal(6, 3, 1)})


def of_layers(optimizer):
    """An optimizer of all that is no table; tables have Adagrad."""
    kinds = lambda params: {name: "rows" if name in ("wide", "other", "bias") else "dense" for name in params}
    return optax.multi_transform({"dense": optimizer, "rows": optax.adagrad(0.3)}, kinds)


def whole(step, ids, count=5):
    state, run = state_of(step), jax.jit(step)
    for batch in batches(count, ids):
        state, metrics = run(state, batch)
    return state, metrics


def with_layers(step, execution=SYNC, **settings):
    (first,) = batches(1, "even")
    return autoshard.HostTables(step, lambda: state_of(step), first, execution=execution, **settings)


SETTINGS = {
    "adagrad": (optax.adagrad(optax.linear_schedule(0.3, 0.1, 5)), 1, None, "zipf"),
    "sgd": (optax.sgd(0.1), 2, None, "even"),
    "adam": (of_layers(optax.adam(0.05)), 3, None, "one worker's"),
    "adam, eight devices": (of_layers(optax.adam(0.05)), 2, {"data": 8}, "zipf"),
}
CUTS = (LAYERS, "sync"), (LAYERS, "async"), (LAYERS[:2], "sync"), (LAYERS[:1], "async")
CASES = [
    pytest.param(*own, CUTS[a::2] if is_often else CUTS[1 - a :: 2], id=name, marks=marks)
    for n, (name, own) in enumerate(SETTINGS.items())
    for a in [n % 2]
    for is_often, marks in ((True, []), (False, pytest.mark.exhaustive))
]
"""Two cuts of each in every run, the other two with `--exhaustive`."""


@pytest.mark.parametrize(("optimizer", "num_workers", "mesh", "ids", "cuts"), CASES)
def test_layers_at_the_host_make_no_difference(optimizer, num_workers, mesh, ids, cuts):
    """With bags some of which are empty or of one row; cut behind the projection, its bias, or the tower."""
    step = autoshard.TrainStep(loss_fn, optimizer)
    expected, metrics = whole(step, ids)
    for layers, mode in cuts:
        execution = autoshard.Execution(mode, max_staleness=0, num_workers=num_workers)
        with with_layers(step, execution, host_layers=layers, mesh=mesh) as tables:
            done = list(tables.steps(batches(5, ids)))
            own = tables.state()
            dense = tables.dense_state.params
            assert f"parameters: {', '.join(f'`{name}`' for name in sorted(layers))}" in str(tables)
        assert_close((own.params, own.opt_state), (expected.params, expected.opt_state), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(done[-1].metrics["loss"], metrics["loss"], rtol=1e-5)
        for name in (*LAYERS, "dense"):
            np.testing.assert_array_equal(dense[name], own.params[name])


def test_updates_of_layers_at_the_host_are_not_lost_in_flight():
    """The gradient of a projection of rows that never change is the same in each step, whatever was in flight."""
    frozen = optax.multi_transform(
        {"train": optax.sgd(1.0), "keep": optax.set_to_zero()},
        lambda params: {name: "train" if name == "w" else "keep" for name in params},
    )
    loss = lambda p, b, _: (jnp.sum((p["t"][b["ids"]].sum(1) @ p["w"]) * p["one"] * b["y"]), None)
    step = autoshard.TrainStep(loss, frozen)
    rows = jnp.arange(16.0).reshape(8, 2)
    state = step.init({"t": rows, "w": jnp.zeros((2, 1)), "one": jnp.ones(())})
    batch = {"ids": np.array([[3, 3], [5, 1]], np.int32), "y": np.array([[1], [2]], np.float32)}
    execution = autoshard.Execution("async", max_staleness=3, num_workers=2, prefetch=4)
    with autoshard.HostTables(step, state, batch, execution=execution, host_layers=["w"]) as tables:
        done = list(tables.steps([batch] * 12))
        after = tables.state().params
    assert max(d.staleness for d in done) <= 3
    gradient = (2 * rows[3] + 2 * (rows[5] + rows[1]))[:, None]
    np.testing.assert_array_equal(after["w"], -12 * gradient)
    np.testing.assert_array_equal(after["t"], rows)


def test_layers_at_the_host_are_evaluated_saved_and_resumed_anywhere(tmp_path):
    step = autoshard.TrainStep(loss_fn, of_layers(optax.adam(0.05)))
    (first,) = batches(1, "zipf")
    evaluate = lambda state, batch: loss_fn(state.params, batch, None)[0]
    expected, _ = whole(step, "zipf", count=6)
    with with_layers(step, host_layers=LAYERS) as tables:
        list(tables.steps(list(batches(6, "zipf"))[:3]))
        told = float(tables.evaluation(evaluate, first)(first))
        tables.save(tmp_path)
        saved = tables.state()
    np.testing.assert_allclose(told, float(evaluate(saved, first)), rtol=1e-5)
    assert saved.params["project"].shape == (16, 8) and saved.step == 3
    for settings in ({"host_layers": LAYERS}, {"host_layers": LAYERS[:1], "mesh": {"data": 8}}, {}):
        with with_layers(step, dataclasses.replace(SYNC, num_workers=3), **settings) as tables:
            assert tables.restore(tmp_path) == 3
            for x, y in zip(jax.tree.leaves(tables.state()), jax.tree.leaves(saved), strict=True):
                np.testing.assert_array_equal(x, y)
            list(tables.steps(list(batches(6, "zipf"))[3:]))
            own = tables.state()
        assert_close((own.params, own.opt_state), (expected.params, expected.opt_state), rtol=1e-5, atol=1e-6)


def test_a_state_of_arrays_is_not_touched():
    step = autoshard.TrainStep(loss_fn, optax.adagrad(0.3))
    (first,) = batches(1, "even")
    state = state_of(step)
    with autoshard.HostTables(step, state, first, execution=SYNC, host_layers=LAYERS) as tables:
        list(tables.steps(batches(3, "even")))
    for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(state_of(step).params), strict=True):
        np.testing.assert_array_equal(x, y)


def test_layers_that_cannot_run_at_the_host_are_refused():
    adagrad = autoshard.TrainStep(loss_fn, optax.adagrad(0.3))
    clipped = autoshard.TrainStep(loss_fn, of_layers(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))))
    for step, mode, settings, told in (
        (adagrad, "pipelined", {"host_layers": LAYERS}, "pipelined"),
        (adagrad, "sync", {"host_layers": ["tower"]}, r"of `tower`, .*`dot_general` at .*test_host_layers.py"),
        (adagrad, "sync", {"host_layers": ["dense"]}, "of `dense`, .*together with"),
        (adagrad, "sync", {"host_layers": ["nothing"]}, "`nothing`, the loss has no such parameter"),
        (adagrad, "sync", {"host_layers": LAYERS, "tables": ["wide", "bias"]}, "of `project`"),
        (adagrad, "sync", {"host_layers": LAYERS, "hot_rows": {"bias": 3}}, "hot rows of bias"),
        (clipped, "sync", {"host_layers": LAYERS}, "needs gradients of other parameters"),
    ):
        with pytest.raises(AutoshardError, match=told):
            with_layers(step, autoshard.Execution(mode), **settings)

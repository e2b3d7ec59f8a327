"""Steps with tables in host memory: every mode, exactness, staleness, loss of a worker, checkpoints, memory limits."""

import dataclasses
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bags import ROWS, assert_close, batches

import autoshard
from autoshard.errors import AutoshardError, ConfigError, TrainingError

DIM = 3


def loss_fn(params, batch, _):
    bags = jnp.take(params["bags"], batch["bags"], axis=0, mode="fill", fill_value=0).sum(1)
    vectors = bags + params["small"][batch["bags"][:, 0] % 5] * params["bias"][batch["bags"][:, 1] % ROWS][:, None]
    return jnp.mean((jnp.tanh(vectors) @ params["dense"] - batch["y"][:, None]) ** 2), None


def state_of(step):
    normal = lambda n, *shape: jax.random.normal(jax.random.key(n), shape)
    tables = {"bags": normal(0, ROWS, DIM), "small": normal(1, 5, DIM), "bias": normal(2, ROWS)}
    return step.init(tables | {"dense": normal(3, DIM, 1)})


def in_host_memory(step, execution, ids="even", count=5, state=None, **settings):
    (first,) = batches(1, ids)
    with autoshard.HostTables(step, state or state_of(step), first, execution=execution, **settings) as tables:
        done = list(tables.steps(batches(count, ids)))
        return tables.state(), done


@pytest.mark.parametrize("ids", ["zipf", "one worker's"])
def test_sync_equals_whole_tables_and_pipelined_equals_sync_in_every_bit(ids):
    step = autoshard.TrainStep(loss_fn, optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.3)))
    whole, run = state_of(step), jax.jit(step)
    for batch in batches(5, ids):
        whole, _ = run(whole, batch)
    synchronous, _ = in_host_memory(step, autoshard.Execution("sync", num_workers=3), ids)
    pipelined, done = in_host_memory(step, autoshard.Execution("pipelined", num_workers=3, prefetch=3), ids)
    assert_close((synchronous.params, synchronous.opt_state), (whole.params, whole.opt_state), rtol=1e-5, atol=1e-6)
    assert [d.number for d in done] == list(range(5)) and {d.staleness for d in done} == {0}
    for x, y in zip(jax.tree.leaves(synchronous), jax.tree.leaves(pipelined), strict=True):
        np.testing.assert_array_equal(x, y)


def test_modes_agree_for_an_optimizer_that_is_lazy_and_for_tables_in_bfloat16():
    def narrow(params, batch, rng):
        return loss_fn({**params, "bags": params["bags"].astype(jnp.float32)}, batch, rng)

    step = autoshard.TrainStep(narrow, optax.adam(0.05))
    state = state_of(step)
    params = {**state.params, "bags": state.params["bags"].astype(jnp.bfloat16)}
    state = step.init(params)
    execution = lambda mode: autoshard.Execution(mode, num_workers=2)
    found = [in_host_memory(step, execution(m), "zipf", state=state, lazy=True)[0] for m in ("sync", "pipelined")]
    for x, y in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(x, y)
    assert found[0].params["bags"].dtype == jnp.bfloat16


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_staleness_never_exceeds_its_bound_and_updates_are_not_lost(bound):
    step = autoshard.TrainStep(lambda p, b, _: (jnp.sum(p["t"][b["ids"]] * b["y"]), None), optax.sgd(1.0))
    state = step.init({"t": jnp.zeros((8,))})
    batch = {"ids": np.array([3, 3, 5], np.int32), "y": np.array([1, 2, 4], np.float32)}
    execution = autoshard.Execution("async", max_staleness=bound, num_workers=2, prefetch=4)
    with autoshard.HostTables(step, state, batch, execution=execution) as tables:
        done = list(tables.steps([batch] * 12))
        after = tables.state().params["t"]
    assert max(d.staleness for d in done) <= bound
    # the gradient of a sum is the same wherever the table is, so that all orders of updates come to the same
    np.testing.assert_array_equal(after, [0, 0, 0, -36, 0, -48, 0, 0])


def test_a_lost_worker_is_told_soon_and_the_checkpoint_serves_any_number_of_workers(tmp_path):
    step = autoshard.TrainStep(loss_fn, optax.adagrad(0.3))
    (first,) = batches(1, "even")
    make = lambda workers: autoshard.HostTables(
        step, state_of(step), first, execution=autoshard.Execution("pipelined", num_workers=workers, timeout_s=20)
    )
    with make(3) as tables:
        list(tables.steps(list(batches(6, "even"))[:2]))
        tables.save(tmp_path)
        saved = tables.state()
        with pytest.raises(TrainingError, match=r"worker 1 .*resume"):
            for done in tables.steps(list(batches(6, "even"))[2:] * 100):
                if done.number == 4:
                    killed_s = time.monotonic()
                    os.kill(tables.pool.process_ids[1], signal.SIGKILL)
        assert time.monotonic() - killed_s < 20
    with make(2) as tables:
        assert tables.restore(tmp_path) == 2
        for x, y in zip(jax.tree.leaves(tables.state()), jax.tree.leaves(saved), strict=True):
            np.testing.assert_array_equal(x, y)
        list(tables.steps(list(batches(6, "even"))[2:]))
        resumed = tables.state()
    uninterrupted, _ = in_host_memory(step, autoshard.Execution("sync", num_workers=1), count=6)
    for x, y in zip(jax.tree.leaves(resumed), jax.tree.leaves(uninterrupted), strict=True):
        np.testing.assert_array_equal(x, y)


PLACES = (1, None), (3, None), (2, {"data": 8})
SUMS = [
    pytest.param(*place, ids, marks=[] if n == k else pytest.mark.exhaustive)
    for n, place in enumerate(PLACES)
    for k, ids in enumerate(["zipf", "even", "one worker's"])
]


@pytest.mark.parametrize(("num_workers", "mesh", "ids"), SUMS)
def test_sums_made_at_the_host_make_no_difference(ids, num_workers, mesh):
    """Of rows of bags, some empty, some of one row, beside tables that are looked up on the devices."""
    step = autoshard.TrainStep(loss_fn, optax.adagrad(optax.linear_schedule(0.3, 0.1, 5)))
    whole, run = state_of(step), jax.jit(step)
    for batch in batches(5, ids):
        whole, metrics = run(whole, batch)
    for execution in (autoshard.Execution("sync"), autoshard.Execution("async", max_staleness=0)):
        execution = dataclasses.replace(execution, num_workers=num_workers)
        pooled, done = in_host_memory(step, execution, ids, pooled=["bags"], mesh=mesh)
        assert_close((pooled.params, pooled.opt_state), (whole.params, whole.opt_state), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(done[-1].metrics["loss"], metrics["loss"], rtol=1e-5)


def test_sums_made_at_the_host_lose_no_update_of_steps_in_flight():
    step = autoshard.TrainStep(lambda p, b, _: (jnp.sum(p["t"][b["ids"]].sum(1) * b["y"]), None), optax.sgd(1.0))
    state = step.init({"t": jnp.zeros((8, 2))})
    batch = {"ids": np.array([[3, 3], [5, 1]], np.int32), "y": np.array([[1, 2], [4, 8]], np.float32)}
    execution = autoshard.Execution("async", max_staleness=3, num_workers=2, prefetch=4)
    with autoshard.HostTables(step, state, batch, execution=execution, pooled=["t"]) as tables:
        done = list(tables.steps([batch] * 12))
        after = tables.state().params["t"]
    assert max(d.staleness for d in done) <= 3
    # the gradient of a sum is the same wherever the table is; row 3 stands twice in its bag
    wanted = np.zeros((8, 2))
    wanted[[3, 5, 1]] = [[-24, -48], [-48, -96], [-48, -96]]
    np.testing.assert_array_equal(after, wanted)


def test_sums_made_at_the_host_are_saved_and_evaluated(tmp_path):
    step = autoshard.TrainStep(loss_fn, optax.adagrad(0.3))
    (first,) = batches(1, "zipf")
    make = lambda **more: autoshard.HostTables(
        step, lambda: state_of(step), first, execution=autoshard.Execution("sync"), **more
    )
    evaluate = lambda state, batch: loss_fn(state.params, batch, None)[0]
    with make(pooled=["bags"]) as tables:
        list(tables.steps(batches(3, "zipf")))
        told = float(tables.evaluation(evaluate, first)(first))
        tables.save(tmp_path)
        saved = tables.state()
    np.testing.assert_allclose(told, float(evaluate(saved, first)), rtol=1e-5)
    with make() as tables:
        assert tables.restore(tmp_path) == 3
        for x, y in zip(jax.tree.leaves(tables.state()), jax.tree.leaves(saved), strict=True):
            np.testing.assert_array_equal(x, y)


def test_what_the_host_cannot_pool_is_refused():
    (first,) = batches(1, "even")
    sync, adagrad = autoshard.Execution("sync"), autoshard.TrainStep(loss_fn, optax.adagrad(0.3))
    clipped = autoshard.TrainStep(loss_fn, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    for step, execution, settings, told in (
        (adagrad, autoshard.Execution("pipelined"), {"pooled": ["bags"]}, "pipelined"),
        (adagrad, sync, {"pooled": ["small"]}, r"`small`, .*`mul` at .*test_host_tables.py"),
        (adagrad, sync, {"pooled": ["dense"]}, "`dense`"),
        (adagrad, sync, {"pooled": ["bags"], "hot_rows": {"bias": 3}}, "hot rows of bias"),
        (clipped, sync, {"pooled": ["bags"]}, "adds up rows"),
    ):
        with pytest.raises(AutoshardError, match=told):
            autoshard.HostTables(step, state_of(step), first, execution=execution, **settings)


HOT = {"bags": 9, "bias": np.array([30, 2, 17, 36])}


@pytest.mark.parametrize(
    ("mode", "mesh"),
    [("sync", None), pytest.param("pipelined", None, marks=pytest.mark.exhaustive), ("pipelined", {"data": 8})],
)
def test_hot_rows_make_no_difference(mode, mesh, tmp_path):
    """Neither to results, nor to checkpoints, nor to evaluations; where the optimizer is exact."""
    step = autoshard.TrainStep(loss_fn, optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.3)))
    without, _ = in_host_memory(step, autoshard.Execution("sync", num_workers=1), "zipf", count=7)
    (first,) = batches(1, "zipf")
    execution = autoshard.Execution(mode, num_workers=3)
    evaluate = lambda state, batch: loss_fn(state.params, batch, None)[0]
    with autoshard.HostTables(step, state_of(step), first, execution=execution, hot_rows=HOT, mesh=mesh) as tables:
        assert "13 hot rows" in str(tables)
        counts = [done.num_rows for done in tables.steps(list(batches(7, "zipf"))[:4])]
        loss = float(tables.evaluation(evaluate, first)(first))
        tables.save(tmp_path)
        halfway = tables.state()
        np.testing.assert_allclose(loss, float(evaluate(halfway, first)), rtol=1e-5)
    with autoshard.HostTables(step, state_of(step), first, execution=execution, hot_rows={"bias": 20}) as tables:
        assert tables.restore(tmp_path) == 4
        assert_close(tables.state(), halfway, rtol=0)
        cold = [done.num_rows for done in tables.steps(list(batches(7, "zipf"))[4:])]
        assert_close(tables.state().params, without.params, rtol=1e-5, atol=1e-6)
    assert max(counts) < ROWS + 5 + ROWS - 13 and max(cold) <= ROWS + 5 + ROWS - 20


def test_hot_rows_must_be_rows():
    step = autoshard.TrainStep(loss_fn, optax.sgd(0.1))
    (first,) = batches(1, "even")
    for hot, told in (({"bags": ROWS}, "Give fewer"), ({"bags": np.array([ROWS])}, "37"), ({"dense": 1}, "`dense`")):
        with pytest.raises(AutoshardError, match=told):
            autoshard.HostTables(step, state_of(step), first, hot_rows=hot)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    step = autoshard.TrainStep(loss_fn, optax.sgd(0.3))
    (first,) = batches(1, "even")
    with autoshard.HostTables(step, state_of(step), first, execution=autoshard.Execution("sync", num_workers=1)) as own:
        own.save(tmp_path)
        path = next((tmp_path / "tables-0").glob("array-0-*.bin"))
        content = bytearray(path.read_bytes())
        content[5] ^= 1
        path.write_bytes(content)
        with pytest.raises(TrainingError, match="checksum"):
            own.restore(tmp_path)


def test_a_table_of_twice_the_memory_of_a_process_trains():
    limit = 128 << 20
    rows, dim = 1 << 19, 128  # 256 MiB

    def make():
        even = jax.random.uniform(jax.random.key(0), (rows, dim)) * 0.1
        return step.init({"table": even, "dense": jnp.ones((dim,))})

    loss = lambda p, b, _: (jnp.mean((p["table"][b["ids"]] @ p["dense"] - b["y"]) ** 2), None)
    step = autoshard.TrainStep(loss, optax.sgd(1e-3))
    batch = {"ids": np.array([0, rows - 1, 12345, 12345], np.int32), "y": np.ones(4, np.float32)}
    with pytest.raises(TrainingError, match="cannot have"):
        autoshard.HostTables(
            step, make, batch, execution=autoshard.Execution("sync", num_workers=1), worker_bytes=limit
        )
    execution = autoshard.Execution("pipelined", num_workers=4)
    with autoshard.HostTables(step, make, batch, execution=execution, worker_bytes=limit) as tables:
        losses = [float(done.metrics["loss"]) for done in tables.steps([batch] * 5)]
    assert losses[-1] < losses[0] * 0.9


def test_rows_are_made_in_pieces_as_the_whole_would_be():
    def make():
        key = jax.random.key(4)
        normal = jax.nn.initializers.lecun_normal()(key, (ROWS, DIM))
        uniform = jax.random.uniform(key, (ROWS, 2), jnp.bfloat16, -1, 1)
        return step.init({"a": normal, "b": uniform, "c": jnp.arange(ROWS) * jnp.ones(ROWS), "d": jnp.ones(())})

    looked_up = lambda p, ids: p["a"][ids].sum() + p["b"][ids].sum() + p["c"][ids].sum()
    step = autoshard.TrainStep(lambda p, b, _: (looked_up(p, b["ids"]) * p["d"], None), optax.adagrad(0.1))
    batch = {"ids": np.zeros(2, np.int32)}
    with autoshard.HostTables(step, make, batch, execution=autoshard.Execution(num_workers=2)) as tables:
        pieces = tables.state()
    for x, y in zip(jax.tree.leaves(pieces.params), jax.tree.leaves(jax.jit(make)().params), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_step_over_rows_is_planned_like_any_step():
    loss = lambda p, b, _: (jnp.mean((p["table"][b["ids"]] @ p["dense"] - b["y"]) ** 2), None)
    step = autoshard.TrainStep(loss, optax.adagrad(0.3))
    state = step.init({"table": jax.random.normal(jax.random.key(0), (64, 4)), "dense": jnp.ones((4,))})
    batch = {"ids": np.arange(8, dtype=np.int32), "y": np.ones(8, np.float32)}
    execution = autoshard.Execution(num_workers=1)
    with autoshard.HostTables(step, state, batch, execution=execution, mesh={"data": 8}) as tables:
        assert "data=8" in str(tables.plan)
        list(tables.steps([batch] * 3))
        planned = tables.state()
    for _ in range(3):
        state, _ = step(state, batch)
    assert_close(planned.params, state.params, rtol=1e-5)


def test_settings_that_cannot_be_are_refused():
    for name, wrong in {"num_workers": 0, "prefetch": 0, "max_staleness": -1, "mode": "fast"}.items():
        with pytest.raises(ConfigError, match=name):
            dataclasses.replace(autoshard.Execution(), **{name: wrong})
    in_flight = lambda mode: autoshard.Execution(mode, prefetch=3, max_staleness=2).num_slots
    assert (in_flight("sync"), in_flight("pipelined"), in_flight("async")) == (1, 5, 3)


def test_cpus_that_are_not_there_are_refused_before_workers_start():
    step = autoshard.TrainStep(loss_fn, optax.sgd(0.3))
    (first,) = batches(1, "even")
    execution = autoshard.Execution("sync", num_workers=1, worker_cpus=(0, 9999))
    with pytest.raises(ConfigError, match="worker_cpus: .*received 9999. Name some of these"):
        autoshard.HostTables(step, state_of(step), first, execution=execution)

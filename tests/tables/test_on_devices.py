"""Sparse gradients for tables on the devices: equal to dense ones, planned or not, and never as large as a table."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard.cluster import Cluster
from autoshard.tables import sparse_on_devices

CLUSTER = Cluster.from_file(pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "cpux8.yaml")
ROWS, DIM, BATCH = 1 << 12, 16, 64


def loss_fn(params, batch, _):
    """Two look-ups in one table that fill, one in another that clips, and one in a table smaller than the batch."""
    rows = jnp.take(params["first"], batch["ids"], axis=0, mode="fill", fill_value=0).sum(1)
    rows += params["second"].at[batch["ids"][:, 0]].get(mode="clip") * params["small"][batch["ids"][:, 1] % 4]
    return jnp.mean((jnp.tanh(rows) @ params["dense"] - batch["y"]) ** 2), {}


def state_and_step(optimizer):
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    tables = {"first": normal(0, ROWS, DIM), "second": normal(1, ROWS, DIM), "small": normal(2, 4, DIM)}
    step = autoshard.TrainStep(loss_fn, optimizer)
    return step.init({**tables, "dense": normal(3, DIM, 1)}), step


def batch_of(seed, kind="some"):
    rng = np.random.default_rng(seed)
    ids = {"some": rng.integers(-5, ROWS + 5, (BATCH, 2)), "one": np.full((BATCH, 2), 9)}.get(kind)
    ids = np.arange(2 * BATCH).reshape(BATCH, 2) if ids is None else ids
    return {"ids": jnp.asarray(ids, jnp.int32), "y": jnp.asarray(rng.random((BATCH, 1)), jnp.float32)}


def equal(a, b):
    for x, y in zip(jax.tree.leaves((a.params, a.opt_state)), jax.tree.leaves((b.params, b.opt_state)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.5), optax.chain(optax.clip_by_global_norm(0.01), optax.adagrad(0.5))]
)
def test_three_steps_equal_those_with_dense_gradients(optimizer):
    state, step = state_and_step(optimizer)
    sparse = sparse_on_devices(step, state, batch_of(0))
    assert [t.path for t in sparse.sparse.tables] == ["first", "second"], "the small one is not worth it"
    run, dense = jax.jit(sparse), jax.jit(step)
    ours = theirs = state
    for seed, kind in enumerate(("some", "one", "all different")):
        ours, theirs = run(ours, batch_of(seed, kind))[0], dense(theirs, batch_of(seed, kind))[0]
        equal(ours, theirs)


def test_planned_on_eight_devices():
    state, step = state_and_step(optax.adagrad(0.5))
    sparse = sparse_on_devices(step, state, batch_of(0))
    options = autoshard.PlanOptions(mesh_limit_s=10)
    plan = autoshard.plan(sparse, state, batch_of(0), cluster=CLUSTER, mesh={"data": 8}, options=options)
    run, dense = plan.jit(sparse), jax.jit(step)
    ours = theirs = state
    for seed in range(2):
        ours, theirs = run(ours, batch_of(seed))[0], dense(theirs, batch_of(seed))[0]
        equal(ours, theirs)


def test_no_gradient_is_as_large_as_a_table():
    """In the traced step only what is put back has a table's shape."""
    state, step = state_and_step(optax.adagrad(0.5))
    sparse = sparse_on_devices(step, state, batch_of(0))
    made = {
        e.primitive.name
        for e in jax.make_jaxpr(sparse)(state, batch_of(0)).jaxpr.eqns
        for v in e.outvars
        if v.aval.shape == (ROWS, DIM)
    }
    assert made == {"scatter"}

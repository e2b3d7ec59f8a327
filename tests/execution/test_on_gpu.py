"""On a GPU: planned steps equal plain ones in every way that is tried, with state in host memory too, and calibration
ends in figures that make sense. Skipped where there is none; where there is one:

    pytest -n 0 -m gpu tests/execution/test_on_gpu.py
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard import Cluster, PlanOptions, TrainStep
from autoshard.calibration.probes import Measures, Probe
from autoshard.calibration.programs import program, typical_and_spread
from autoshard.cluster import Host, Link
from autoshard.errors import MemoryBudgetError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]
H100X1 = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x1.yaml"
WIDTH, BATCH, STEPS = 1024, 64, 12


def loss_fn(params, batch, key):
    x = batch
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(jnp.square(x)), {}


STEP = TrainStep(loss_fn, optax.adamw(1e-3, eps=1e-3))


def init():
    keys = jax.random.split(jax.random.key(0), 4)
    return STEP.init([{"w": jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5, "b": jnp.zeros(WIDTH)} for k in keys])


def cluster_with_host() -> Cluster:
    """The GPU at hand, by whatever name the catalogue knows it, with a host."""
    cluster = Cluster.detect()
    host = Host(8, int(64e9), "test", to_device=Link(1e-6, 5e10, 0, "test"))
    return dataclasses.replace(cluster, groups=(dataclasses.replace(cluster.groups[0], host=host),))


def check_equal(plan):
    run, plain = plan.jit(STEP), jax.jit(STEP)
    batch = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    state, expected = plan.init(init), init()
    for _ in range(STEPS):
        state, _ = run(state, batch)
        expected, _ = plain(expected, batch)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        if not jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=2e-2, atol=2e-4)
    return run


def test_every_way_that_is_tried_makes_the_plain_step():
    shapes = jax.eval_shape(init), jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    run = check_equal(autoshard.plan(STEP, *shapes, cluster=Cluster.detect(), donate_argnums=0))
    (trial,) = run.trials
    assert trial.chosen is not None and all(t.step_s > 0 for t in trial.timed)


def test_state_in_host_memory_is_there_and_trains_alike():
    shapes = jax.eval_shape(init), jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    as_written = PlanOptions(remat="as_written", micro_batches="as_written", least_memory_s=0)
    offloaded = dataclasses.replace(as_written, offload="state")
    request = {"cluster": cluster_with_host(), "donate_argnums": 0}
    budget_bytes = autoshard.plan(STEP, *shapes, options=offloaded, **request).estimate.peak_bytes
    while True:
        budget_bytes *= 0.9
        try:
            autoshard.plan(STEP, *shapes, options=as_written, memory_budget_bytes=budget_bytes, **request)
        except MemoryBudgetError:
            plan = autoshard.plan(STEP, *shapes, options=offloaded, memory_budget_bytes=budget_bytes, **request)
            break
    hosted = [n for n, a in enumerate(plan.arguments) if a.in_host]
    assert hosted
    leaves = jax.tree.leaves((plan.init(init), jnp.zeros((BATCH, WIDTH))))
    assert {leaves[n].sharding.memory_kind for n in hosted} == {"pinned_host"}
    check_equal(plan)


def test_a_row_takes_what_its_bytes_take():
    """A kernel that moves 512 MB is within a third of the data sheet's rate, once the loop around it is left out."""
    hardware = Cluster.detect().slices()[0]
    row = Probe(Measures.MEMORY, (1 << 26,))
    typical = lambda probe: typical_and_spread(program(probe, hardware, jax.devices()).seconds(0.03, 5))[0]
    idle_s, row_s = typical(None), typical(row)
    expected_s = 2 * 4 * row.shape[0] / hardware.device_type.memory_bandwidth_bytes_per_s
    assert expected_s < row_s - idle_s < 1.5 * expected_s


def test_a_planned_step_with_cudnn_s_attention_is_the_plain_step():
    def attend(q, k, v):
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return jnp.mean(jnp.square(attended.astype(jnp.float32)))

    step = jax.value_and_grad(attend, argnums=(0, 1, 2))
    args = [
        jax.random.normal(jax.random.key(n), (4, 512, heads, 64), jnp.bfloat16) for n, heads in enumerate((8, 2, 2))
    ]
    plan = autoshard.plan(step, *args, cluster=Cluster.detect())
    assert not plan.warnings
    for ours, theirs in zip(jax.tree.leaves(plan.jit(step)(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=2e-2 * np.abs(theirs).max())  # bfloat16

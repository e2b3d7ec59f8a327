"""What XLA:GPU reserves for steps in micro-batches, against the prediction; needs its compiler, no GPU."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.verify.compile import compile_step
from autoshard.verify.devices import _is_installed, gpu_devices
from autoshard.verify.gpus import COMPILER_OPTIONS, H100

CLUSTER = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x8.yaml"
WIDTH, INNER, ROWS = 4096, 16384, 8192
needs_compiler = pytest.mark.skipif(
    not _is_installed("jax_plugins.xla_cuda13"), reason="the compiler for GPUs is not installed"
)


def loss_fn(layers, batch, key):
    x = batch["x"]
    for up, down in layers:
        x = x + jax.nn.relu(x @ up.astype(jnp.bfloat16)) @ down.astype(jnp.bfloat16)
    return jnp.mean(jnp.square(x.astype(jnp.float32))), {}


def planned(num_layers, split):
    """A step of four micro-batches, its arguments and its plan; dimension `split` of each weight lies on 8 devices."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    step = autoshard.TrainStep(loss_fn, optax.sgd(0.1)).in_parts((ROWS,) * 4)
    state = jax.eval_shape(step.init, [(f32(WIDTH, INNER), f32(INNER, WIDTH))] * num_layers)
    args = state, {"x": jax.ShapeDtypeStruct((4 * ROWS, WIDTH), jnp.bfloat16)}
    weights = P(*("data" if d == split else None for d in range(2)))
    pins = {"state.params.*": weights, "batch.x": P("data", None)}
    plan = autoshard.plan(step, *args, cluster=CLUSTER, mesh={"data": 8}, donate_argnums=0, pins=pins)
    assert plan.schedule is autoshard.Schedule.LATENCY_HIDING
    return step, args, plan


def compiled_peak_bytes(step, args, plan):
    return compile_step(plan, step, args, gpu_devices(H100, 8, 8), COMPILER_OPTIONS).memory.peak_bytes


@needs_compiler
@pytest.mark.parametrize("split", [pytest.param(0, marks=pytest.mark.exhaustive), 1], ids=["rows", "columns"])
def test_memory_is_what_the_compiler_reserves(split, monkeypatch):
    """Weights are gathered for short products, so that gathers wait for each other."""
    monkeypatch.setenv("XLA_FLAGS", "")  # this test process sets one that only XLA:CPU knows
    step, args, plan = planned(4, split)
    compiled_bytes = compiled_peak_bytes(step, args, plan)
    assert 0.97 * compiled_bytes <= plan.estimate.peak_bytes <= 1.1 * compiled_bytes


@needs_compiler
def test_weights_are_not_turned_for_all_micro_batches(monkeypatch):
    """Gathered by columns, the second weight would lie turned beside itself while the loop runs: a float32 piece of
    16384 x 512 on each device."""
    monkeypatch.setenv("XLA_FLAGS", "")
    step, args, plan = planned(1, 1)
    free = tuple((n, p if not p.body else dataclasses.replace(p, row_major=())) for n, p in plan.shardings)
    assert free != plan.shardings
    turned = dataclasses.replace(plan, shardings=free)
    spared_bytes = compiled_peak_bytes(step, args, turned) - compiled_peak_bytes(step, args, plan)
    assert spared_bytes == pytest.approx(4 * 16384 * 512, rel=0.01)

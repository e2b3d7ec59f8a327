"""Scans whose stacks are filled late are the scans, and those of layers computed again take memory one at a time."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.execution.late_stacks import scan_with_late_stacks
from autoshard.verify.compile import compile_step
from autoshard.verify.devices import _is_installed, gpu_devices
from autoshard.verify.gpus import COMPILER_OPTIONS, H100

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"
STEPS, BATCH, WIDTH = 256, 64, 512


@pytest.mark.parametrize("late", [(2,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("unroll", [1, 3])
def test_a_scan_with_late_stacks_is_the_scan(late, reverse, unroll):
    """Nothing is rounded: all numbers are multiples of 2**-10, so that both are equal however they are compiled."""

    def body(state, x):
        total, count = state
        total = 0.5 * total + x["a"] * scale
        return (total, count + 1), (total, jnp.argmax(total + x["b"]).astype(jnp.int32) + count)

    scale = jnp.arange(4.0)
    fn = lambda xs: jax.lax.scan(body, (jnp.zeros(4), jnp.int32(3)), xs, reverse=reverse, unroll=unroll)
    eighths = lambda seed: jax.random.randint(jax.random.key(seed), (7, 4), -24, 25) / 8
    xs = {"a": eighths(0), "b": eighths(1)}
    closed = jax.make_jaxpr(fn)(xs)
    scan = next(e for e in closed.jaxpr.eqns if e.primitive.name == "scan")
    operands = [scale, jnp.zeros(4), jnp.int32(3), xs["a"], xs["b"]]
    found = jax.jit(lambda *o: scan_with_late_stacks(scan, scan.params["jaxpr"], o, late))(*operands)
    for own, want in zip(found, jax.tree.leaves(fn(xs)), strict=True):
        np.testing.assert_array_equal(own, want)


def recurrent(params, batch):
    def layer(x, w):
        def step(state, at_time):
            state = jnp.tanh(state * w["decay"] + at_time)
            return state, state

        _, states = jax.lax.scan(step, jnp.zeros_like(x[0]), x @ w["in"])
        return x + states @ w["out"]

    x = batch
    for w in params:
        x = jax.checkpoint(layer)(x, w)
    return jnp.mean(x**2)


def problem(layers):
    shapes = {"decay": (WIDTH,), "in": (WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    params = [{k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}] * layers
    step = lambda p, x: jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(recurrent)(p, x))
    return step, params, jax.ShapeDtypeStruct((STEPS, BATCH, WIDTH), jnp.float32)


def planned(layers, mesh):
    step, params, x = problem(layers)
    cluster = CLUSTERS / "h100x8.yaml"
    return step, (params, x), autoshard.plan(step, params, x, cluster=cluster, mesh=mesh, donate_argnums=0)


def test_plans_run_scans_of_layers_with_late_stacks():
    step, (params, x), plan = planned(2, {"data": 4, "tensor": 2})
    assert sum(bool(p.late_stacks) for _, p in plan.shardings) >= 4  # of each layer, forward and again
    keys = iter(jax.random.split(jax.random.key(0), 99))
    params = jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape) / WIDTH**0.5, params)
    x = jax.random.normal(next(keys), x.shape)
    on_cpu = autoshard.plan(step, params, x, mesh={"data": 4, "tensor": 2})
    assert any(p.late_stacks for _, p in on_cpu.shardings)
    found = jax.tree.leaves(on_cpu.jit(step)(params, x))
    for own, want in zip(found, jax.tree.leaves(jax.jit(step)(params, x)), strict=True):
        np.testing.assert_allclose(own, want, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(
    not _is_installed("jax_plugins.xla_cuda13"), reason="needs XLA:GPU: pip install 'autoshard[verify-gpu]'"
)
def test_stacks_of_layers_computed_again_take_memory_one_layer_at_a_time():
    stack_bytes = STEPS * BATCH * WIDTH * 4 / 8
    peaks = []
    for layers in (2, 4):
        step, args, plan = planned(layers, {"data": 8})
        memory = compile_step(plan, step, args, gpu_devices(H100, 8, 8), COMPILER_OPTIONS).memory
        peaks.append(memory.peak_bytes)
        assert 0.97 <= plan.estimate.peak_bytes / memory.peak_bytes <= 1.1
    # each layer keeps its input; two more hold on to no more than one buffer each, and parameters
    assert peaks[1] - peaks[0] <= 2 * 1.5 * stack_bytes

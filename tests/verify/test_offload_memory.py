"""What XLA:GPU reserves for plans with state in host memory, against the prediction; needs its compiler, no GPU."""

import dataclasses
import pathlib
import re
from typing import Literal

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import MemoryBudgetError
from autoshard.verify.compile import CompiledStep, compile_step
from autoshard.verify.devices import _is_installed, devices_for, options_for
from autoshard.verify.targets import target_named

CLUSTER = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x8_cpu.yaml"
WIDTH, LAYERS = 2048, 4
AS_WRITTEN = autoshard.PlanOptions(remat="as_written", micro_batches="as_written", mesh_limit_s=30, least_memory_s=0)
STEPS = {
    "adamw": optax.adamw(1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
}


def loss_fn(params, batch, key):
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(jnp.square(x)), {}


@pytest.mark.slow
@pytest.mark.skipif(not _is_installed("jax_plugins.xla_cuda13"), reason="the compiler for GPUs is not installed")
@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    [
        (autoshard.Schedule.LATENCY_HIDING, "clipped"),
        (autoshard.Schedule.LEAST_MEMORY, "adamw"),
        pytest.param(autoshard.Schedule.LATENCY_HIDING, "adamw", marks=pytest.mark.exhaustive),
        pytest.param(autoshard.Schedule.LEAST_MEMORY, "clipped", marks=pytest.mark.exhaustive),
    ],
)
def test_memory_is_what_the_compiler_reserves(schedule, optimizer, monkeypatch):
    """Where nothing fits without: as many bytes on the host as planned; on the device the prediction is off by no more
    than where nothing is offloaded, and 5 %."""
    monkeypatch.setenv("XLA_FLAGS", "")  # this test process sets one that only XLA:CPU knows
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    step = autoshard.TrainStep(loss_fn, STEPS[optimizer])
    args = jax.eval_shape(step.init, [{"w": f32(WIDTH, WIDTH), "b": f32(WIDTH)}] * LAYERS), {"x": f32(64, WIDTH)}
    matrix_bytes = 4 * WIDTH * WIDTH / 8
    target = target_named("h100")

    def planned(budget_bytes: float, offload: Literal["never", "state"]) -> autoshard.Plan:
        plan = autoshard.plan(
            step,
            *args,
            cluster=CLUSTER,
            mesh={"data": 8},
            donate_argnums=0,
            memory_budget_bytes=budget_bytes,
            pins={"state.params.*.b": P("data")},  # all layers alike
            options=dataclasses.replace(AS_WRITTEN, offload=offload, schedule=schedule),
        )
        assert isinstance(plan, autoshard.Plan)
        return plan

    def compiled(plan: autoshard.Plan) -> CompiledStep:
        devices = devices_for(target, plan.axes, plan.devices_per_node, plan.logical_mesh.torus)
        return compile_step(plan, step, args, devices, options_for(target))

    def error_bytes(plan: autoshard.Plan, program: CompiledStep) -> float:
        assert plan.estimate.reserved_bytes is not None
        return abs(program.memory.total_bytes - plan.estimate.reserved_bytes)

    # weights, one gradient, a workspace of 32 MiB, and half of the moments: too little for all of them
    budget_bytes = (2 * LAYERS + 4) * matrix_bytes + 2**25
    with pytest.raises(MemoryBudgetError):
        planned(budget_bytes, "never")
    plan, roomy = planned(budget_bytes, "state"), planned(3 * budget_bytes, "never")
    hosted = [a for a in plan.arguments if a.in_host]
    program = compiled(plan)
    assert hosted and program.memory.host_bytes == len(hosted) * matrix_bytes
    assert len(re.findall(r"copy-start\(", program.text)) == 2 * len(hosted)  # each goes in, and its successor out
    assert error_bytes(plan, program) <= error_bytes(roomy, compiled(roomy)) + 0.05 * program.memory.total_bytes

"""Training under orders that let collectives run behind kernels goes as it does unsharded: such orders move equations,
and hold back operands, copies that are gathered, and results of checkpointed layers."""

import pathlib

import jax
import numpy as np
import optax
import pytest
from autoshard_models import train_step
from autoshard_models.presets import preset

from autoshard import PlanOptions, baselines
from autoshard.cluster import Cluster
from autoshard.compiler.schedule import Schedule
from autoshard.graph.equation_plan import EquationPlan

GPUS = Cluster.from_file(pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x8.yaml")
FIELDS = ("waits_for_part", "holds_back", "holds_results", "evaluated_at")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "megatron"])
def test_steps_of_training(name, monkeypatch):
    """What is ordered for GPUs runs on CPUs alike, of a model whose copies are all small."""
    monkeypatch.setattr("autoshard.compiler.prefetches._LEAST_BYTES", 0)
    config = preset("tiny", num_layers=2, remat=True, embed_dim=128, num_heads=4, context_length=64, vocab_size=64)
    functions = train_step.build(config, optax.sgd(0.1, momentum=0.9))
    tokens = jax.random.randint(jax.random.key(1), (2, 8, 64), 0, 64)
    state, batch = functions.init(0), {"inputs": tokens[0], "targets": tokens[1]}
    subject = baselines.prepare_subject(functions.step, state, batch, cluster=GPUS, donate_argnums=0)
    strategy = next(s for s in baselines.ALL if s.name == name)
    options = PlanOptions(schedule=Schedule.LATENCY_HIDING)
    plan = baselines.plan_baseline(strategy, subject, mesh={"data": 2, "model": 4}, options=options)
    ordered = {
        field for _, e in plan.shardings for field in FIELDS if getattr(e, field) != getattr(EquationPlan(), field)
    }
    assert ordered == {*FIELDS}
    planned, reference = plan.jit(functions.step, devices=jax.devices()[:8]), jax.jit(functions.step)
    sharded = functions.init(0)
    for _ in range(2):
        sharded, found = planned(sharded, batch)
        state, expected = reference(state, batch)
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    for x, y in zip(jax.tree.leaves(sharded.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-5)

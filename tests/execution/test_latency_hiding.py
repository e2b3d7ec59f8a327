"""Training under orders that let collectives run behind kernels goes as it does unsharded: such orders move equations,
and hold back operands, copies that are gathered, and results of checkpointed layers. In the order of the plan's own
schedule, weights enter checkpointed layers before all else does."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autoshard_models import train_step
from autoshard_models.presets import preset

import autoshard
from autoshard import PlanOptions, TrainStep, baselines
from autoshard.cluster import Cluster
from autoshard.compiler.candidates import Candidate
from autoshard.compiler.schedule import Schedule
from autoshard.execution.jit import device_mesh
from autoshard.graph.equation_plan import EquationPlan
from autoshard.plans.apply import planned_function

GPUS = Cluster.from_file(pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x8.yaml")


def on_slow_links() -> Cluster:
    """The same with links of a hundredth: what enters a layer must be gathered before it begins."""
    group, *_ = GPUS.groups
    link = dataclasses.replace(group.intra_node, bandwidth_bytes_per_s=group.intra_node.bandwidth_bytes_per_s / 100)
    return dataclasses.replace(GPUS, groups=(dataclasses.replace(group, intra_node=link),))


BOUNDED = {"waits_for_part", "holds_back", "holds_results", "evaluated_at"}
BY_TIME = {*BOUNDED, "opened"}


def enters_a_layer(lowered: jax.stages.Lowered) -> int:
    """The most values for which one barrier makes all others wait: those that enter a checkpointed layer."""
    barriers = [line for line in lowered.as_text().splitlines() if "optimization_barrier" in line]
    return max(line.partition("optimization_barrier")[2].partition(":")[0].count("%") for line in barriers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "candidate"),
    [
        pytest.param("zero3", Candidate.PLAN_COSTS, marks=pytest.mark.exhaustive),
        ("megatron", Candidate.PLAN_COSTS),
        ("zero3", Candidate.BY_TIME),
    ],
)
def test_steps_of_training(name, candidate, monkeypatch):
    """What is ordered for GPUs runs on CPUs alike, of a model whose copies are all small."""
    monkeypatch.setattr("autoshard.compiler.prefetches.LEAST_HELD_BYTES", 0)
    config = preset("tiny", num_layers=2, remat=True, embed_dim=128, num_heads=4, context_length=64, vocab_size=64)
    functions = train_step.build(config, optax.sgd(0.1, momentum=0.9))
    tokens = jax.random.randint(jax.random.key(1), (2, 8, 64), 0, 64)
    state, batch = functions.init(0), {"inputs": tokens[0], "targets": tokens[1]}
    cluster = GPUS if candidate.is_bounded else on_slow_links()
    subject = baselines.prepare_subject(functions.step, state, batch, cluster=cluster, donate_argnums=0)
    strategy = next(s for s in baselines.ALL if s.name == name)
    options = PlanOptions(schedule=Schedule.LATENCY_HIDING)
    plan = baselines.plan_baseline(strategy, subject, mesh={"data": 2, "tensor": 4}, options=options)
    program = planned_function(plan, functions.step, device_mesh(plan.axes, jax.devices()[:8]))
    enforced = plan.interface.for_candidate(candidate).shardings
    wanted = BOUNDED if candidate.is_bounded else BY_TIME
    assert {f for _, e in enforced for f in BY_TIME if getattr(e, f) != getattr(EquationPlan(), f)} == wanted
    planned, reference = program.of_candidate(candidate), jax.jit(functions.step)
    if not candidate.is_bounded:
        assert enters_a_layer(planned.lower(state, batch)) < enters_a_layer(program.lower(state, batch))
    sharded = functions.init(0)
    for _ in range(2):
        sharded, found = planned(sharded, batch)
        state, expected = reference(state, batch)
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    for x, y in zip(jax.tree.leaves(sharded.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-5)


def test_what_nobody_needs_waits_for_nothing():
    """A step leaves equations behind that nobody needs, such as some of the loss beside its gradient; the plan does not
    know them, and has what they read made later."""

    def loss_fn(params, batch, key):
        x = params["embed"][batch]
        for w in params["layers"]:
            x = x + jax.nn.gelu(x @ w)
        logits = jnp.einsum("bsd,vd->bsv", x, params["embed"])
        return -(jax.nn.one_hot(batch, 512) * jax.nn.log_softmax(logits)).sum(-1).mean(), None

    step = TrainStep(loss_fn, optax.sgd(0.1))
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape) / 16
    state = step.init({"embed": draw(0, 512, 256), "layers": [draw(k, 256, 256) for k in (1, 2)]})
    batch = jax.random.randint(jax.random.key(9), (16, 32), 0, 512)
    options = PlanOptions(schedule=Schedule.LATENCY_HIDING, remat="as_written")
    plan = autoshard.plan(step, state, batch, cluster=GPUS, mesh={"data": 8}, options=options)
    assert any(e.evaluated_at for _, e in plan.interface.shardings)
    planned, expected = planned_function(plan, step, device_mesh(plan.axes, jax.devices()[:8])), step(state, batch)
    for x, y in zip(jax.tree.leaves(planned(state, batch)), jax.tree.leaves(expected), strict=True):
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)

"""A small training step, and its plan in stages on two kinds of devices: two pipelines, one of them of two stages."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest

import autoshard
from autoshard import PlanOptions, StagedPlan, StageOptions
from autoshard.cluster import Cluster, NodeGroup
from autoshard.pipelines.plan.make import plan_staged
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.arrangement import Arrangement, Pipeline, Stage, Submesh

CPUS = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "cpux8.yaml"
WIDTH, NUM_LAYERS, BATCH = 16, 4, 6


def _mixed_cluster() -> Cluster:
    """Two CPU devices, and one of half their speed."""
    of_eight = Cluster.from_file(CPUS).groups[0]
    halved = tuple((kind, flops / 2) for kind, flops in of_eight.device_type.peak_flops_per_s)
    slow = dataclasses.replace(of_eight.device_type, name="CPU-slow", peak_flops_per_s=halved)
    groups = (
        NodeGroup("fast", of_eight.device_type, 1, 2, of_eight.intra_node),
        NodeGroup("slow", slow, 1, 1, of_eight.intra_node),
    )
    return Cluster("mixed", groups, dataclasses.replace(of_eight.intra_node, level=1))


@dataclasses.dataclass(frozen=True)
class Subject:
    """A step, the shapes of its arguments, the cluster, and the plan of it all."""

    step: autoshard.TrainStep
    state: object
    batch: object
    plan: StagedPlan


@pytest.fixture(scope="session")
def mixed_cluster() -> Cluster:
    """Two CPU devices, and one of half their speed."""
    return _mixed_cluster()


@pytest.fixture(scope="session")
def subject() -> Subject:
    def loss_fn(params, batch, rng):
        h = batch["x"]
        for name in sorted(params):
            h = jax.nn.relu(h @ params[name]["kernel"] + params[name]["bias"])
        return jnp.mean((h - batch["y"]) ** 2), {}

    step = autoshard.TrainStep(loss_fn, optax.sgd(0.1))
    layer = lambda: {"kernel": jnp.zeros((WIDTH, WIDTH)), "bias": jnp.zeros(WIDTH)}
    state = jax.eval_shape(lambda: step.init({f"layer{n}": layer() for n in range(NUM_LAYERS)}))
    batch = {k: jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32) for k in "xy"}
    fast, slow = 0, 2  # mesh options: one fast device, both, the slow one
    first = Pipeline(
        (Submesh(0, 0, fast), Submesh(1, 0, slow)), (Stage(0, 3), Stage(3, 4)), 2, 2, ScheduleKind.ONE_F_ONE_B
    )
    second = Pipeline((Submesh(0, 1, fast),), (Stage(0, 4),), 2, 1, ScheduleKind.GPIPE)
    plan = plan_staged(
        step,
        state,
        batch,
        _mixed_cluster(),
        PlanOptions(cache=False),
        StageOptions(),
        arrangement=Arrangement((first, second)),
    )
    return Subject(step, state, batch, StagedPlan.of(plan))

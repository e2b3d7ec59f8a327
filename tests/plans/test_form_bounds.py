"""What forms take at least, told from few layers: no plan takes less, and the whole program says the same."""

import dataclasses
import itertools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard import PlanOptions, TrainStep
from autoshard.cluster import Cluster
from autoshard.planner.mesh_prices import PricesOfMeshes
from autoshard.planner.program import prepare
from autoshard.plans.form_bounds import FormBounds
from autoshard.plans.step_variant import StepVariant
from autoshard.remat.few_layers import few_layers_of
from autoshard.remat.policy import Keep, RematPolicy, RunPolicy, first_layers
from autoshard.remat.rewrite import layers_of
from autoshard.trace.trace import trace

CLUSTER = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x8.yaml"
LAYERS, WIDTH, EXAMPLES, TOKENS = 8, 256, 64, 128
AS_WRITTEN = PlanOptions(remat="as_written", micro_batches="as_written")


def loss_fn(params, batch):
    """Layers of attention and of a perceptron: policies differ in what they keep of either."""
    x = batch["x"]
    for w in params:
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ w["query"], x))
        x = x + jnp.einsum("bqk,bkd->bqd", weights, x)
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
    return jnp.mean((x - batch["y"]) ** 2)


STEP = TrainStep(loss_fn, optax.adam(1e-3))


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


BLOCK = {"query": shape(WIDTH, WIDTH), "up": shape(WIDTH, 4 * WIDTH), "down": shape(4 * WIDTH, WIDTH)}
STATE = jax.eval_shape(STEP.init, [BLOCK] * LAYERS)
BATCH = {name: shape(EXAMPLES, TOKENS, WIDTH) for name in "xy"}
RUNS = layers_of(STEP, STATE, BATCH).runs


def at_once() -> Cluster:
    """The cluster, but nothing takes time to begin: no plan has a slower kernel to begin fewer collectives."""
    cluster = Cluster.from_file(CLUSTER)
    (group,) = cluster.groups
    link = dataclasses.replace(group.intra_node, latency_s=0.0)
    device = dataclasses.replace(group.device_type, launch_overhead_s=0.0)
    return dataclasses.replace(cluster, groups=(dataclasses.replace(group, intra_node=link, device_type=device),))


@pytest.fixture(scope="module")
def bounds() -> FormBounds:
    (run,) = RUNS
    assert run.count == LAYERS
    meshes = [at_once().slices()[0].logical_mesh({"data": 8})]
    few = few_layers_of(STEP, STATE, BATCH, RUNS)
    return FormBounds(few, list(Keep), STATE, meshes, PricesOfMeshes(), PlanOptions())


MIXED = first_layers(RUNS, Keep.INPUTS, Keep.ALL, 5)


def planned(policy: RematPolicy) -> autoshard.Plan:
    """A plan of the whole step, all of its layers traced, in memory without limit."""
    request = {"cluster": at_once(), "mesh": {"data": 8}, "donate_argnums": 0, "memory_budget_bytes": math.inf}
    return autoshard.plan(StepVariant(policy).of(STEP), STATE, BATCH, options=AS_WRITTEN, **request)


def kernels_of(plan: autoshard.Plan) -> float:
    return sum(c.compute_s for c in plan.estimate.compute)


@pytest.fixture(scope="module")
def update_s(bounds) -> float:
    """What a plan's kernels take beside those of the gradients: the optimizer's, whatever layers keep."""
    keeps_all = bounds.uniform(Keep.ALL)
    own_s = kernels_of(planned(keeps_all)) - bounds.kernels_s(keeps_all)
    assert 0 < own_s < 0.15 * bounds.kernels_s(keeps_all)
    return own_s


OFTEN = Keep.ALL, Keep.INPUTS, MIXED


@pytest.mark.parametrize(
    "policy", [*OFTEN, *(pytest.param(k, marks=pytest.mark.exhaustive) for k in Keep if k not in OFTEN)], ids=str
)
def test_no_plan_takes_less(bounds, update_s, policy):
    """Kernels are those of the whole step, but for the update."""
    policy = bounds.uniform(policy) if isinstance(policy, Keep) else policy
    plan = planned(policy)
    assert bounds.kernels_s(policy) + update_s == pytest.approx(kernels_of(plan), rel=1e-6)
    assert bounds.least_bytes(policy, None) <= plan.estimate.peak_bytes


@pytest.mark.parametrize("keep", Keep)
def test_what_is_stored_is_what_all_layers_store(bounds, keep):
    """Of gradients with all layers, which are traced whole, at the instant when most is live."""
    found = few_layers_of(STEP, STATE, BATCH, RUNS).gradients(keep, [LAYERS])
    assert found is not None
    program = prepare(trace(*found).graph)
    arguments = {a.value for a in program.graph.arguments}
    lives = [x for x in program.analysis.live.ranges if x.value not in arguments]
    size = lambda live: program.graph.values[live.value].size_bytes
    most_bytes = max(sum(size(x) for x in lives if x.start <= t < x.stop) for t in {x.start for x in lives})
    state_bytes = sum(math.prod(x.shape) * 4 for x in jax.tree.leaves(STATE) if x.dtype != jax.random.key(0).dtype)
    assert bounds.least_bytes(bounds.uniform(keep), None) == pytest.approx((state_bytes + most_bytes) / 8, rel=2e-3)


def test_micro_batches_store_their_share_and_sums_of_gradients(bounds):
    """By hand: with state s, parameters p and intermediates i, s + i in one batch and s + p + i / 4 in four, over 8."""
    size = lambda tree: sum(4 * math.prod(x.shape) for x in jax.tree.leaves(tree) if x.dtype == jnp.float32)
    policy = bounds.uniform(Keep.ALL)
    whole, quarter = bounds.least_bytes(policy, None), bounds.least_bytes(policy, 4)
    state_bytes, param_bytes = size(STATE), size(STATE.params)
    stored_bytes = 8 * whole - state_bytes
    assert 8 * quarter == pytest.approx(state_bytes + param_bytes + stored_bytes / 4, rel=1e-3)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_the_policy_that_fills_the_memory_is_as_fast_as_any_mixture_of_two(bounds, share):
    """Brute force over all pairs and numbers of layers."""
    least, most = (bounds.least_bytes(bounds.uniform(k), None) for k in (bounds.leanest, Keep.ALL))
    budget = least + share * (most - least)
    (run,) = RUNS
    mixed = [
        RematPolicy((RunPolicy(run, ((a, n), (b, LAYERS - n))),))
        for (a, b), n in itertools.product(itertools.permutations(Keep, 2), range(1, LAYERS))
    ]
    fitting = [p for p in [*mixed, *map(bounds.uniform, Keep)] if bounds.least_bytes(p, None) <= budget]
    fastest_s = min(map(bounds.kernels_s, fitting))
    found = bounds.best(None, budget)
    assert found is not None and bounds.least_bytes(found, None) <= budget
    assert bounds.kernels_s(found) <= fastest_s * 1.005
    assert bounds.best(None, 0.9 * least) is None


def test_where_state_may_lie_on_the_host_memory_tells_nothing(bounds):
    few = few_layers_of(STEP, STATE, BATCH, RUNS)
    options = dataclasses.replace(PlanOptions(), offload="all")
    meshes = [at_once().slices()[0].logical_mesh({"data": 8})]
    hosted = FormBounds(few, [Keep.ALL, Keep.INPUTS], STATE, meshes, PricesOfMeshes(), options)
    assert hosted.least_bytes(hosted.uniform(Keep.ALL), None) == 0.0
    offered = [policy for _, policy in hosted.offers(None, 1.0)]
    assert offered == [hosted.uniform(Keep.ALL), hosted.uniform(Keep.INPUTS)]
    np.testing.assert_allclose(hosted.kernels_s(offered[0]), bounds.kernels_s(offered[0]))

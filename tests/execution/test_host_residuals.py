"""Residuals in host memory: plans drawn at random, which copy some of them out and back, run to the same result."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from autoshard import Plan
from autoshard.cluster import Host, Link
from autoshard.compiler.schedule import Schedule
from autoshard.planner.build import formulate
from autoshard.planner.program import prepare
from autoshard.plans.make import Origin, plan_of_choices
from autoshard.solver.problem import Certificate, Status
from autoshard.trace.trace import trace

pytestmark = pytest.mark.host_memory

HOST = Host(8, 10**12, "test", to_device=Link(1e-6, 1e9, 0, "test"))
WIDTH, LAYERS, BATCH = 256, 6, 1024  # activations of 1 MiB; in fewer layers some forms have none to offload


def layer(x, w):
    y = x / (1 + jnp.mean(jnp.square(x), axis=-1, keepdims=True))
    return x + jnp.tanh(y @ w[0]) @ w[1]


def written_out(x, w):
    """The same with its products kept: what is pointwise is computed again."""
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)(x, w)


def offloading(x, w):
    """The same with its input offloaded by its policy: the plan decides that anew."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["residual"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(lambda x, w: layer(checkpoint_name(x, "residual"), w), policy=policy)(x, w)


FORMS = {
    "inputs kept": jax.checkpoint(layer),
    "products kept": written_out,
    "inputs offloaded": offloading,
    "all kept": layer,
}


def loss_of(form):
    def loss(weights, x):
        for w in weights:
            x = FORMS[form](x, w)
        return jnp.mean(jnp.square(x))

    return loss


def step_of(form):
    def step(weights, x):
        value, gradients = jax.value_and_grad(loss_of(form))(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step


STEPS = {form: step_of(form) for form in FORMS}
"""Each is one function, which JAX traces and compiles unplanned once for all meshes."""


def in_micro_batches(weights, x):
    """The same in two micro-batches, in a loop."""

    def add(carry, part):
        value, gradients = jax.value_and_grad(loss_of("products kept"))(weights, part)
        return jax.tree.map(jnp.add, carry, (value, gradients)), None

    (value, gradients), _ = jax.lax.scan(add, (0.0, jax.tree.map(jnp.zeros_like, weights)), x.reshape(2, -1, WIDTH))
    return jax.tree.map(lambda w, g: w - 0.05 * g, weights, gradients), value / 2


@pytest.fixture(scope="module")
def arguments():
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS + 1)
    draw = lambda n, *shape: jax.random.normal(keys[n], shape) / WIDTH**0.5
    weights = [(draw(2 * n, WIDTH, WIDTH), draw(2 * n + 1, WIDTH, WIDTH)) for n in range(LAYERS)]
    return weights, WIDTH**0.5 * draw(-1, BATCH, WIDTH)


def drawn(step, args, cluster, mesh, seed, schedule) -> tuple[Plan, int]:
    """A plan drawn at random, and how many residuals it has on the host; to hide latency, with the orders of GPUs."""
    traced, axes = trace(step, args, (0,)), cluster.slices()[0].logical_mesh(mesh)
    if schedule is Schedule.LATENCY_HIDING:
        axes = dataclasses.replace(axes, device_type=dataclasses.replace(axes.device_type, product_workspace_bytes=1))
    hosted = dataclasses.replace(axes, host=HOST)
    pins = [None] * len(traced.graph.arguments)
    f = formulate(prepare(traced.graph), hosted, None, pins, schedule=schedule, offload="activations")
    rng = np.random.default_rng(seed)
    picks = [int(rng.integers(len(node.costs))) for node in f.problem.nodes]
    picks[-1] = 1  # the last residual goes, whatever the others do
    certificate = Certificate(Status.FEASIBLE, 0.0, 0.0, 0.0, 0.0)
    plan = plan_of_choices(
        traced, f, tuple(picks), origin=Origin("random", cluster.name, (0,)), certificate=certificate
    )
    return Plan.of(plan), sum(picks[len(picks) - len(f.all_residuals) :])


MESHES = {"data": 8}, {"data": 2, "tensor": 4}, {"a": 2, "b": 2, "c": 2}
OFTEN = {("inputs kept", 0), ("products kept", 1), ("inputs offloaded", 2), ("all kept", 1)}
"""Each form and each mesh, in every run."""
CASES = [
    pytest.param(form, MESHES[seed], seed, marks=[] if (form, seed) in OFTEN else pytest.mark.exhaustive)
    for form in FORMS
    for seed in range(3)
]


@pytest.mark.parametrize(("form", "mesh", "seed"), CASES, ids=str)
def test_results_are_equal(arguments, cluster, form, mesh, seed):
    check(STEPS[form], arguments, cluster, mesh, seed)


@pytest.mark.parametrize(
    "form",
    [
        "products kept",
        "inputs offloaded",
        *(pytest.param(form, marks=pytest.mark.exhaustive) for form in ("inputs kept", "all kept")),
    ],
)
def test_results_in_the_orders_that_hide_latency_are_equal(arguments, cluster, form, monkeypatch):
    monkeypatch.setattr("autoshard.compiler.prefetches.LEAST_HELD_BYTES", 0)
    check(STEPS[form], arguments, cluster, {"data": 4, "tensor": 2}, 4, Schedule.LATENCY_HIDING)


def test_results_in_micro_batches_are_equal(arguments, cluster):
    weights, x = arguments
    check(in_micro_batches, (weights, jnp.concatenate([x, x[::-1]])), cluster, {"data": 4, "tensor": 2}, 3)


def check(step, arguments, cluster, mesh, seed, schedule=Schedule.LEAST_MEMORY):
    plan, num_away = drawn(step, arguments, cluster, mesh, seed, schedule)
    assert num_away > 0
    run = plan.jit(step)
    traced = str(jax.make_jaxpr(run)(*arguments))
    copies, expected = jax.device_put(arguments, may_alias=False), jax.jit(step)(*arguments)
    assert traced.count("= device_put") == 2 * num_away  # XLA:CPU has one memory, and no copies
    for ours, theirs in zip(jax.tree.leaves(run(*copies)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)

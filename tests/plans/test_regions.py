"""Programs that are split by hand in part: attention in a ring, and experts that tokens are sent to."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import MeshError
from autoshard.verify.devices import _is_installed

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"
BATCH, LENGTH, HEADS, DIM, EXPERTS = 4, 32, 2, 8, 8


def mesh(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def ring_attention(mesh, q, k, v):
    """Each device has its part of a sequence; keys and values go round (Liu, Zaharia, Abbeel, arXiv:2310.01889)."""
    size = mesh.shape["seq"]
    spec = P("data", "seq")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    def attend(q, k, v):
        def turn(carry, _):
            k, v, total, result = carry
            weights = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k))
            total += weights.sum(-1)
            result += jnp.einsum("bhqk,bkhd->bqhd", weights, v)
            k, v = (jax.lax.ppermute(x, "seq", [(i, (i + 1) % size) for i in range(size)]) for x in (k, v))
            return (k, v, total, result), None

        start = (k, v, jnp.zeros_like(q[..., 0]).swapaxes(1, 2), jnp.zeros_like(q))
        (_, _, total, result), _ = jax.lax.scan(turn, start, None, length=size)
        return result / total.swapaxes(1, 2)[..., None]

    return attend(q, k, v)


def experts(mesh, x, weights):
    """Every device has one expert, and sends a part of its tokens to each."""
    axes = tuple(mesh.shape)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(axes), P(axes)), out_specs=P(axes))
    def apply(x, weights):
        there = jax.lax.all_to_all(x, axes, 0, 0, tiled=True)
        return jax.lax.all_to_all(jnp.tanh(there @ weights[0]), axes, 0, 0, tiled=True)

    return apply(x.reshape(-1, x.shape[-1]), weights).reshape(x.shape)


def train_step(mesh, params, x):
    def loss(params):
        q, k, v = jnp.einsum("bsm,tmhd->tbshd", x, params["qkv"])
        h = x + ring_attention(mesh, q, k, v).reshape(x.shape)
        return jnp.mean((h + experts(mesh, h, params["experts"])) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments():
    rng, width = np.random.default_rng(0), HEADS * DIM
    draw = lambda *shape: jnp.asarray(0.2 * rng.normal(size=shape), jnp.float32)
    return {"qkv": draw(3, width, HEADS, DIM), "experts": draw(EXPERTS, width, width)}, draw(BATCH, LENGTH, width)


@pytest.fixture(scope="module")
def planned():
    step = functools.partial(train_step, mesh(data=2, seq=4))
    return step, autoshard.plan(step, *arguments(), cluster=CLUSTERS / "cpux8.yaml")


def test_their_mesh_is_planned_for(planned):
    _, plan = planned
    assert plan.axes == (("data", 2), ("seq", 4))


def test_the_step_stays_what_it_is(planned):
    step, plan = planned
    found, expected = plan.jit(step)(*arguments()), jax.jit(step)(*arguments())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_the_compiled_program_sends_what_was_predicted(planned):
    """In a ring of four, keys and values and their gradients are sent four times; tokens there and back, twice."""
    step, plan = planned
    flows = {(f.kind, f.axes): f for f in plan.verify(step, *arguments()).flows}
    ring, exchange = flows["collective-permute", ("seq",)], flows["all-to-all", ("data", "seq")]
    shard_bytes = 4 * BATCH * LENGTH * HEADS * DIM / 8
    assert ring.predicted_bytes == ring.compiled_bytes == 4 * 4 * shard_bytes
    assert exchange.predicted_bytes == exchange.compiled_bytes == 4 * 7 / 8 * shard_bytes


def test_three_axes_of_which_a_region_uses_one():
    """A mesh on which two of them are joined, as searches begin with, lacks the region's axis."""
    here = mesh(data=2, seq=2, tensor=2)

    def fn(w, x):
        shifted = lambda x: x + jax.lax.ppermute(x, "seq", [(0, 1), (1, 0)])
        return jax.shard_map(shifted, mesh=here, in_specs=P(None, "seq"), out_specs=P(None, "seq"))(x @ w)

    args = jnp.eye(8) * 2, jnp.arange(64.0).reshape(8, 8)
    plan = autoshard.plan(fn, *args, cluster=CLUSTERS / "cpux8.yaml")
    assert plan.axes == (("data", 2), ("seq", 2), ("tensor", 2))
    np.testing.assert_allclose(plan.jit(fn)(*args), jax.jit(fn)(*args))


def test_they_are_planned_for_devices_that_are_not_at_hand():
    step = functools.partial(train_step, AbstractMesh((2, 4), ("data", "seq"), (AxisType.Auto,) * 2))
    plan = autoshard.plan(step, *jax.eval_shape(arguments), cluster=CLUSTERS / "h100x8.yaml")
    assert plan.axes == (("data", 2), ("seq", 4))
    assert {c.kind for c in plan.estimate.communication} >= {"collective-permute", "all-to-all"}


def test_regions_for_several_meshes_are_refused():
    def fn(x):
        one = lambda x, mesh: jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("seq"), out_specs=P("seq"))(x)
        return one(one(x, mesh(data=2, seq=4)), mesh(data=4, seq=2))

    with pytest.raises(MeshError, match=r"at .*test_regions.py.*'seq': 4.* the one at .*test_regions.py.*'seq': 2"):
        autoshard.plan(fn, jnp.ones(8), cluster=CLUSTERS / "cpux8.yaml")


def test_a_mesh_of_another_number_of_devices_is_refused():
    step = functools.partial(train_step, mesh(data=2, seq=4))
    with pytest.raises(MeshError, match=r"'data': 2, 'seq': 4.*there are 16 devices.* of 16 devices"):
        autoshard.plan(step, *arguments(), cluster=Cluster.from_file(CLUSTERS / "h100x16.yaml"))


@pytest.mark.skipif(not _is_installed("jax_plugins.xla_cuda13"), reason="the compiler for GPUs is not installed")
def test_they_compile_for_devices_that_are_not_at_hand(monkeypatch):
    """A region that was traced for a mesh of CPU devices is compiled for GPUs, and sends what was predicted."""
    monkeypatch.setenv("XLA_FLAGS", "")  # this test process sets one that only XLA:CPU knows
    step = functools.partial(train_step, mesh(data=2, seq=4))
    plan = autoshard.plan(step, *arguments(), cluster=CLUSTERS / "h100x8.yaml")
    flows = {(f.kind, f.axes): f for f in plan.verify(step, *arguments(), target="h100").flows}
    for ours in (flows["collective-permute", ("seq",)], flows["all-to-all", ("data", "seq")]):
        assert ours.predicted_bytes == ours.compiled_bytes > 0

"""Programs in explicit mode: the layouts in their types are theirs when run by hand; a plan chooses its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec, reshard

import autoshard
from autoshard.errors import MeshError
from autoshard.trace.explicit import without_layouts

X = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
TOKENS = np.arange(64, dtype=np.int32) % 16
WEIGHTS = {"a": np.full((16, 32), 0.1, np.float32), "b": np.full((32, 16), 0.2, np.float32)}


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)


def placed(mesh):
    """Weights and batch as a user of explicit mode lays them out."""
    with jax.set_mesh(mesh):
        weights = {name: jax.device_put(w, PartitionSpec(None, "tensor")) for name, w in WEIGHTS.items()}
        return weights, jax.device_put(X, PartitionSpec("data")), jax.device_put(TOKENS, PartitionSpec("data"))


def loss_of(weights, x, tokens):
    """Layouts wherever explicit mode has them: operations, `reshard`, loops, branches, checkpoints and look-ups."""
    rows = weights["a"].at[tokens].get(out_sharding=PartitionSpec("data", "tensor"))
    hidden = jax.nn.relu(jnp.einsum("bd,dh->bh", x, weights["a"], out_sharding=PartitionSpec("data", "tensor")))
    hidden = reshard(hidden + rows, PartitionSpec("data", None))
    turned = reshard(weights["b"], PartitionSpec(None, None))

    @jax.checkpoint
    def layer(h, _):
        h = jnp.tanh(jnp.einsum("bh,hd->bd", h, turned, out_sharding=PartitionSpec("data", None)) @ turned.T)
        return reshard(h, PartitionSpec("data", None)), None

    hidden, _ = jax.lax.scan(layer, hidden, None, length=2)
    start = jnp.zeros((64, 32), out_sharding=PartitionSpec("data", None))
    return jnp.mean(jax.lax.cond(hidden.shape[0] > 3, lambda h: h + start, lambda h: h, hidden) ** 2)


def step(weights, x, tokens):
    loss, gradients = jax.value_and_grad(loss_of)(weights, x, tokens)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


@pytest.mark.parametrize("axes", [{"data": 4, "tensor": 2}, {"all": 8}], ids=str)
def test_a_typed_program_runs_in_the_layouts_of_its_plan(mesh, axes):
    arguments = placed(mesh)
    with jax.set_mesh(mesh):
        expected, expected_loss = jax.jit(step)(*arguments)
        plan = autoshard.plan(step, *arguments, mesh=axes)
        run = plan.jit(step)
        found, loss = run(*arguments)
        again, _ = run(found, *arguments[1:])
    assert not any("@" in text or "reshard" in text for text in plan.equations)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        assert ours.sharding.mesh.axis_names == tuple(axes)
    assert jax.tree.structure(again) == jax.tree.structure(found)


def test_what_is_planned_outside_runs_inside_and_the_reverse(mesh):
    def plain(weights, x):
        return jnp.mean(jax.nn.relu(x @ weights["a"]) @ weights["b"])

    outside = autoshard.plan(plain, WEIGHTS, X, mesh={"data": 8})
    with jax.set_mesh(mesh):
        inside = autoshard.plan(plain, WEIGHTS, X, mesh={"data": 8})
        result = outside.jit(plain)(WEIGHTS, X)
    np.testing.assert_allclose(result, inside.jit(plain)(WEIGHTS, X), rtol=1e-6)
    assert outside.equations == inside.equations


def test_a_module_in_explicit_mode_is_changed_in_place(mesh):
    def make():
        return nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def train(model, x):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda w, g: w - g, nnx.state(model), gradients))
        return loss

    model, expected = make(), make()
    nnx.jit(train)(expected, X)
    with jax.set_mesh(mesh):
        autoshard.plan(train, model, X, mesh={"data": 8}).jit(train)(model, X)
    np.testing.assert_allclose(model.kernel[...], expected.kernel[...], rtol=1e-5, atol=1e-6)


def test_a_region_over_the_axes_of_the_plan_stays(mesh):
    def fn(x):
        spec = PartitionSpec("data", None)
        shifted = lambda part: part + jax.lax.psum(part.sum(0, keepdims=True), "data")
        return jnp.sin(jax.shard_map(shifted, mesh=mesh, in_specs=spec, out_specs=spec)(x))

    with jax.set_mesh(mesh):
        x = jax.device_put(X, PartitionSpec("data"))
        plan = autoshard.plan(fn, x)
        assert dict(plan.axes) == {"data": 4, "tensor": 2}
        found = plan.jit(fn)(x)
        with pytest.raises(MeshError, match=r"region at .*test_explicit.py.* and mesh=\{'all': 8\} was asked for"):
            autoshard.plan(fn, x, mesh={"all": 8})
        np.testing.assert_allclose(found, jax.jit(fn)(x), rtol=1e-5, atol=1e-6)


def test_another_mesh_in_automatic_mode_does_not_disturb():
    around = jax.make_mesh((8,), ("other",), axis_types=(AxisType.Auto,))
    plain = lambda x: jnp.tanh(x @ x.T)
    with jax.set_mesh(around):
        result = autoshard.plan(plain, X, mesh={"data": 4, "tensor": 2}).jit(plain)(X)
    np.testing.assert_allclose(result, np.tanh(X @ X.T), rtol=1e-5, atol=1e-6)


def test_a_program_without_its_layouts_computes_the_same(mesh):
    arguments = placed(mesh)
    with jax.set_mesh(mesh):
        closed = jax.make_jaxpr(step)(*arguments)
    bare = without_layouts(closed)
    assert "@" in str(closed) and "@" not in str(bare) and "reshard" not in str(bare)
    results = jax.jit(jax.extend.core.jaxpr_as_fun(bare))(*jax.tree.leaves((WEIGHTS, X, TOKENS)))
    with jax.set_mesh(mesh):
        expected = jax.tree.leaves(jax.jit(step)(*arguments))
    for ours, theirs in zip(results, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)

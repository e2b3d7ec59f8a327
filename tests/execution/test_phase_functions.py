"""A stage that is run part by part under random layouts makes what its joint function makes on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.pipelines.cost.stage import TracedStage, trace_stage
from autoshard.pipelines.run.phase_functions import phase_functions
from autoshard.pipelines.split.forward import trace_forward
from autoshard.pipelines.split.layer_boundaries import find_layers
from autoshard.pipelines.split.stage_program import StageSplitter
from autoshard.train_step import TrainStep

MESH = {"data": 4, "tensor": 2}
WIDTH, ROWS = 16, 8


@pytest.fixture(scope="module")
def stage() -> TracedStage:
    """The middle of a small model: it has inputs, outputs, dropout, a norm with running averages and a metric."""

    def loss(params, mutable, batch, key):
        x = batch @ params["in"]
        hidden = jax.nn.gelu(x @ params["up"])
        mean = jnp.mean(hidden, 0)
        hidden = jnp.where(jax.random.bernoulli(key, 0.8, hidden.shape), hidden - mean, 0.0)
        new, size = {"mean": 0.9 * mutable["mean"] + 0.1 * mean}, jnp.mean(hidden**2)
        x = x + hidden @ params["down"]
        return jnp.mean((x @ params["out"]) ** 2), (new, {"size": size})

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    names = {"in": (WIDTH, WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    step = TrainStep(loss, optax.sgd(0.1), has_mutable=True)
    params, mutable = {n: shape(*sizes) for n, sizes in names.items()}, {"mean": shape(2 * WIDTH)}
    state = jax.eval_shape(lambda p, m: step.init(p, jax.random.key(0), m), params, mutable)
    forward = trace_forward(step, state, shape(ROWS, WIDTH), ROWS)
    cuts = find_layers(forward)
    assert cuts.num_layers == 3
    return trace_stage(forward, StageSplitter(forward, cuts).program(1, 2))


@pytest.mark.parametrize("seed", [0, 1])
def test_parts_equal_the_joint_function(stage, random_plan, seed):
    plan = random_plan(stage.function, stage.arguments, MESH, seed, (0,))
    devices = np.array(jax.devices()[:8]).reshape(tuple(MESH.values()))
    mesh = jax.sharding.Mesh(devices, tuple(MESH), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    parts = phase_functions(stage.trace, plan.interface, mesh, stage.split_backward, list(stage.slots.sums), "stage")
    rng = np.random.default_rng(seed)
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    flat = [
        jax.random.key(1) if is_key(x) else jnp.asarray(rng.normal(size=x.shape), x.dtype)
        for x in jax.tree.leaves(stage.arguments)
    ]
    expected = jax.tree.leaves(jax.jit(stage.function)(*jax.tree.unflatten(jax.tree.structure(stage.arguments), flat)))

    def run(part, held):
        given = {n: jax.device_put(flat[n], part.sharding(n)) for n in part.part.given}
        return part(given, held)

    forward = run(parts.forward, ())
    held = dict(zip(stage.split_backward.residuals, forward.residuals, strict=True))
    backward = run(parts.backward, forward.residuals)
    weight = run(parts.weight, [*(held[v] for v in stage.split_backward.kept_residuals), *backward.residuals])
    found = forward.results | backward.results | weight.results
    assert sorted(found) == list(range(len(expected)))
    for n, x in found.items():
        np.testing.assert_allclose(x, expected[n], rtol=1e-4, atol=1e-5)
    assert any(not x.is_fully_replicated for x in found.values())

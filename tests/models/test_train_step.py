"""What training steps do whatever the model: accumulation, loss scaling, mutable state, optimizers, types."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import zoo_checks
from autoshard_models import optimizers
from autoshard_models.loss_scaling import LossScaling
from autoshard_models.losses import binary_cross_entropy, cross_entropy
from autoshard_models.objective import Objective, nnx_objective
from autoshard_models.train_step import StepOptions, build, build_for
from autoshard_models.zoo import FAMILIES
from flax import nnx


def regression(dtype=jnp.float32) -> Objective:
    """A linear regression without a bias, its mean target as a mutable average."""

    def loss(params, mutable, batch, _):
        error = (batch["x"].astype(dtype) @ params["w"].astype(dtype)).astype(jnp.float32) - batch["y"]
        return jnp.mean(error**2), ({"seen": mutable["seen"] * 0.5 + jnp.mean(batch["y"])}, {"error": jnp.mean(error)})

    return Objective(lambda key: ({"w": jax.random.normal(key, (3,))}, {"seen": jnp.zeros(())}), loss)


def data(seed: int = 0, size: int = 8) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(rng.normal(size=(size, 3)), jnp.float32),
        "y": jnp.asarray(rng.normal(size=size), jnp.float32),
    }


def test_gradients_of_parts_add_up_to_those_of_the_whole():
    whole = build_for(regression(), optax.sgd(0.1))
    parts = build_for(regression(), optax.sgd(0.1), StepOptions(num_micro_batches=4))
    (state, metrics), (found, found_metrics) = (jax.jit(f.step)(f.init(0), data()) for f in (whole, parts))
    zoo_checks.assert_close(found.params, state.params, 1e-5, 1e-6)
    zoo_checks.assert_close(found_metrics, metrics, 1e-5, 1e-6)


def test_mutable_state_passes_from_part_to_part():
    """Part n of 4 holds examples n and n + 4 of 8."""
    functions, batch = build_for(regression(), optax.sgd(0.1), StepOptions(num_micro_batches=4)), data()
    state, _ = jax.jit(functions.step)(functions.init(0), batch)
    expected = 0.0
    for part in range(4):
        expected = expected * 0.5 + float(batch["y"][part::4].mean())
    assert float(state.mutable["seen"]) == pytest.approx(expected, rel=1e-5)


def test_parts_must_divide_the_batch():
    functions = build_for(regression(), optax.sgd(0.1), StepOptions(num_micro_batches=3))
    with pytest.raises(ValueError, match="num_micro_batches=3, batch=8"):
        functions.step(functions.init(0), data())


def test_a_finite_scaled_step_is_the_plain_one():
    plain = build_for(regression(), optax.sgd(0.1))
    scaled = build_for(regression(), optax.sgd(0.1), StepOptions(loss_scaling=LossScaling(initial=1024.0)))
    (state, metrics), (found, found_metrics) = (jax.jit(f.step)(f.init(0), data()) for f in (plain, scaled))
    zoo_checks.assert_close(found.params, state.params, 1e-6, 1e-7)
    assert float(found_metrics["loss"]) == pytest.approx(float(metrics["loss"]))
    assert float(found_metrics["loss_scale"]) == 1024 and float(found_metrics["is_finite"]) == 1


def test_the_scale_doubles_after_finite_steps_and_halves_after_others():
    """Two finite steps double the scale; an infinite batch halves it and leaves all else but the step alone."""
    functions = build_for(
        regression(), optimizers.sgd(), StepOptions(loss_scaling=LossScaling(initial=8.0, growth_steps=2))
    )
    step, state, scales = jax.jit(functions.step), functions.init(0), []
    bad = data() | {"y": data()["y"].at[0].set(jnp.inf)}
    for batch in (data(0), data(1), bad, data(2)):
        before, (state, metrics) = state, step(state, batch)
        scales.append(float(state.loss_scale.scale))
        if batch is bad:
            kept = lambda state: (state.params, state.opt_state, state.mutable)
            jax.tree.map(np.testing.assert_array_equal, kept(state), kept(before))
            assert float(metrics["is_finite"]) == 0
    assert scales == [8, 16, 8, 8] and int(state.step) == 4


def test_scaling_saves_gradients_that_float16_would_lose():
    """Gradients near 1e-9 are zero in float16; times 2 ** 15 they are not."""
    tiny = jax.tree.map(lambda x: x * 1e-5, data())
    plain = build_for(regression(jnp.float16), optax.sgd(1.0))
    scaled = build_for(regression(jnp.float16), optax.sgd(1.0), StepOptions(loss_scaling=LossScaling()))
    moved = {}
    for name, functions in {"plain": plain, "scaled": scaled}.items():
        state = functions.init(0).replace(params={"w": jnp.zeros(3)})
        moved[name] = jax.jit(functions.step)(state, tiny)[0].params["w"]
    expected = jax.grad(lambda w: jnp.mean((tiny["x"] @ w - tiny["y"]) ** 2))(jnp.zeros(3))
    np.testing.assert_allclose(moved["scaled"], -expected, rtol=0.05)
    assert not np.allclose(moved["plain"], -expected, rtol=0.5, atol=0)


def test_random_models_get_a_new_key_each_step_and_part():
    drawn = nnx_objective(
        lambda rngs: nnx.Linear(1, 1, rngs=rngs),
        lambda module, batch, key: (jax.random.uniform(key) + 0 * module(batch["x"]).sum(), {}),
        is_random=True,
    )
    batch = {"x": jnp.ones((4, 1))}
    functions = build_for(drawn, optax.sgd(0.1))
    state, first = functions.step(functions.init(0), batch)
    _, second = functions.step(state, batch)
    parts = build_for(drawn, optax.sgd(0.1), StepOptions(num_micro_batches=2))
    _, mean = parts.step(parts.init(0), batch)
    assert len({float(metrics["loss"]) for metrics in (first, second, mean)}) == 3


def test_optimizers_decay_clip_and_factor():
    params, gradient = {"w": jnp.full((8, 4), 2.0)}, {"w": jnp.full((8, 4), 100.0)}
    moved = lambda optimizer, gradient: optimizer.update(gradient, optimizer.init(params), params)[0]["w"]
    clipped = moved(optimizers.sgd(1.0, clip_norm=1.0), gradient)
    assert float(jnp.linalg.norm(clipped)) == pytest.approx(1.0, rel=1e-5)
    decayed = moved(optimizers.sgd(1.0, weight_decay=0.25), jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_allclose(decayed, -0.5 * jnp.ones((8, 4)))
    state = optimizers.adafactor(min_dim_size_to_factor=4, clip_norm=1.0).init(params)
    assert zoo_checks.count(state) < 32 + 8 + 4 + 8  # row and column sums, not a number for each parameter


def test_losses_are_those_of_optax():
    logits = jax.random.normal(jax.random.key(0), (6, 5)) * 4
    labels, weights = jnp.array([0, 4, 2, 2, 1, 3]), jnp.array([1.0, 0, 1, 1, 0, 2])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    np.testing.assert_allclose(cross_entropy(logits, labels, weights), (each * weights).sum() / 5, rtol=1e-6)
    assert float(cross_entropy(logits, labels, jnp.zeros(6))) == 0
    clicks = (labels > 1).astype(jnp.float32)
    expected = optax.sigmoid_binary_cross_entropy(logits[:, 0], clicks).mean()
    np.testing.assert_allclose(binary_cross_entropy(logits[:, 0], clicks), expected, rtol=1e-6)


def test_unknown_configurations_are_refused():
    with pytest.raises(TypeError, match="LlamaConfig"):
        build("llama", optax.sgd(0.1))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_keeps_its_types_in_mixed_precision(name):
    """Parameters stay float32, whatever computes; batches are as the family states them."""
    family = FAMILIES[name]
    changes = {"dtype": jnp.bfloat16} | ({"remat": True} if hasattr(family.presets["tiny"], "remat") else {})
    config = dataclasses.replace(family.presets["tiny"], **changes)
    functions = build(config, optimizers.adamw(), StepOptions(loss_scaling=LossScaling()))
    state = jax.eval_shape(functions.init, 0)
    new_state, metrics = jax.eval_shape(functions.step, state, family.batch_shapes(config, 8))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new_state) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert metrics["loss"].shape == () and metrics["loss"].dtype == jnp.float32


@pytest.mark.parametrize("name", FAMILIES)
def test_no_two_families_share_a_configuration_class(name):
    assert [family for family in FAMILIES.values() if family.config is FAMILIES[name].config] == [FAMILIES[name]]

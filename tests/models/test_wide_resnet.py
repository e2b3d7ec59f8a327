"""Wide residual networks: sizes against print, running averages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo_checks
from autoshard_models.optimizers import sgd
from autoshard_models.train_step import build
from autoshard_models.wide_resnet import PRESETS, ConvNorm

SMALL = dataclasses.replace(PRESETS["tiny"], remat=True)


@pytest.mark.parametrize(
    ("name", "published"),
    [("250m", 250e6), ("1b", 1e9), ("2b", 2e9), ("4b", 4e9), ("6.8b", 6.8e9), ("13b", 13e9)],
)
def test_presets_have_their_published_size(name, published):
    assert zoo_checks.num_params(build(PRESETS[name], sgd())) == pytest.approx(published, rel=0.05)


def test_running_averages_follow_the_batch():
    layer = ConvNorm(dataclasses.replace(SMALL, momentum=0.75), 3, 4, 1, rngs=zoo_checks.rngs())
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2, 2, 3)), jnp.float32)
    given, convolved = layer(x, True), layer.conv(x)
    np.testing.assert_allclose(given.mean((0, 1, 2)), jnp.zeros(4), atol=1e-6)
    np.testing.assert_allclose(layer.norm.mean, 0.25 * convolved.mean((0, 1, 2)), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(layer.norm.var, 0.75 + 0.25 * convolved.var((0, 1, 2)), rtol=1e-4)


def test_evaluation_norms_by_running_averages_so_that_each_image_counts_alone():
    functions = build(SMALL, sgd())
    evaluate, batch = jax.jit(functions.evaluate), zoo_checks.images_of(SMALL)
    state = jax.jit(functions.init)(0)
    parts = [jax.tree.map(lambda leaf, n=n: leaf[n : n + 4], batch) for n in (0, 4)]
    alone = [float(evaluate(state, part)["loss"]) for part in parts]
    assert float(evaluate(state, batch)["loss"]) == pytest.approx(sum(alone) / 2, rel=1e-5)

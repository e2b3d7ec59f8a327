"""GPT training under plans drawn at random, unrolled with dropout or scanned with remat, goes as it does unsharded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autoshard_models import train_step
from autoshard_models.gpt_linen import LinenGPTConfig
from autoshard_models.presets import preset

SIZES = dict(embed_dim=16, num_heads=2, context_length=8, vocab_size=64)


def unrolled():
    return preset("tiny", num_layers=1, dropout_rate=0.1, **SIZES)


def scanned():
    base = preset("tiny", num_layers=2, remat=True, **SIZES)
    return LinenGPTConfig(**{f.name: getattr(base, f.name) for f in dataclasses.fields(base)}, scan_layers=True)


SCANNED = pytest.param(scanned, {"a": 2, "b": 2, "c": 2}, marks=pytest.mark.exhaustive)
"""Scans under such plans are those of test_functions.py and test_random_programs.py, too."""


@pytest.mark.slow
@pytest.mark.parametrize(("config", "mesh"), [(unrolled, {"a": 2, "b": 4}), SCANNED], ids=["nnx", "linen_scan"])
def test_steps_of_training(config, mesh, random_plan):
    functions = train_step.build(config(), optax.sgd(0.1, momentum=0.9))
    tokens = jax.random.randint(jax.random.key(1), (2, 8, 8), 0, 64)
    batch = {"inputs": tokens[0], "targets": tokens[1]}
    state = functions.init(0)
    plan = random_plan(functions.step, (state, batch), mesh, 3, (0,))
    planned, reference = plan.jit(functions.step), jax.jit(functions.step)
    sharded = plan.init(functions.init, 0)
    for _ in range(2):
        sharded, found = planned(sharded, batch)
        state, expected = reference(state, batch)
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    bits = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    for x, y in zip(jax.tree.leaves(sharded.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-5)
    assert np.array_equal(bits(sharded.rng), bits(state.rng)) and sharded.step == 2

"""The T5-like encoder-decoder: sizes against print, distance buckets, causality."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo_checks
from autoshard_models import encoder_decoder as t5
from autoshard_models.optimizers import adamw
from autoshard_models.train_step import build
from flax import nnx

SMALL = dataclasses.replace(
    t5.PRESETS["tiny"],
    vocab_size=32,
    input_length=12,
    target_length=8,
    num_layers=1,
    head_dim=8,
    embed_dim=32,
    hidden_dim=32,
    num_buckets=8,
    max_distance=16,
)


def batch_of(seed: int = 0, batch_size: int = 8) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    tokens = lambda length: rng.integers(1, 32, (batch_size, length), dtype=np.int32)
    prefix = lambda length: np.arange(length) < rng.integers(length // 2, length + 1, (batch_size, 1))
    targets = tokens(8)
    batch = {
        "inputs": tokens(12),
        "is_input": prefix(12),
        "shifted_targets": np.concatenate([np.zeros((batch_size, 1), np.int32), targets[:, :-1]], axis=1),
        "targets": targets,
        "is_target": prefix(8),
    }
    return jax.tree.map(jnp.asarray, batch)


@pytest.mark.parametrize(("name", "published"), [("base", 248e6), ("3b", 2.85e9), ("11b", 11.1e9)])
def test_presets_have_their_published_size(name, published):
    assert zoo_checks.num_params(build(t5.PRESETS[name], adamw())) == pytest.approx(published, rel=0.01)


def test_distances_are_exact_when_small_and_bounded_when_large():
    """8 buckets, 16 positions: causal ones are exact up to 3, then 4 for 4-5, 5 for 6-7, 6 for 8-11, 7 from 12 on."""
    offset = -jnp.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 100])
    found = t5.distance_buckets(offset, 8, 16, is_causal=True)
    np.testing.assert_array_equal(found, [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7])
    both = t5.distance_buckets(jnp.array([-1, 0, 1, 100, -100]), 8, 16, is_causal=False)
    np.testing.assert_array_equal(both, [1, 0, 5, 7, 3])


def test_batches_are_as_stated():
    stated = t5.batch_shapes(SMALL, 8)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), batch_of()) == jax.tree.map(lambda x: (x.shape, x.dtype), stated)


def test_later_targets_and_padding_are_not_seen():
    model, batch = t5.EncoderDecoder(SMALL, rngs=nnx.Rngs(0)), batch_of()
    is_input = batch["is_input"].at[:, 6:].set(False)
    run = nnx.jit(lambda model, *args: model(*args))
    logits = run(model, batch["inputs"], is_input, batch["shifted_targets"])
    changed = run(model, batch["inputs"].at[:, 6:].set(3), is_input, batch["shifted_targets"].at[:, 4:].set(3))
    np.testing.assert_allclose(changed[:, :4], logits[:, :4], rtol=1e-5, atol=1e-6)
    assert not np.allclose(changed[:, 4:], logits[:, 4:], atol=1e-3)

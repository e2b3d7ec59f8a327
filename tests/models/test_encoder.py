"""The BERT-like encoder: sizes against print, masking."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo_checks
from autoshard_models import encoder
from autoshard_models.train_step import adamw, build
from flax import nnx

SMALL = dataclasses.replace(encoder.PRESETS["tiny"], vocab_size=32, context_length=12, num_layers=1, embed_dim=32)


def batch_of(seed: int = 0, batch_size: int = 8) -> dict[str, jax.Array]:
    rng, shape = np.random.default_rng(seed), (batch_size, SMALL.context_length)
    targets, is_masked = rng.integers(1, 32, shape, dtype=np.int32), rng.random(shape) < 0.3
    lengths = rng.integers(6, 13, (batch_size, 1))
    batch = {
        "inputs": np.where(is_masked, 0, targets),
        "segments": (np.arange(12) >= lengths // 2).astype(np.int32),
        "is_token": np.arange(12) < lengths,
        "is_masked": is_masked,
        "targets": targets,
        "follows": rng.integers(2, size=batch_size, dtype=np.int32),
    }
    return jax.tree.map(jnp.asarray, batch)


@pytest.mark.parametrize(("name", "published"), [("base", 110e6), ("large", 340e6), ("10b", 10e9)])
def test_presets_have_their_published_size(name, published):
    assert zoo_checks.num_params(build(encoder.PRESETS[name], adamw())) == pytest.approx(published, rel=0.03)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="num_heads=3"):
        dataclasses.replace(SMALL, num_heads=3)


def test_batches_are_as_stated():
    stated = encoder.batch_shapes(SMALL, 8)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), batch_of()) == jax.tree.map(lambda x: (x.shape, x.dtype), stated)


def test_padding_is_not_seen():
    model, batch = encoder.Encoder(SMALL, rngs=nnx.Rngs(0)), batch_of()
    is_token = batch["is_token"].at[:, 6:].set(False)
    changed = batch["inputs"].at[:, 6:].set(3)
    run = nnx.jit(lambda model, *args: model(*args))
    logits = run(model, batch["inputs"], batch["segments"], is_token)[0]
    np.testing.assert_array_equal(run(model, changed, batch["segments"], is_token)[0][:, :6], logits[:, :6])

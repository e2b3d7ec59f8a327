"""Llama: sizes against print, rotations, grouped heads, decoding with a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo_checks
from autoshard_models import llama
from autoshard_models.layers import attention, causal_attention, rotate, rotation
from autoshard_models.train_step import adamw, build
from flax import nnx

SMALL = dataclasses.replace(
    llama.PRESETS["tiny"],
    vocab_size=64,
    context_length=16,
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    embed_dim=32,
    hidden_dim=48,
    attention_chunks=2,
    remat=True,
)


@pytest.mark.parametrize(("name", "published"), [("8b", 8.03e9), ("70b", 70.6e9)])
def test_presets_have_their_published_size(name, published):
    assert zoo_checks.num_params(build(llama.PRESETS[name], adamw())) == pytest.approx(published, rel=1e-3)


def test_unfitting_heads_are_refused():
    with pytest.raises(ValueError, match="num_kv_heads=3"):
        dataclasses.replace(SMALL, num_kv_heads=3)
    with pytest.raises(ValueError, match="head_dim=5"):
        dataclasses.replace(SMALL, head_dim=5)


def test_rotated_products_depend_on_the_distance_alone():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 2, 8))
    turned = lambda x, position: rotate(x, rotation(jnp.array([position]), 8, 100.0))
    product = lambda m, n: float((turned(query, m) * turned(key, n)).sum())
    assert product(5, 2) == pytest.approx(product(13, 10), rel=1e-5)
    assert product(5, 2) != pytest.approx(product(5, 3), rel=1e-2)


def test_a_group_attends_as_if_it_had_keys_of_its_own():
    query = jax.random.normal(jax.random.key(0), (2, 6, 3, 2, 4))
    key, value = jax.random.normal(jax.random.key(1), (2, 2, 6, 3, 4))
    repeat = lambda x: jnp.repeat(x, 2, axis=2)
    expected = attention(query.reshape(2, 6, 6, 4), repeat(key), repeat(value))
    np.testing.assert_allclose(attention(query, key, value).reshape(2, 6, 6, 4), expected, rtol=1e-5, atol=1e-6)


def test_chunks_change_nothing():
    """Neither the answer nor the gradients."""
    query = jax.random.normal(jax.random.key(0), (2, 6, 3, 2, 4))
    key, value = jax.random.normal(jax.random.key(1), (2, 2, 6, 3, 4))
    run = lambda n: jax.jit(
        jax.value_and_grad(lambda *qkv: jnp.sum(jnp.sin(causal_attention(*qkv, num_chunks=n))), (0, 1, 2))
    )(query, key, value)
    zoo_checks.assert_close(run(3), run(1), 1e-5, 1e-6)
    with pytest.raises(ValueError, match="num_chunks=4, length=6"):
        causal_attention(query, key, value, 4)


def test_decoding_equals_the_full_pass_token_by_token():
    config = dataclasses.replace(SMALL, num_layers=2)
    params = jax.jit(build(config, adamw()).init)(0).params
    tokens = zoo_checks.tokens_of(64, 2, 12)["inputs"]
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0))))
    zoo_checks.assert_decodes(config, params, lambda tokens: nnx.merge(graphdef, params)(tokens), tokens)

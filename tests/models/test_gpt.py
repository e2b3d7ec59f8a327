"""The GPT family: sizes against print, NNX against Linen, scanned against unrolled, remat, causality."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autoshard_models.gpt import GPTConfig
from autoshard_models.gpt_linen import LinenGPTConfig
from autoshard_models.layers import causal_attention
from autoshard_models.presets import PADDED_VOCAB_SIZE, PRESETS, preset
from autoshard_models.train_step import TrainState, adamw, batch_shapes, build, cross_entropy

SMALL = GPTConfig(vocab_size=32, context_length=16, num_layers=2, num_heads=2, embed_dim=16)
SMALL_LINEN = LinenGPTConfig(**dataclasses.asdict(SMALL))
SGD = optax.sgd(0.5)


def batch_of(vocab_size: int, batch_size: int = 4, sequence_length: int = 12, seed: int = 0) -> dict[str, jax.Array]:
    tokens = np.random.default_rng(seed).integers(vocab_size, size=(batch_size, sequence_length + 1), dtype=np.int32)
    return {"inputs": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}


def count(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def linen_params_of(nnx_params):
    """The NNX model's parameters, by the same names, in the tree of the unrolled Linen model."""
    rest = {name: value for name, value in nnx_params.items() if name != "blocks"}
    return rest | {f"block_{layer}": block for layer, block in nnx_params["blocks"].items()}


def stacked(linen_params):
    """Unrolled Linen parameters in the tree of the scanned model."""
    rest = {name: value for name, value in linen_params.items() if not name.startswith("block_")}
    layers = [linen_params[f"block_{layer}"] for layer in range(SMALL.num_layers)]
    return rest | {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def formula_param_count(config: GPTConfig) -> int:
    """By hand: embeddings; per block 4 square projections, 2 MLP matrices of ratio 4, their biases, 2 norms; 1 norm."""
    width = config.embed_dim
    block = 4 * width * width + 4 * width + 8 * width * width + 5 * width + 4 * width
    return (config.vocab_size + config.context_length) * width + config.num_layers * block + 2 * width


@pytest.mark.parametrize("name", PRESETS)
def test_param_count_is_the_formula(name):
    """Of two layers: there is one formula for all of them."""
    config = dataclasses.replace(preset(name), num_layers=2)
    state = jax.eval_shape(build(config, optax.sgd(0.1)).init, 0)
    assert count(state.params) == formula_param_count(config)


@pytest.mark.parametrize(
    ("name", "published"),
    [("125m", 125e6), ("350m", 350e6), ("1.3b", 1.3e9), ("2.6b", 2.6e9), ("6.7b", 6.7e9), ("13b", 13e9), ("39b", 39e9)]
    + [("175b", 175e9)],
)
def test_presets_have_their_published_size(name, published):
    assert formula_param_count(preset(name)) == pytest.approx(published, rel=0.025)


def test_padded_vocabulary_is_the_next_multiple_of_1024():
    assert PADDED_VOCAB_SIZE == math.ceil(50_257 / 1024) * 1024


def test_preset_names_and_overrides():
    assert preset("tiny", num_layers=7).num_layers == 7
    with pytest.raises(KeyError, match="175b"):
        preset("176b")


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="num_heads=3"):
        dataclasses.replace(SMALL, num_heads=3)


def test_175b_traces_without_allocating():
    """A twelfth of its layers, of which weights and moments take 200 GB."""
    functions = build(preset("175b", num_layers=8), adamw())
    state = jax.eval_shape(functions.init, 0)
    new_state, metrics = jax.eval_shape(functions.step, state, batch_shapes(1536, 2048))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new_state) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert metrics["loss"].shape == () and metrics["loss"].dtype == jnp.float32


@pytest.mark.parametrize("config", [SMALL, SMALL_LINEN, dataclasses.replace(SMALL_LINEN, scan_layers=True)])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_state_keeps_its_types_over_a_step(config, tie_embeddings):
    config = dataclasses.replace(
        config, tie_embeddings=tie_embeddings, dtype=jnp.bfloat16, dropout_rate=0.1, remat=True
    )
    functions = build(config, adamw())
    state = jax.eval_shape(functions.init, 0)
    new_state, _ = jax.eval_shape(functions.step, state, batch_shapes(2, 16))
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new_state) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


def test_first_loss_is_that_of_a_uniform_guess():
    functions = build(SMALL, optax.sgd(0.1))
    _, metrics = jax.jit(functions.step)(jax.jit(functions.init)(0), batch_of(SMALL.vocab_size))
    assert float(metrics["loss"]) == pytest.approx(math.log(SMALL.vocab_size), abs=0.05)


def test_cross_entropy_is_optax():
    logits = jax.random.normal(jax.random.key(0), (3, 5, 11)) * 4
    targets = jax.random.randint(jax.random.key(1), (3, 5), 0, 11)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    np.testing.assert_allclose(cross_entropy(logits, targets), expected, rtol=1e-6)


@functools.cache
def first_params(config: GPTConfig):
    return jax.jit(build(config, SGD).init)(0).params


@functools.cache
def sgd_step(config: GPTConfig):
    return jax.jit(build(config, SGD).step)


def after_one_step(config: GPTConfig, params):
    """Loss and updated parameters of one SGD step from `params`."""
    state = TrainState(jnp.zeros((), jnp.int32), params, SGD.init(params), jax.random.key(0))
    state, metrics = sgd_step(config)(state, batch_of(config.vocab_size))
    return metrics["loss"], state.params


def assert_same_step(left, right):
    np.testing.assert_allclose(left[0], right[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), left[1], right[1])


def test_linen_steps_as_nnx_does():
    params = first_params(SMALL)
    loss, new_params = after_one_step(SMALL, params)
    assert_same_step((loss, linen_params_of(new_params)), after_one_step(SMALL_LINEN, linen_params_of(params)))


def test_scanned_steps_as_unrolled_does():
    scanned_config = dataclasses.replace(SMALL_LINEN, scan_layers=True)
    params = first_params(SMALL_LINEN)
    loss, new_params = after_one_step(SMALL_LINEN, params)
    assert_same_step((loss, stacked(new_params)), after_one_step(scanned_config, stacked(params)))


@pytest.mark.parametrize("config", [SMALL, dataclasses.replace(SMALL_LINEN, scan_layers=True)])
def test_remat_changes_nothing_but_recomputes(config):
    with_remat = dataclasses.replace(config, remat=True)
    params = first_params(config)
    assert_same_step(after_one_step(config, params), after_one_step(with_remat, params))
    functions = build(with_remat, optax.sgd(0.5))
    program = jax.make_jaxpr(functions.step)(jax.eval_shape(functions.init, 0), batch_shapes(2, 16))
    assert "remat" in str(program) or "checkpoint" in str(program)


def test_a_later_token_leaves_earlier_positions_alone():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 6, 2, 4))
    changed = causal_attention(query, key.at[:, 4:].add(1.0), value.at[:, 4:].add(1.0))
    same = causal_attention(query, key, value)
    np.testing.assert_array_equal(changed[:, :4], same[:, :4])
    assert not np.allclose(changed[:, 4:], same[:, 4:])


@pytest.mark.parametrize("config", [SMALL, SMALL_LINEN])
def test_dropout_depends_on_the_step_alone(config):
    functions = build(dataclasses.replace(config, dropout_rate=0.5), optax.sgd(0.0))
    step = jax.jit(functions.step)
    state, batch = jax.jit(functions.init)(0), batch_of(config.vocab_size)
    next_state, first = step(state, batch)
    _, again = step(state, batch)
    _, second = step(next_state, batch)
    assert first["loss"] == again["loss"] and first["loss"] != second["loss"]
    assert int(next_state.step) == 1


def test_loss_falls_on_a_fixed_batch():
    functions = build(SMALL, adamw(learning_rate=1e-2, weight_decay=0.0))
    step, state, batch = jax.jit(functions.step), jax.jit(functions.init)(0), batch_of(SMALL.vocab_size)
    first = last = math.nan
    for index in range(40):
        state, metrics = step(state, batch)
        first, last = (metrics["loss"] if index == 0 else first), metrics["loss"]
    assert last < 0.5 * first

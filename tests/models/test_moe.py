"""Mixture of experts: sizes against print, routing by hand, the balance loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo_checks
from autoshard_models import moe
from autoshard_models.optimizers import adamw
from autoshard_models.train_step import build
from flax import nnx

SMALL = dataclasses.replace(
    moe.PRESETS["tiny"], vocab_size=32, context_length=8, num_layers=1, embed_dim=16, hidden_dim=32
)

route = jax.jit(moe.route, static_argnames=("experts_per_token", "capacity"))


@pytest.mark.parametrize(("name", "published"), [("10b", 10e9), ("100b", 100e9), ("1t", 1e12)])
def test_presets_have_their_published_size(name, published):
    assert zoo_checks.num_params(build(moe.PRESETS[name], adamw())) == pytest.approx(published, rel=0.1)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="experts_per_token=9, num_experts=8"):
        dataclasses.replace(SMALL, experts_per_token=9)
    with pytest.raises(ValueError, match="num_heads=3"):
        dataclasses.replace(SMALL, num_heads=3)


def test_capacity_is_the_even_share_times_the_factor():
    config = dataclasses.replace(SMALL, num_experts=8, experts_per_token=2, capacity_factor=1.25)
    assert config.capacity(64) == 20 and config.capacity(1) == 1


def test_tokens_beyond_the_capacity_pass_by():
    """Three tokens that all want expert 0, then 1; expert 0 takes the first two, expert 1 their second choices."""
    logits = jnp.log(jnp.array([[[0.6, 0.3, 0.1]] * 3]))
    routing = route(logits, experts_per_token=2, capacity=2)
    expected = np.zeros((1, 3, 3, 2), np.float32)
    for token in range(2):
        expected[0, token, 0, token] = 0.6 / 0.9
        expected[0, token, 1, token] = 0.3 / 0.9
    np.testing.assert_allclose(routing.combine, expected, rtol=1e-5)
    assert float(routing.dropped) == pytest.approx(1 / 3)


def test_second_choices_queue_behind_first_ones():
    """Token 0 wants expert 1 second, token 1 wants it first: the one place is token 1's."""
    logits = jnp.log(jnp.array([[[0.6, 0.4], [0.3, 0.7]]]))
    combine = route(logits, experts_per_token=2, capacity=1).combine
    assert combine[0, 1, 1, 0] > 0 and combine[0, 0, 1].sum() == 0


def test_balance_loss_is_one_if_even_and_the_number_of_experts_at_worst():
    even = 50.0 * jnp.eye(4)[None]
    assert float(route(even, 1, 4).balance_loss) == pytest.approx(1.0, rel=1e-5)
    assert float(route(even[:, :1].repeat(4, axis=1), 1, 4).balance_loss) == pytest.approx(4.0, rel=1e-5)


def test_experts_answer_as_one_by_one():
    """With places for all, the layer is the weighted sum of its experts' answers, computed densely."""
    config = dataclasses.replace(SMALL, num_experts=4, capacity_factor=4.0)

    @jax.jit
    def both_ways(x):
        layer = moe.Experts(config, rngs=nnx.Rngs(0))
        probabilities = jax.nn.softmax(layer.router(x))
        kept = jnp.where(probabilities >= jnp.sort(probabilities)[..., -2:-1], probabilities, 0)
        answers = jnp.einsum("bsef,efd->bsed", jax.nn.gelu(jnp.einsum("bsd,edf->bsef", x, layer.up)), layer.down)
        return layer(x)[0], jnp.einsum("bse,bsed->bsd", kept / kept.sum(-1, keepdims=True), answers)

    found, expected = both_ways(np.random.default_rng(1).normal(size=(2, 8, 16)).astype(np.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)

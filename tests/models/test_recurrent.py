"""The recurrent language model: size by hand, the recurrence against a loop, causality."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo_checks
from autoshard_models import recurrent
from autoshard_models.train_step import adamw, build

SMALL = dataclasses.replace(
    recurrent.PRESETS["tiny"], vocab_size=32, context_length=8, num_layers=1, embed_dim=16, state_dim=16, hidden_dim=32
)


@pytest.mark.parametrize(("name", "about"), [("1b", 1.5e9), ("7b", 7.7e9)])
def test_param_count_is_the_formula(name, about):
    """A block: 5 matrices of width x width with biases, the decay, 3 of width x 3 width, 2 norms."""
    config = recurrent.PRESETS[name]
    width = config.embed_dim
    block = 5 * (width * width + width) + width + 9 * width * width + 2 * width
    expected = config.vocab_size * width + config.num_layers * block + width
    assert zoo_checks.num_params(build(config, adamw())) == expected == pytest.approx(about, rel=0.05)


def test_recurrence_is_the_loop():
    decay, inputs = np.random.default_rng(0).uniform(size=(2, 3, 5, 4)).astype(np.float32)
    state, states = np.zeros((3, 4), np.float32), []
    for time in range(5):
        state = decay[:, time] * state + inputs[:, time]
        states.append(state)
    np.testing.assert_allclose(recurrent.linear_recurrence(decay, inputs), np.stack(states, 1), rtol=1e-5)


def test_a_later_token_leaves_earlier_positions_alone():
    model, tokens = recurrent.Recurrent(SMALL, rngs=zoo_checks.rngs()), zoo_checks.tokens_of(32, 2, 8)["inputs"]
    run = jax.jit(lambda tokens: model(tokens))
    logits, changed = run(tokens), run(tokens.at[:, 5:].add(1))
    np.testing.assert_array_equal(changed[:, :5], logits[:, :5])
    assert not jnp.allclose(changed[:, 5:], logits[:, 5:])

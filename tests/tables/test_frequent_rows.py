"""Rows that are looked up most often."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard import TrainStep
from autoshard.errors import ConfigError
from autoshard.tables import frequent_rows


def loss_fn(params, batch, _):
    return jnp.sum(params["a"][batch["ids"]]) + jnp.sum(params["b"][batch["ids"] // 2, 0] * batch["y"]), None


def sample():
    for ids in ([5, 5, 3, 99], [5, 3, 1, -1]):
        yield {"ids": np.array(ids, np.int32), "y": np.ones(4, np.float32)}


def test_counted_over_batches_by_table():
    """5 three times, 3 twice, 1 once; 9 once, as -1 of ten rows; 99 is no row."""
    step = TrainStep(lambda p, b, _: (jnp.sum(p["a"][b["ids"]]) + jnp.sum(p["b"][b["ids"] % 2]), None), optax.sgd(0.1))
    state = step.init({"a": jnp.zeros((10, 2)), "b": jnp.zeros((4, 2))})
    found = frequent_rows(step, state, sample(), {"a": 3, "b": 3})
    assert found["a"].tolist() == [1, 3, 5] and found["b"].tolist() == [1]
    assert frequent_rows(step, state, sample(), {"a": 1})["a"].tolist() == [5]
    assert frequent_rows(step, state, sample(), {"a": 9})["a"].tolist() == [1, 3, 5, 9]


def test_what_cannot_be_counted_is_refused():
    step = TrainStep(loss_fn, optax.sgd(0.1))
    state = step.init({"a": jnp.zeros((10, 2)), "b": jnp.zeros((4, 2))})
    with pytest.raises(ConfigError, match="`b` is none"):  # parts of its rows are looked up
        frequent_rows(step, state, sample(), {"b": 1})
    with pytest.raises(ConfigError, match="`a` has 10 of them, and 11 are wanted"):
        frequent_rows(step, state, sample(), {"a": 11})
    with pytest.raises(ConfigError, match="received none"):
        frequent_rows(step, state, [], {"a": 1})

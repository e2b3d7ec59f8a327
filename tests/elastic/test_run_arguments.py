"""What `elastic.run` is told is looked at before any process is started."""

import jax.numpy as jnp
import pytest

import autoshard.elastic
from autoshard.elastic.session import last_loss
from autoshard.errors import ConfigError, ElasticError


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"workers": "2:4"}, r"workers: a whole number, or \(least, most\); received '2:4'"),
        ({"workers": (3,)}, r"workers: .*; received \(3,\)"),
        ({"workers": (1, 2.5)}, r"workers: .*; received \(1, 2.5\)"),
        ({"workers": True}, "workers: .*; received True"),
        ({"devices_per_worker": 0}, "devices_per_worker: a whole number of at least 1, or None; received 0"),
        ({"checkpoint_every": 0}, "checkpoint_every: a whole number of at least 1, or None; received 0"),
        ({"memory_every": 0.5}, "memory_every: a whole number of at least 1, or None; received 0.5"),
        ({"keep_checkpoints": 0}, "keep_checkpoints: a whole number of at least 1; received 0"),
        ({"rejoin_after_s": -1.0}, "rejoin_after_s: seconds, at least 0; received -1.0"),
        ({"rejoin_after_s": None}, "rejoin_after_s: seconds, at least 0; received None"),
        ({"stall_limit_s": float("nan")}, "stall_limit_s: seconds, at least 1; received nan"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, told, message):
    with pytest.raises(ConfigError, match=message):
        autoshard.elastic.run(lambda worker: None, **{"workers": 1, **told}, output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("workers", [0, (4, 2)])
def test_a_run_has_workers(tmp_path, workers):
    with pytest.raises(ElasticError, match="at least 1, and the least not above the most"):
        autoshard.elastic.run(lambda worker: None, workers, output_dir=tmp_path / "run")


def test_what_a_loop_returns_is_a_number_or_nothing():
    assert last_loss(None) is None
    assert [last_loss(x) for x in (2, 0.5, jnp.float32(2))] == [2.0, 0.5, 2.0]


@pytest.mark.parametrize("returned", [{"loss": 1.0}, (1.0, 2), jnp.ones(3)], ids=["dict", "tuple", "array"])
def test_another_result_of_a_loop_is_refused_in_its_own_words(returned):
    with pytest.raises(ConfigError, match="(?s)build: returns the last loss as one number, or None; received .*saved"):
        last_loss(returned)

"""Whoever asks for mutual TLS gets it from JAX, or an error."""

import jax
import pytest

from autoshard.elastic.joining import join
from autoshard.elastic.mutual_tls import VARIABLES, check_mutual_tls
from autoshard.errors import ConfigError
from autoshard.launch.messages import Assignment
from autoshard.train.processes import join_processes

ASSIGNMENT = Assignment(
    run_dir="/run",
    run_id="run",
    generation=1,
    rank=1,
    num_workers=2,
    coordinator="127.0.0.1:9",
    slot=0,
    host="here",
    memory_dir="/m",
)


def without_mtls(coordinator_address=None, num_processes=None, process_id=None):
    raise AssertionError("the processes would be joined without encryption")


def with_mtls(coordinator_address=None, num_processes=None, process_id=None, *, mtls_cert_file=None):
    raise NotImplementedError


@pytest.mark.parametrize("name", VARIABLES)
def test_it_is_an_error_where_jax_has_none(monkeypatch, name):
    monkeypatch.setattr(jax.distributed, "initialize", without_mtls)
    monkeypatch.setenv(name, "x")
    for joining in (check_mutual_tls, join_processes, lambda: join(ASSIGNMENT)):
        with pytest.raises(ConfigError, match=f"{name}: mutual TLS .* without encryption"):
            joining()


def test_it_is_left_to_a_jax_that_has_it(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", with_mtls)
    monkeypatch.setenv("JAX_MTLS_CERT_FILE", "x")
    check_mutual_tls()


def test_nobody_needs_it(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", without_mtls)
    monkeypatch.delenv("JAX_MTLS_CERT_FILE", raising=False)
    check_mutual_tls()

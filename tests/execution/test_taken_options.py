"""Compiler options that a compiler does not know: the rest is kept, and a warning names them."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from autoshard.compiler.options import compiler_options
from autoshard.compiler.schedule import Schedule
from autoshard.execution.taken_options import options_on, taken_options
from autoshard.verify.devices import _is_installed, devices_for
from autoshard.verify.tpus import V5E

KNOWN, UNKNOWN = "xla_cpu_enable_fast_math", "xla_cpu_that_no_version_knows"


def mesh_of(devices) -> Mesh:
    return Mesh(np.array(devices, dtype=object), ("data",))


def test_what_a_compiler_does_not_know_is_left_out_and_named():
    mesh = mesh_of(jax.devices())
    with pytest.warns(UserWarning, match=UNKNOWN) as told:
        assert taken_options({KNOWN: True, UNKNOWN: True}, mesh) == {KNOWN: True}
    assert KNOWN not in str(told[0].message)


def test_what_it_knows_is_taken_without_a_word(recwarn):
    assert taken_options({KNOWN: True}, mesh_of(jax.devices())) == {KNOWN: True}
    assert taken_options({}, mesh_of(jax.devices())) == {}
    assert options_on(mesh_of(jax.devices()), Schedule.LATENCY_HIDING) is None, "CPUs have one schedule"
    assert not recwarn


@pytest.mark.skipif(not _is_installed("libtpu"), reason="needs XLA:TPU: pip install 'autoshard[verify-tpu]'")
def test_libtpu_takes_all_by_which_collectives_hide(monkeypatch, recwarn):
    monkeypatch.setenv("XLA_FLAGS", "")  # libtpu ends a process that sets a flag which only XLA:CPU knows
    mesh = mesh_of(devices_for(V5E, (("data", 8),), None))
    assert options_on(mesh, Schedule.LATENCY_HIDING) == compiler_options("tpu", Schedule.LATENCY_HIDING)
    assert options_on(mesh, Schedule.LEAST_MEMORY) is None
    assert not [w for w in recwarn if "does not take" in str(w.message)]

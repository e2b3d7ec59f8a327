"""Kernels of a program are compiled once, however it is scheduled; the program is the same."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.compiler.candidates import Candidate, candidate_options
from autoshard.compiler.kernel_cache import kernel_cache_options
from autoshard.verify.devices import _is_installed, devices_for
from autoshard.verify.gpus import COMPILER_OPTIONS, H100
from autoshard.verify.kept_kernels import kernels_kept


@pytest.mark.skipif(
    not _is_installed("jax_plugins.xla_cuda13"), reason="needs XLA:GPU: pip install 'autoshard[verify-gpu]'"
)
def test_a_second_schedule_compiles_no_kernel_and_is_the_same_program():
    mesh = jax.sharding.Mesh(np.array(devices_for(H100, (("data", 8),), 8), dtype=object), ("data",))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def gradient(w, x):
        return jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w.T) ** 2))(w)

    lowered = jax.jit(gradient, in_shardings=(whole, split), out_shardings=split).lower(
        jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    )
    ways = Candidate.LEAST_MEMORY, Candidate.XLA_COSTS
    options = [{**COMPILER_OPTIONS, **candidate_options("cuda", way)} for way in ways]
    plain = [lowered.compile(compiler_options=own) for own in options]
    with kernels_kept("cuda") as kept:
        file = pathlib.Path(next(path for path in kept.values() if isinstance(path, str)))
        assert kept == kernel_cache_options(str(file))
        again, kernels = [], []
        for own in options:
            again.append(lowered.compile(compiler_options={**own, **kept}))
            kernels.append(file.read_bytes())
    assert len(kernels[0]) > 0 and len(kernels[1]) == len(kernels[0])
    assert not file.exists()
    for one, other in zip(plain, again, strict=True):
        assert one.memory_analysis().temp_size_in_bytes == other.memory_analysis().temp_size_in_bytes
        assert one.as_text().count(" fusion(") == other.as_text().count(" fusion(")


def test_none_are_kept_where_there_are_none_or_whole_programs_are(tmp_path):
    with kernels_kept("cpu") as kept:
        assert kept == {}
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        with kernels_kept("cuda") as kept:
            assert kept == {}
    finally:
        jax.config.update("jax_compilation_cache_dir", before)

"""What XLA:GPU sorts to find the largest elements of rows, derived by hand, and as compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.compiler.sorted_rows import sorted_rows
from autoshard.planner.program import prepare
from autoshard.trace.trace import trace
from autoshard.verify.devices import _is_installed, gpu_devices
from autoshard.verify.gpus import COMPILER_OPTIONS, H100

ROWS, LENGTH = 64, 4096


def beside(f, *args):
    """Bytes of what is sorted beside operands and results."""
    program = prepare(trace(f, args).graph)
    stops = {life.value: life.stop for life in program.analysis.live.ranges}
    found = [sorted_rows(program.graph, o, stops) for o in program.graph.operations]
    return sum(size_bytes for of_one in found for _, size_bytes in of_one)


def rows(dtype, length=LENGTH):
    return jax.ShapeDtypeStruct((ROWS, length), dtype)


def largest(k):
    return lambda x: jax.lax.top_k(jnp.sort(x), k)  # of what the program makes


@pytest.mark.parametrize(
    ("k", "dtype", "length", "is_sorted"),
    [
        (16, "float32", LENGTH, False),
        (16, "bfloat16", LENGTH, False),
        (17, "float32", LENGTH, True),
        (64, "bfloat16", LENGTH, True),
        (16, "float32", 512, True),
        (16, "float16", LENGTH, True),
        (16, "int32", LENGTH, True),
        (512, "float32", 512, True),
    ],
)
def test_rows_are_sorted_with_the_place_of_each_element_unless_a_kernel_finds_the_largest(k, dtype, length, is_sorted):
    """A place takes 4 bytes; the sorted elements lie where the rows were."""
    assert beside(largest(k), rows(dtype, length)) == (4 * ROWS * length if is_sorted else 0)


def test_rows_that_are_needed_later_are_copied_to_be_sorted():
    def f(x):
        x = jnp.sort(x)
        return jax.lax.top_k(x, 64), x + 1

    assert beside(f, rows("bfloat16")) == (4 + 2) * ROWS * LENGTH


@pytest.mark.skipif(not _is_installed("jax_plugins.xla_cuda13"), reason="the compiler for GPUs is not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("k", "length"), [(16, 1024), (17, 1024), (16, 1023)])
def test_is_what_the_compiler_has(k, length, dtype, monkeypatch):
    """A stored row, and what is sorted beside it."""
    monkeypatch.setenv("XLA_FLAGS", "")
    whole = NamedSharding(Mesh(np.array(gpu_devices(H100, 1, 1)), "x"), PartitionSpec())
    step = jax.jit(lambda x: jax.lax.top_k(jnp.tanh(x), k), in_shardings=whole, out_shardings=whole)
    compiled = step.lower(rows(dtype, length)).compile(compiler_options=COMPILER_OPTIONS)
    stored_bytes = ROWS * length * jnp.dtype(dtype).itemsize
    found = compiled.memory_analysis().temp_size_in_bytes - stored_bytes
    assert abs(found - beside(largest(k), rows(dtype, length))) < 4096  # tuples and alignment

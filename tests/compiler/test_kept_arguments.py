"""What is stored beside a complementary error function, derived by hand; read off compiled programs for H100."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.buffer_uses import BufferKind
from autoshard.compiler.schedule import Schedule

MIB = 2**20


def gelu_step(x, w):
    return jax.grad(lambda w: jnp.sum((jax.nn.gelu(x @ w, approximate=False) @ w.T).astype(jnp.float32) ** 2))(w)


@pytest.mark.parametrize(
    ("rows", "dtype", "workspace_mib", "schedule", "times"),
    [
        (24, jnp.bfloat16, 32, Schedule.LEAST_MEMORY, 2),
        (24, jnp.bfloat16, 32, Schedule.LATENCY_HIDING, 1),
        (51, jnp.bfloat16, 32, Schedule.LEAST_MEMORY, 1),
        (24, jnp.float32, 32, Schedule.LEAST_MEMORY, 1),
        (24, jnp.bfloat16, 4, Schedule.LEAST_MEMORY, 2),
    ],
    ids=["fits L2", "hides", "does not fit", "4 bytes", "A100 stores the function in float32, and no argument"],
)
def test_the_argument_of_an_exact_gelu_is_stored_where_it_fits_the_cache(
    formulated, mesh_of, rows, dtype, workspace_mib, schedule, times
):
    """`rows` MiB of 2-byte elements on one device."""
    x, w = jax.ShapeDtypeStruct((rows * 512, 256), dtype), jax.ShapeDtypeStruct((256, 1024), dtype)
    mesh = mesh_of(1)
    gpu = dataclasses.replace(mesh.device_type, product_workspace_bytes=workspace_mib * MIB)
    f = formulated(gelu_step, (x, w), dataclasses.replace(mesh, device_type=gpu), schedule=schedule)
    (function,) = (o.results[0] for o in f.program.graph.operations if o.name == "erfc")
    held = {float(u.size_bytes.max()) for u in f.buffers if u.kind is BufferKind.VALUE and u.owner == function}
    assert held == {times * f.program.graph.values[function].size_bytes}

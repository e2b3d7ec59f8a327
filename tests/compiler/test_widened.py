"""What is stored in float32 where a GPU has no arithmetic in bfloat16, derived by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.buffer_uses import BufferKind


def gated(x, w):
    """Two kernels read the tangent, which is stored: that in front of the second product and that of the result."""
    u = x @ w
    y = jnp.tanh(u)
    return ((y * u) @ w) * y


def activated(x, w):
    """A product reads the tangent."""
    y = jnp.tanh(x @ w)
    return (y @ w) * y


@pytest.mark.parametrize(
    ("function", "dtype", "workspace_mib", "size_bytes"),
    [
        (gated, jnp.bfloat16, 4, 4 * 64 * 64),
        (gated, jnp.bfloat16, 32, 2 * 64 * 64),
        (gated, jnp.float16, 4, 2 * 64 * 64),
        (activated, jnp.bfloat16, 4, 2 * 64 * 64),
    ],
    ids=["A100", "H100", "float16", "rounded for a product"],
)
def test_a_tangent_is_stored_as_it_is_computed(formulated, mesh_of, function, dtype, workspace_mib, size_bytes):
    square, mesh = jax.ShapeDtypeStruct((64, 64), dtype), mesh_of(1)
    gpu = dataclasses.replace(mesh.device_type, product_workspace_bytes=workspace_mib * 2**20)
    f = formulated(function, (square, square), dataclasses.replace(mesh, device_type=gpu))
    (tangent,) = (o.results[0] for o in f.program.graph.operations if o.name == "tanh")
    held = {float(u.size_bytes.max()) for u in f.buffers if u.kind is BufferKind.VALUE and u.owner == tangent}
    assert held == {size_bytes}

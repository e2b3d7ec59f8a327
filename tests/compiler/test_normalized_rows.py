"""Normalized rows that are kept for the gradient of their scale: which layouts store them, as read off XLA:GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest


def _by_variance(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def _by_squares(x):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize(
    ("norm", "rows", "row", "dtype", "stored_bytes"),
    [
        (_by_variance, 2**16, 192, jnp.float32, 2**15 * 192 * 4),
        (_by_variance, 2**16, 768, jnp.float32, 2**15 * 768 * 4),
        (_by_variance, 2**16, 1024, jnp.float32, 0),  # long rows take a root less often
        (_by_squares, 2**16, 192, jnp.float32, 0),  # their rows are summed once
        (_by_variance, 2**16, 192, jnp.bfloat16, 2**15 * 192 * 4),
        (_by_variance, 2**18, 192, jnp.bfloat16, 0),  # 100 MB do not fit the L2 cache
        (_by_variance, 2**16, 128, jnp.bfloat16, 0),  # a power of two is cheaper to make again
    ],
)
def test_normalized_rows_are_stored_if_they_are_short(formulated, mesh_of, norm, rows, row, dtype, stored_bytes):
    """On each of two devices, where the rows are shared out."""

    def step(params, x):
        def loss(scale, up):
            h = (norm((x @ up).astype(jnp.float32)) * scale).astype(dtype)
            return jnp.sum(jnp.square(h @ up))

        return jax.grad(loss, argnums=(0, 1))(*params)

    params = jax.ShapeDtypeStruct((row,), jnp.float32), jax.ShapeDtypeStruct((row, row), dtype)
    args = params, jax.ShapeDtypeStruct((rows, row), dtype)
    mesh = mesh_of(2)
    gpu = dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, product_workspace_bytes=1))
    without, f = formulated(step, args, mesh), formulated(step, args, gpu)
    others = {use.value for use in without.buffers}
    usages = [u for u, use in zip(f.problem.usages, f.buffers, strict=False) if use.value not in others]
    amounts = {float(a) for u in usages for a in u.amounts} or {0.0}
    assert stored_bytes in amounts <= {0.0, stored_bytes, 2.0 * stored_bytes}

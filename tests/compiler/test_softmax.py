"""Exponentials of a softmax: which layouts store them, derived by hand from XLA:GPU's rules."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest


@pytest.mark.parametrize(
    ("maps", "row", "dtype", "stored_bytes"),
    [
        (512, 196, jnp.bfloat16, 256 * 196 * 196 * 2),  # 4 bytes take the place of 2; sums of 50,176 rows fit into L1
        (1024, 196, jnp.bfloat16, 0),  # those of 100,352 rows do not
        (1024, 140, jnp.bfloat16, 512 * 140 * 140 * 2),  # nor do those of 71,680; but 256 is more than 3/2 of 140
        (512, 192, jnp.bfloat16, 0),  # a multiple of 8 is not padded
        (512, 228, jnp.bfloat16, 0),  # 256 is less than 7/6 of 228
        (512, 196, jnp.float32, 0),  # nor are products of 4 bytes
    ],
)
def test_exponentials_are_stored_where_padding_saves_more(formulated, mesh_of, maps, row, dtype, stored_bytes):
    """On each of two devices, where the maps are split."""

    def step(scores, weights, values):
        def attended(scores, values):
            shares = jax.nn.softmax((scores @ weights).astype(jnp.float32), axis=-1)
            return shares.astype(dtype) @ values

        return jax.vjp(jax.checkpoint(attended), scores, values)[1](scores)

    square = jax.ShapeDtypeStruct((maps, row, row), dtype)
    args = square, jax.ShapeDtypeStruct((row, row), dtype), square
    mesh = mesh_of(2)
    gpu = dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, product_workspace_bytes=1))
    without, f = formulated(step, args, mesh), formulated(step, args, gpu)
    made = {o.results[0]: o for o in f.program.graph.operations if o.name == "exp"}
    usages = [u for u, v in zip(f.problem.usages, f.buffers, strict=False) if v.value in made]
    assert not set(made).intersection(use.value for use in without.buffers)
    amounts = {float(a) for u in usages for a in u.amounts} or {
        0.0
    }  # on all choices; twice as much if nothing is split
    assert stored_bytes in amounts <= {0.0, stored_bytes, 2.0 * stored_bytes}

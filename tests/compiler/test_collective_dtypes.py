"""In which type values are moved."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

HIGHEST = jax.lax.Precision.HIGHEST


def loss(weights, batch):
    rows = weights["table"].at[batch["indices"]].get(mode="promise_in_bounds").reshape(16, 32)
    hidden = rows @ weights["default"] + weights["bias"]
    hidden = jnp.matmul(hidden, weights["highest"], precision=HIGHEST)
    return hidden @ weights["both"] + weights["both"].sum()


@pytest.mark.parametrize(
    ("rounds", "rounded"), [(True, {"table", "default"}), (False, set())], ids=["rounds", "does not"]
)
def test_what_products_round_is_moved_rounded(formulated, mesh_of, rounds, rounded):
    """What is only looked up and shaped anew for products at default precision, and what these read themselves."""
    mesh = mesh_of(4)
    if rounds:
        peaks = {"float32": 1e12, "bfloat16": 1e12}
        mesh = dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, peak_flops_per_s=peaks))
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    weights = {name: shape(32, 32) for name in ("default", "highest", "both")}
    weights |= {"table": shape(64, 8), "bias": shape(16, 32)}
    f = formulated(loss, (weights, {"indices": jax.ShapeDtypeStruct((64,), jnp.int32)}), mesh)
    values = f.program.graph.values
    sizes = {name: set() for name in weights}
    for flow in f.flows:
        name = values[flow.value].name.rpartition(".")[2]
        if name in sizes:
            sizes[name].add(flow.itemsize_bytes)
    assert sizes.pop("both") == ({2, 4} if rounds else {4}), "each reader has a copy of its own"
    assert sizes == {name: {2 if name in rounded else 4} for name in sizes}


def cast(weight, x):
    """A float32 weight that a product reads in bfloat16, and one that is added as it is, too."""
    return x @ weight["cast"].astype(jnp.bfloat16), x @ weight["both"].astype(jnp.bfloat16) + weight["both"]


def test_what_is_only_cast_to_a_smaller_type_is_moved_after_that(formulated, mesh_of):
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    f = formulated(cast, ({"cast": square, "both": square}, x), mesh_of(4))
    values, sizes = f.program.graph.values, {}
    for flow in f.flows:
        name = values[flow.value].name.rpartition(".")[2]
        if name in ("cast", "both"):
            sizes.setdefault(name, set()).add((flow.itemsize_bytes, flow.is_narrowed))
    assert sizes["cast"] == {(2, True)}
    assert (4, False) in sizes["both"]

"""What a scan slices is gathered before the loop begins, if it is split over the scanned dimension."""

import pathlib

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import autoshard

CLUSTER = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x8.yaml"


def recurrent(xs, w):
    def step(state, x):
        state = jnp.tanh(state @ w + x)
        return state, None

    return jax.lax.scan(step, jnp.zeros_like(xs[0]), xs)[0]


def test_slices_are_gathered_once_and_not_all_of_them_in_each_iteration():
    """Half of what a device has of 64 x 4 x 32 numbers of 4 bytes, whose rows lie on 4 devices each: 4 kB. Of what a
    large program scanned XLA gathered all slices in each iteration; the last layout before the loop has them whole."""
    args = jax.ShapeDtypeStruct((64, 4, 32), jnp.float32), jax.ShapeDtypeStruct((32, 32), jnp.float32)
    pins = {"xs": P("data", "tensor", None), "w": P()}
    plan = autoshard.plan(recurrent, *args, cluster=CLUSTER, mesh={"data": 2, "tensor": 4}, pins=pins)
    found = plan.verify(recurrent, *args, target="cpu")
    assert found.compiled_bytes == found.predicted_bytes == 64 * 4 * 32 * 4 / 4 / 2
    before, _ = plan.jit(recurrent, devices=jax.devices()).lower(*args).as_text().split("stablehlo.while", 1)
    moved = [line for line in before.splitlines() if "sharding_constraint" in line and "64x4x32" in line]
    assert moved and '[{}, {"tensor"}, {}]' in moved[-1]

"""Warnings of rows that the matrix units of a GPU are slow with."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

import autoshard

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"


def loss(table, w, tokens):
    h = jnp.tanh(table[tokens].astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
    return jnp.mean(jax.nn.logsumexp((h @ table.T.astype(jnp.bfloat16)).astype(jnp.float32), axis=-1))


def warnings_of(vocabulary, width=1024, cluster="h100x8.yaml"):
    shapes = jax.ShapeDtypeStruct((vocabulary, width), jnp.float32), jax.ShapeDtypeStruct((width, width), jnp.float32)
    step = lambda table, w, tokens: jax.grad(loss, argnums=(0, 1))(table, w, tokens)
    plan = autoshard.plan(
        step,
        *shapes,
        jax.ShapeDtypeStruct((64, 128), jnp.int32),
        cluster=CLUSTERS / cluster,
        mesh={"data": 8},
    )
    return [w for w in plan.warnings if "do not begin at multiples of 16 bytes" in w]


def test_a_vocabulary_that_is_no_multiple_of_eight_is_told_with_its_price():
    """Of three products with the table, one sums along its rows."""
    (warning,) = warnings_of(30522)
    assert "Rows of 30,522 bfloat16, as `table` has," in warning and "test_unaligned.py" in warning
    assert "in 3 products" in warning and "to a multiple of 8, such as 30,528." in warning


@pytest.mark.parametrize(
    "case",
    [
        {"vocabulary": 30528},
        {"vocabulary": 50},  # hardly anything is lost
        {"vocabulary": 30522, "cluster": "a100-80x8.yaml"},  # nothing was measured of it
    ],
    ids=["aligned", "small", "unknown"],
)
def test_nothing_is_told_where_nothing_is_to_be_gained(case):
    assert not warnings_of(**case)

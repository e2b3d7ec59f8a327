"""Places of extremes (`argmax`, `argmin`) along a dimension that devices hold parts of."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.execution.extreme_places import extreme_place

H100 = pathlib.Path(__file__).parents[2] / "configs/clusters/h100x8.yaml"
NAN, INF = np.nan, np.inf
ROWS = np.array(
    [
        [1, 2, 2, 0, 2, 1, 0, 0],  # the first of equals
        [-1, -2, -3, -4, -5, -6, -7, -8],
        [0, INF, 1, NAN, 2, 3, NAN, INF],  # the first that is not a number, whatever stands before it
        [-INF] * 8,
        [NAN] * 8,
        [-5, -4, NAN, -3, 9, 9, 9, 9],
    ],
    np.float32,
)


@pytest.mark.parametrize("search", [jax.lax.argmax, jax.lax.argmin])
def test_ties_infinities_and_what_is_no_number(search):
    mesh = jax.make_mesh((2, 4), ("outer", "inner"), axis_types=(AxisType.Auto,) * 2)
    (equation,) = jax.make_jaxpr(lambda x: search(x, 1, jnp.int32))(ROWS).eqns
    axes = ("outer", "inner")
    there = jax.shard_map(
        lambda part: extreme_place(equation, part, axes),
        mesh=mesh,
        in_specs=P(None, axes),
        out_specs=P(),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(there)(ROWS), search(ROWS, 1, jnp.int32))


def test_a_vocabulary_is_searched_where_it_lies():
    """How often a model is right keeps its logits split by words; all that is sent is of tokens."""
    words, width, tokens = 131072, 2048, 4096

    def accuracy(table, x, y):
        logits = x @ table
        return jnp.mean(logits.argmax(-1) == y), jax.nn.logsumexp(logits, -1).mean()

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((width, words), (tokens, width))]
    ids = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    pins = {"table": P(None, "tensor"), "x": P(), "y": P()}
    plan = autoshard.plan(accuracy, *shapes, ids, cluster=H100, mesh={"tensor": 8}, pins=pins)
    assert {c.kind for c in plan.estimate.communication} == {"all-reduce"}
    # of each token an extreme and its place, a maximum and a sum, 4 bytes each, in rings of eight
    assert sum(c.wire_bytes for c in plan.estimate.communication) == pytest.approx(4 * 4 * tokens * 2 * 7 / 8, rel=0.01)

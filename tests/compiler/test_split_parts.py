"""Which parts of split values are stored, by which reads what long after."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.analysis import analyse
from autoshard.trace.trace import trace

ROWS = 8192
PART_BYTES = 4 * ROWS * 512


def skipped(x, first, others, keeps_whole=False):
    """A part of a product that is added at once, and one that is added behind as many products as `others`."""
    whole = x @ first
    near, far = jnp.split(whole, 2, axis=-1)
    y = jnp.tanh(near)
    for w in others:
        y = jnp.sin(y @ w)
    return (y + jnp.cos(far), whole) if keeps_whole else y + jnp.cos(far)


def gated(x, first, others):
    """Both parts are needed at once, and again behind the products."""
    one, other = jnp.split(x @ first, 2, axis=-1)
    y = one * other
    for w in others:
        y = jnp.sin(y @ w)
    return y + one / other


def queries(x, first, others):
    """A product reads each part, and one of them again behind the others."""
    one, other = jnp.split(x @ first, 2, axis=-1)
    y = (one @ other.T) @ other
    for w in others:
        y = jnp.sin(y @ w)
    return y @ one.T


@pytest.mark.parametrize(
    ("function", "num_products", "rows", "is_stored"),
    [
        (skipped, 6, ROWS, True),
        (skipped, 2, ROWS, False),
        (skipped, 6, 64, False),
        (lambda *args: skipped(*args, keeps_whole=True), 6, ROWS, False),
        (gated, 6, ROWS, False),
        (queries, 6, ROWS, True),
    ],
    ids=["late", "soon", "small", "the whole is returned", "both late", "products read both"],
)
def test_parts_are_stored_where_that_ends_the_whole(function, num_products, rows, is_stored):
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    graph = trace(function, (f32(rows, 512), f32(512, 1024), [f32(512, 512)] * num_products)).graph
    (split,) = (o for o in graph.operations if o.name == "split")
    live = analyse(graph).live
    assert live.parts == (set(split.results) if is_stored else set())
    if is_stored:
        ends = {life.value: life.stop for life in live.ranges}
        assert ends[split.operand(0)] == split.index + 1, "the whole one is gone"
        assert sum(graph.values[r].size_bytes for r in split.results) == 2 * PART_BYTES
        assert live.stored.issuperset(split.results)

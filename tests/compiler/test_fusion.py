"""What is computed where it is read."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.analysis import analyse
from autoshard.trace.trace import trace


@pytest.mark.parametrize("is_parameter", [True, False])
def test_rows_are_looked_up_where_they_are_read(is_parameter):
    """The kernel that adds the rows of a product looks them up; those of a parameter may be a sum to reduce."""

    def receive(x, at, edges):
        return edges + (x if is_parameter else x @ x)[at]

    x, edges = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (256, 64)))
    graph = trace(receive, (x, jax.ShapeDtypeStruct((256,), jnp.int32), edges)).graph
    (rows,) = (o.results[0] for o in graph.operations if o.name == "gather")
    assert (rows in analyse(graph).live.stored) == is_parameter


@pytest.mark.parametrize("is_summed", [True, False])
def test_a_hyperbolic_tangent_is_stored_for_three_kernels(is_summed):
    """What the first product reads is made of it, and so is the result: two kernels. Where the product reads the
    tangents' shares of their sum, a third one sums them first.
    """

    def f(x, w):
        y = jnp.tanh(x @ w)
        total = jnp.sum(y, axis=1, keepdims=True) if is_summed else 2.0
        return ((y / total) @ w) * y

    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    graph = trace(f, (square, square)).graph
    (tangents,) = (o.results[0] for o in graph.operations if o.name == "tanh")
    assert (tangents in analyse(graph).live.stored) == is_summed

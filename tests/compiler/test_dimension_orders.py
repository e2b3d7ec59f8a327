"""Copies of values with their dimensions in another order: derived by hand, the orders seen in programs of XLA:GPU."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.analysis import analyse
from autoshard.compiler.dimension_orders import read_order
from autoshard.trace.trace import trace

PRODUCTS = [  # shapes, ((summed left, right), (batch left, right)), which operands are copied
    ((3, 2, 5, 7), (3, 2, 5, 6), (((1, 2), (1, 2)), ((0,), (0,))), [True, False]),  # gradient of experts: rows are last
    ((3, 7, 2, 5), (3, 2, 5, 6), (((2, 3), (1, 2)), ((0,), (0,))), [False, False]),  # the same, in order
    ((3, 2, 7), (3, 2, 6), (((1,), (1,)), ((0,), (0,))), [False, False]),  # matrices: either order
    ((2, 5, 7), (2, 5, 6), (((0, 1), (0, 1)), ((), ())), [False, False]),  # no batch: part of the product
    ((3, 2, 5, 7), (3, 7, 6), (((3,), (1,)), ((0,), (0,))), [False, False]),
    ((2, 5, 3, 7), (2, 4, 3, 7), (((3,), (3,)), ((0, 2), (0, 2))), [True, True]),  # scores of attention: heads inside
    ((2, 4, 3, 5), (3, 2, 5, 7), (((2, 3), (0, 2)), ((0,), (1,))), [False, True]),
]


@pytest.mark.parametrize(("left", "right", "dims", "copied"), PRODUCTS)
def test_products_over_batches_want_rows_or_columns_together(left, right, dims, copied):
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (left, right)]
    (operation,) = trace(lambda x, y: jax.lax.dot_general(x, y, dims), shapes).graph.operations
    assert [read_order(operation, slot) is not None for slot in (0, 1)] == copied


def stored(fn):
    """What makes each value that is stored; None for arguments."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 2, 5, 7), (3, 7, 7), (3, 2, 5, 7))]
    graph = trace(fn, shapes).graph
    names = {r: o.name for o in graph.operations for r in o.results}
    return [names.get(life.value) for life in analyse(graph).live.ranges]


def test_a_value_read_in_two_orders_is_stored_twice_and_a_third_kernel_fetches_its_tanh():
    """The hidden layer of experts: the next product reads it, and the gradient of that one's weight transposed."""

    def hidden(x, w, g):
        once = jnp.tanh(x)
        product = jnp.einsum("ebcf,efd->ebcd", 2 * once, w)
        return product, once * product  # two kernels need the tanh, each computes it

    def twice(x, w, g):
        once = jnp.tanh(x)
        doubled = 2 * once
        for_w = jax.lax.dot_general(doubled, g, (((1, 2), (1, 2)), ((0,), (0,))))
        product = jnp.einsum("ebcf,efd->ebcd", doubled, w)
        return product, once * product, for_w

    assert stored(hidden).count("mul") == 2  # the doubled tanh and the last result
    assert "tanh" not in stored(hidden)
    assert stored(twice).count("mul") == 3
    assert "tanh" in stored(twice)

"""Which elements of the matrices of a product lie together."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.graph.product_rows import product_rows
from autoshard.trace.trace import trace


@pytest.mark.parametrize(
    ("equation", "left", "right", "rows"),
    [
        ("ik,kj->ij", (4, 6), (6, 10), [(6, True), (10, False), (10, False)]),
        ("ik,jk->ij", (4, 6), (10, 6), [(6, True), (6, True), (10, False)]),
        ("ki,kj->ij", (6, 4), (6, 10), [(4, False), (10, False), (10, False)]),
        ("bsk,kj->bsj", (2, 5, 6), (6, 10), [(6, True), (10, False), (10, False)]),
        # all tokens are one side: a gradient sums over both dimensions, and none of them lies innermost
        ("bsi,bsj->ij", (2, 5, 4), (2, 5, 10), [(4, False), (10, False), (10, False)]),
        # a row of what is made for all positions of all examples
        ("hk,bsk->hbs", (3, 6), (2, 5, 6), [(6, True), (6, True), (10, False)]),
        ("bik,bkj->bij", (2, 4, 6), (2, 6, 10), []),
        ("bik,bkj->bij", (1, 4, 6), (1, 6, 10), [(6, True), (10, False), (10, False)]),  # no more than one
    ],
)
def test_rows_by_hand(equation, left, right, rows):
    graph = trace(
        lambda x, y: jnp.einsum(equation, x, y), [jax.ShapeDtypeStruct(s, jnp.float32) for s in (left, right)]
    ).graph
    (product,) = (o for o in graph.operations if o.name == "dot_general")
    size = {n: f.size for n, f in enumerate(product.rule.factors)}
    found = []
    for row, is_summed in product_rows(product.rule):
        elements = 1
        for f in row:
            elements *= size[f]
        found.append((elements, is_summed))
    # `einsum` may exchange the operands
    assert sorted(found[:2]) == sorted(rows[:2]) and found[2:] == rows[2:]

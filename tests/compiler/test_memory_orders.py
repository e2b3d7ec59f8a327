"""Orders of dimensions in memory, and what is turned around: derived by hand, as in programs of XLA:GPU."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.analysis import analyse
from autoshard.compiler.dimension_orders import lies_in
from autoshard.trace.trace import trace


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


QUERY, KEY = bf16(2, 64, 8, 4, 32), bf16(2, 64, 8, 32)  # examples, positions, heads, in which four queries share a key


def grouped(query, key, value):
    """Scores in float32, as in most public implementations; products over examples and heads."""
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, key).astype(jnp.float32)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(value.dtype), value)


def ungrouped(query, key, value):
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1).astype(value.dtype), value)


def of_jax(query, key, value):
    return jax.nn.dot_product_attention(query.reshape(2, 64, 32, 32), key, value, implementation="xla")


def gradients(attention):
    return jax.grad(lambda *args: jnp.sum(attention(*args).astype(jnp.float32) ** 2), argnums=(0, 1, 2))


def turned(f, *args):
    """The name, dtype and shape of what is turned, and how it lies then."""
    graph = trace(f, args).graph
    made_by = {r: o.name for o in graph.operations for r in o.results}
    live = analyse(graph).live
    return [(made_by[v], graph.values[v].dtype, graph.values[v].shape, live.orders[v]) for v in live.turned]


def test_the_gradient_of_grouped_attention_is_turned_as_its_scores_lie():
    """Scores are made as (batch, heads, keys, queries, group), their gradient as (.., group, queries, keys).

    They are a result of the program, too, and so stay as they are written (`trace/operand_order.py`).
    """

    def loss(query, key, value):
        scores = jax.lax.dot_general(key, query, (((3,), (4,)), ((0, 2), (0, 2))))
        weights = jax.nn.softmax(scores.transpose(0, 1, 4, 3, 2).astype(jnp.float32), axis=-1)
        out = jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(value.dtype), value)
        return jnp.sum(out.astype(jnp.float32) ** 2), scores

    shape = (2, 8, 4, 64, 64)
    step = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    assert turned(step, QUERY, KEY, KEY) == [("convert_element_type", "float32", shape, (0, 1, 4, 3, 2))]


def test_grouped_attention_whose_operands_are_exchanged_is_not_turned():
    """All of its products make or take (batch, heads, queries, group, keys) or have the group in front."""
    assert turned(gradients(grouped), QUERY, KEY, KEY) == []


def test_where_one_kernel_reads_both_nothing_is_turned():
    def f(query, key, other):
        return jnp.tanh(jnp.einsum("bqhgd,bkhd->bhgqk", query, key)) * other

    assert turned(f, QUERY, KEY, bf16(2, 8, 4, 64, 64)) == []


@pytest.mark.parametrize("attention", [ungrouped, of_jax])
def test_rows_that_lie_together_are_not_turned(attention):
    """Products store rows or columns together, as is read; JAX's own attention has keys innermost everywhere."""
    query = bf16(2, 64, 8, 32) if attention is ungrouped else QUERY
    assert turned(gradients(attention), query, KEY, KEY) == []


def layers_of(attention, is_recomputed):
    """Gradients of scanned layers of attention, whose queries are the rows that the scan carries."""

    def loss(weights, query, key):
        def layer(query, w):
            mixed = attention(query, key, key)
            return query + mixed @ w, None

        run = jax.checkpoint(layer) if is_recomputed else layer
        return jnp.sum(jax.lax.scan(run, query, weights)[0].astype(jnp.float32) ** 2)

    return jax.grad(loss)


@pytest.mark.parametrize(
    ("attention", "is_recomputed", "num"),
    [(grouped, False, 1), (grouped, True, 0), (ungrouped, False, 0)],
    ids=["kept", "recomputed", "ungrouped"],
)
def test_what_a_scan_stacks_in_another_order_than_it_is_written_in_is_kept_as_written(attention, is_recomputed, num):
    """Exponentials of scores are made with queries in front of the group, and are written the other way round. Where
    layers are computed again, they are not stacked."""
    query, key, layers = QUERY, KEY, 64
    if attention is ungrouped:
        query = key = bf16(2, 64, 32, 32)
    graph = trace(layers_of(attention, is_recomputed), (bf16(layers, 32, 32), query, key)).graph
    live = analyse(graph).live
    stacked = [graph.operations[o].operand(0) for o in live.turned_stacks]
    scores = [v for v in stacked if graph.values[v].shape[-2:] == (64, 64)]
    assert [live.orders[v] for v in scores] == [(0, 1, 3, 2, 4)] * num


def test_what_lies_in_order_needs_no_copy():
    batch_rows_columns = ((0,), frozenset({(1, 2), (3,)}))
    assert lies_in(None, (0, 1, 2)) and not lies_in(None, (0, 2, 1))
    assert lies_in(batch_rows_columns, (0, 1, 2, 3)) and lies_in(batch_rows_columns, (0, 3, 1, 2))
    assert not lies_in(batch_rows_columns, (0, 2, 1, 3))
    assert lies_in(batch_rows_columns, None)  # not known: nothing is counted

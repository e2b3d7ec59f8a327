"""Partial sums: how long each waits for its reduce-scatter, derived by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.buffer_uses import BufferKind
from autoshard.compiler.reduce_scatter_combiner import combined_until


def updates(state, x):
    """Gradients of three products, far enough apart to be reduced one by one."""
    a, b, c = state
    h = jnp.tanh(x @ a)
    k = jnp.tanh(h @ b)
    return a - x.T @ (k @ c), b - h.T @ (k @ c), c - k.T @ (h @ b)


@pytest.mark.parametrize(("size", "until"), [(64, {14}), (4096, {6, 10, 14})])
def test_partial_sums_wait_for_what_they_are_joined_with(formulated, mesh_of, size, until):
    """The products 6, 10 and 14 make gradients, scattered over 4 devices. Results of 4 kB are joined, and wait for the
    last product; of results of 16 MiB no two fit into 30 MiB together, so that none waits.
    """
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    f = formulated(updates, ((f32(size, size),) * 3, f32(8 * size, size)), mesh_of(4), donate=(0,))
    products = {len(f.program.graph.arguments) + g.index: g.operations[0] for g in f.program.groups}
    waiting = {
        products[u.node]: f.instants[u.stop - 1]
        for u, use in zip(f.problem.usages, f.buffers, strict=False)
        if use.value is None and products[u.node] in (6, 10, 14)
    }
    assert set(waiting) == {6, 10, 14}
    assert set(waiting.values()) == until


def backward(w, x, y):
    """The gradient of a weight, and right behind it that of what it was multiplied with."""
    h, g = jnp.tanh(x), jnp.sin(y)
    return w - jnp.einsum("nd,ne->de", h, g), jnp.einsum("ne,de->nd", g, w)


def partial_sum(f, product):
    """The usages of what waits to be reduced of the product at an operation."""
    node = next(len(f.program.graph.arguments) + g.index for g in f.program.groups if g.operations[0] == product)
    usages = zip(f.problem.usages, f.buffers, strict=False)
    return [u for u, use in usages if use.kind is BufferKind.PARTIAL_SUM and u.node == node]


def test_a_large_partial_sum_is_reduced_before_the_next_product_gathers_its_weight(formulated, mesh_of):
    """Partial sum and gathered weight take 256 MiB each, more than XLA joins: no instant has both."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    f = formulated(backward, (f32(8192, 8192), f32(1024, 8192), f32(1024, 8192)), mesh_of(2), donate=(0,))
    first, second = (o.index for o in f.program.graph.operations if o.name == "dot_general")
    spans = [(f.instants[u.start], f.instants[u.stop - 1], u.amounts.max()) for u in partial_sum(f, first)]
    assert [s for s in spans if s[2]] == [(first, first, 4 * 8192**2)]
    weight = f.program.graph.arguments[0].value
    copied = [u for u in f.problem.edge_usages if f.flows[u.edge].value == weight and u.amounts.max() == 4 * 8192**2]
    instants = {f.instants[at] for u in copied for at in range(u.start, u.stop)}
    assert second in instants and first not in instants


def uneven(state, x, follow):
    """Gradients of three products, of which the state becomes what `follow` makes."""
    a, b, c = state
    h = jnp.tanh(x @ a)
    k = jnp.tanh(h @ b)
    return follow(x.T @ (k @ c), h.T @ k, k.T @ (h @ a))


def by_rows(*gradients):
    return tuple(g / jnp.mean(g * g, axis=1, keepdims=True) for g in gradients)


@pytest.mark.parametrize("follow", [lambda *g: g, by_rows], ids=["as is", "rows"])
def test_partial_sums_are_joined_in_the_order_of_what_needs_them(formulated, mesh_of, follow):
    """Of the pieces of 16, 8 and 8 MiB no three fit into 30 MiB. The first successor needs the first gradient."""
    n = 4096
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    state = f32(n, n), f32(n, n // 2), f32(n // 2, n)
    f = formulated(functools.partial(uneven, follow=follow), (state, f32(8 * n, n)), mesh_of(4), donate=(0,))
    groups, order = f.program.groups, f.program.analysis.reduce_scatter_order
    until = combined_until(f.program.graph, groups, order, num_devices=4)
    gradients = [g for g in sorted(until) if f.program.graph.operations[groups[g].operations[0]].name == "dot_general"]
    own = [groups[g].operations[-1] + 1 for g in gradients]
    assert [until[g] for g in gradients] == [max(own[:2]), max(own[:2]), own[2]]


def test_what_is_scattered_into_a_table_is_there_beside_its_partial_sum(formulated, mesh_of):
    """Rows are added into the table in place, but a partial sum of them has a buffer of its own, and so has the half
    that its reduce-scatter makes. What is added is split over two devices; the table has 256 kB.
    """
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((1024, 64), jnp.float32), ((64,), jnp.int32))]
    rows = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    f = formulated(
        lambda table, at, rows: table + jnp.zeros_like(table).at[at].add(rows), (*shapes, rows), mesh_of(2), donate=(0,)
    )
    (scatter,) = (o.index for o in f.program.graph.operations if o.name == "scatter-add")
    found = {float(u.amounts.max()) for u in partial_sum(f, scatter)}
    assert found == {256 * 1024.0, 128 * 1024.0}

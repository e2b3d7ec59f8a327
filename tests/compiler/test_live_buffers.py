"""Values of which readers take slices: how long the whole ones are there on one of two devices, derived by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.compiler.buffer_uses import BufferKind
from autoshard.compiler.live_buffers import shortened
from autoshard.compiler.schedule import Schedule
from autoshard.graph.layout import WHOLE

SIZE = 64 * 64 * 4
ALL, ROWS = (WHOLE,), (0,)


def values(f) -> list[int | None]:
    """What each usage of a node stands for; None where it is no value."""
    return [use.value for use in f.buffers[: len(f.problem.usages)]]


def late(x, w):
    """The hyperbolic tangent 0 is read by the products 1 and 3."""
    y = jnp.tanh(x)
    return y @ ((y @ w) @ w)


def product(x, w):
    """So is the product 0."""
    y = x @ w
    return y @ ((y @ w) @ w)


@pytest.fixture(scope="module")
def held(formulated, mesh_of, solved):
    """(program, layout of y, how each reader takes it) -> (start, stop, bytes) of y, and of what is moved."""
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    made = {fn: formulated(fn, (square, square), mesh_of(2)) for fn in (late, product)}

    def find(fn, own, reads):
        f = made[fn]
        graph, first = f.program.graph, len(f.program.graph.arguments)
        y = graph.operations[0].results[0]
        layouts = {v: ALL for v in range(len(graph.values))} | {y: own}
        reader = lambda flow: f.program.groups[flow.target - first].reads[flow.read].operations[0]
        targets = [reads[reader(flow)] if flow.value == y else ALL for flow in f.flows]
        piece = lambda layout: SIZE / 2 if layout == ROWS else SIZE
        sizes = [piece(own) if v == y else 0.0 for v in values(f)]
        moved = [f.flows[u.edge].value == y and targets[u.edge] != own for u in f.problem.edge_usages]
        sizes += [piece(targets[u.edge]) * m for u, m in zip(f.problem.edge_usages, moved, strict=True)]
        spans, sizes = shortened(solved(f, layouts, targets), f.buffers, np.array(sizes), {})
        rows = [(int(a), int(b), float(s)) for (a, b), s in zip(spans, sizes, strict=True) if s and a < b]
        num = sum(1 for v, (a, b) in zip(values(f), spans, strict=False) if v == y and a < b)
        return rows[:num], sorted(rows[num:])

    return find


@pytest.mark.parametrize("fn", [late, product])
def test_a_value_is_there_until_its_last_reader_is_done(held, fn):
    assert held(fn, ALL, {1: ALL, 3: ALL}) == ([(0, 4, SIZE)], [])
    assert held(fn, ALL, {1: ROWS, 3: ALL}) == ([(0, 4, SIZE)], [(1, 2, SIZE / 2)])


@pytest.mark.parametrize("fn", [late, product])
def test_only_the_slice_stays_when_nothing_needs_the_whole_value(held, fn):
    assert held(fn, ALL, {1: ALL, 3: ROWS}) == ([(0, 2, SIZE)], [(1, 4, SIZE / 2)])


def test_a_pointwise_result_of_which_all_take_slices_is_never_there_whole(held):
    """Both products share the slice. A product is there when it is made, and the slice is taken then."""
    assert held(late, ALL, {1: ROWS, 3: ROWS}) == ([], [(0, 4, SIZE / 2)])
    assert held(product, ALL, {1: ROWS, 3: ROWS}) == ([(0, 2, SIZE)], [(1, 4, SIZE / 2)])


def biases(a, b, w):
    """The sums 1 and 3 over rows are added by 4: until then both products are there, if one kernel does all."""
    return (a @ w).sum(0) + (b @ w).sum(0)


@pytest.mark.parametrize(("rows", "until"), [(64, [5, 5]), (128, [2, 4])])
def test_reductions_of_many_elements_are_not_made_by_the_kernel_that_adds_them(
    formulated, mesh_of, solved, rows, until
):
    """Two devices have 32 rows each, or 64."""
    f = formulated(
        biases, [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, 64), (rows, 64), (64, 64))], mesh_of(2)
    )
    products = [o.results[0] for o in f.program.graph.operations if o.name == "dot_general"]
    layouts = {v: ROWS if v in products else ALL for v in range(len(f.program.graph.values))}
    targets = [layouts[flow.value] for flow in f.flows]
    spans, _ = shortened(solved(f, layouts, targets), f.buffers, np.ones(len(f.buffers)), {})
    assert [int(spans[values(f).index(v), 1]) for v in products] == until


def turns(a, b, c, w):
    """The sums 1 and 3 over rows, for each of which the next product waits where collectives hide, are added by 5."""
    first, second = (a @ w).sum(0), (b @ w).sum(0)
    y = c @ w
    return first + second, y


@pytest.mark.parametrize(("schedule", "until"), [(Schedule.LEAST_MEMORY, [6, 6]), (Schedule.LATENCY_HIDING, [2, 4])])
def test_reductions_that_products_wait_for_are_not_made_by_the_kernel_that_adds_them(
    formulated, mesh_of, schedule, until
):
    """Of 64 rows, so that a sum takes a 64th of what it is made of."""
    square, mesh = jax.ShapeDtypeStruct((64, 64), jnp.float32), mesh_of(2)
    mesh = dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, product_workspace_bytes=2**20))
    f = formulated(turns, [square] * 4, mesh, schedule=schedule)
    operations = f.program.graph.operations
    assert [o.name for o in operations] == ["dot_general", "reduce_sum"] * 2 + ["dot_general", "add"]
    stops = {use.value: use.stop for use in f.buffers if use.kind is BufferKind.VALUE}
    assert [stops[operations[o].result()] for o in (0, 2)] == until

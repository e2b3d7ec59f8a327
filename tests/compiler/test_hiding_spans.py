"""How long copies and partial sums are there where collectives run behind products, derived by hand."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.buffer_uses import BufferKind
from autoshard.compiler.hiding_spans import UNTIMED_PRODUCTS, HidingSpans
from autoshard.compiler.pace import Pace
from autoshard.compiler.schedule import Schedule
from autoshard.trace.trace import trace

WHOLE_BYTES = 4 * 8192**2


@pytest.fixture(autouse=True)
def _two_ahead(monkeypatch):
    """Copies and sums are bounded by two products here, so that small programs have them."""
    monkeypatch.setattr("autoshard.compiler.hiding_spans.PREFETCH_DISTANCE", 2)
    monkeypatch.setattr("autoshard.compiler.hiding_spans.FEW_PRODUCTS", 2)
    monkeypatch.setattr("autoshard.compiler.hiding_spans.REDUCED_WITHIN", 2)
    monkeypatch.setattr("autoshard.compiler.hiding_spans.QUEUED_WITHIN", 2)


def two_layers(state, x, y):
    """The gradient of a weight, and right behind it those that go on to the layer before, of weight v."""
    w, v = state
    h, g = jnp.tanh(x), jnp.sin(y)
    return (w - jnp.einsum("nd,ne->de", h, g), 0.9 * v), jnp.tanh(jnp.einsum("ne,de->nd", g, w)) @ v


def test_spans_are_told_by_products():
    """Products 2, 3 and 5 of the operations: the first two have no anchor, and of those behind the first only one has
    two products after it."""
    shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 4
    graph = trace(lambda w, v, x, y: jnp.tanh(jnp.sin(x) @ w @ v) @ y, shapes).graph
    names = [o.name for o in graph.operations]
    assert names == ["sin", "dot_general", "dot_general", "tanh", "dot_general"]
    spans = HidingSpans(graph)
    assert [spans.gathered_from(o) for o in (0, 1, 2, 3, 4)] == [0, 1, 2, 2, 2]
    assert [spans.gathered_from(4, read_before) for read_before in (1, 2)] == [2, 3], (
        "the anchor is two products before"
    )
    assert [spans.reduced_until(o) for o in (1, 2, 4)] == [4, None, None]
    assert HidingSpans(graph, hides_sums=False, exchanges_sums=True).reduced_until(1) is None, "after eight"
    assert [spans.queued_until(o) for o in (1, 2, 4)] == [4, 4, 5], "the last are reduced by the last product"


def test_before_hopper_a_copy_is_there_as_many_products_before_as_hide_any_collective():
    """Products 0 to 7 in a row; any collective takes as long as five of them: the copy for product 7 is there beside 2
    to 6, or from behind product 4 on where that reads the same."""
    shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2
    graph = trace(lambda x, w: functools.reduce(jnp.matmul, [w] * 8, x), shapes).graph
    spans = HidingSpans(graph, hidden_behind=UNTIMED_PRODUCTS)
    assert [o.name for o in graph.operations] == ["dot_general"] * 8
    assert [spans.gathered_from(o) for o in (1, 2, 4, 5, 6, 7)] == [1, 0, 0, 0, 1, 2]
    assert [spans.gathered_from(7, read_before) for read_before in (1, 4, 6)] == [2, 5, 7]


def test_what_hides_runs_behind_the_products_that_its_orders_leave_it(monkeypatch):
    """The same program: a gather for the third product, or what comes behind, has the product two before as its anchor.
    A gradient of more than 30 MiB is through before the second product from where it is known, a smaller one before the
    third; where there is none, only the update waits."""
    monkeypatch.setattr("autoshard.compiler.hiding_spans.QUEUED_WITHIN", 3)
    shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 4
    graph = trace(lambda w, v, x, y: jnp.tanh(jnp.sin(x) @ w @ v) @ y, shapes).graph
    spans, large, small = HidingSpans(graph), float(2**25), float(2**20)
    assert [spans.hidden_from(o, large) for o in (0, 1, 2, 3, 4, 5)] == [0, 0, 0, 2, 2, 3]
    assert [spans.hidden_from(o, small) for o in (4, 5)] == [0, 0], "what takes 1 MiB has no anchor"
    assert [spans.hidden_until(o, large) for o in (1, 2, 3, 5)] == [2, 4, 5, 5]
    assert [spans.hidden_until(o, small) for o in (1, 2, 3, 5)] == [4, 5, 5, 5]


def paced(graph, sum_s):
    """Spans of a graph whose products take a second each time, and nothing else does; any sum takes `sum_s`."""
    before_s = [0.0]
    for o in graph.operations:
        trips = math.prod(loop.trips for loop in graph.loops if loop.start <= o.index < loop.stop)
        before_s.append(before_s[-1] + trips * (o.name == "dot_general"))
    return HidingSpans(graph, pace=Pace(tuple(before_s), sum_s, 0.0))


@pytest.mark.parametrize(
    ("sum_s", "until"),
    [(0.25, [2, 6, 7, None]), (1.0, [3, 7, 7, None]), (1.2, [4, 7, 7, None]), (100.0, [5, 7, 7, None])],
)
def test_a_sum_is_there_when_kernels_have_taken_twice_its_time(monkeypatch, sum_s, until):
    """Products 0 to 7 in a row, a second each, from the ends of 0, 4, 5 and 6 on: at least two later, here, at most
    five, and no later than the last, but where that is less than two products later."""
    monkeypatch.setattr("autoshard.compiler.hiding_spans.QUEUED_WITHIN", 5)
    shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2
    graph = trace(lambda x, w: functools.reduce(jnp.matmul, [w] * 8, x), shapes).graph
    spans = paced(graph, sum_s)
    assert [o.name for o in graph.operations] == ["dot_general"] * 8
    assert [spans.reduced_until(o) for o in (0, 4, 5, 6)] == until
    windows = [spans.hidden_until(o + 1, float(2**25)) for o in (0, 4, 5, 6)]
    assert windows == [8 if stop is None else stop for stop in until], "the planner's windows are the orders'"


@pytest.mark.parametrize(("sum_s", "number"), [(0.5, 2), (1.0, 3), (100.0, 3)])
def test_a_sum_in_a_loop_has_the_time_of_one_iteration(monkeypatch, sum_s, number):
    """Four products in a loop, a second each time: the sum of the first is there before the one that begins twice its
    time later in the same iteration, or the last of it."""
    monkeypatch.setattr("autoshard.compiler.hiding_spans.QUEUED_WITHIN", 5)

    def f(x, w):
        return jax.lax.scan(lambda c, _: (functools.reduce(jnp.matmul, [w] * 4, c), None), x, length=3)[0] @ w @ w

    graph = trace(f, [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2).graph
    products = [o.index for o in graph.operations if o.name == "dot_general"]
    assert len(products) == 6 and graph.loops[0].stop <= products[4]
    assert paced(graph, sum_s).reduced_until(products[0]) == products[number]


def test_without_products_a_sum_is_reduced_at_once():
    """As in a stage that only looks rows up: the gradient of its table is a sum without any product."""
    table, ids = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((6,), jnp.int32)
    graph = trace(lambda t, n: jnp.zeros_like(t).at[n].add(t[n]), [table, ids]).graph
    assert graph.operations and not any(o.name == "dot_general" for o in graph.operations)
    spans = HidingSpans(graph)
    assert [spans.queued_until(o.index) for o in graph.operations] == [o.index + 1 for o in graph.operations]


def test_a_sum_in_a_loop_is_reduced_in_its_iteration():
    """Of four products, two are in the loop: after the first of these are two more, but the loop ends before that."""

    def f(x, w):
        x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w) @ w, None), x, length=3)
        return x @ w @ w

    graph = trace(f, [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2).graph
    first, second, third, fourth = (o.index for o in graph.operations if o.name == "dot_general")
    (loop,) = graph.loops
    assert loop.start <= first < second < loop.stop <= third
    assert [HidingSpans(graph).queued_until(o) for o in (first, second, third)] == [loop.stop, loop.stop, fourth]


@pytest.mark.parametrize(
    ("schedule", "until"), [(Schedule.LEAST_MEMORY, [15] * 3), (Schedule.LATENCY_HIDING, [10, 14, 15])]
)
def test_sums_that_run_behind_products_do_not_wait_to_be_joined(formulated, mesh_of, schedule, until):
    """The products 6, 10 and 14 make gradients of 64 kB. To spare memory XLA joins them, so that all wait for the last
    one. To hide them it does not: each is there until the second product after it begins, of 9, 10, 13 and 14, or the
    last.
    """

    def updates(state, x):
        a, b, c = state
        h = jnp.tanh(x @ a)
        k = jnp.tanh(h @ b)
        return a - x.T @ (k @ c), b - h.T @ (k @ c), c - k.T @ (h @ b)

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    mesh = mesh_of(4)
    mesh = dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, product_workspace_bytes=2**20))
    f = formulated(updates, ((f32(128, 128),) * 3, f32(1024, 128)), mesh, donate=(0,), schedule=schedule)
    stops = {
        f.program.groups[use.owner].operations[0]: use.stop for use in f.buffers if use.kind is BufferKind.PARTIAL_SUM
    }
    assert [stops[gradient] for gradient in (6, 10, 14)] == until


@pytest.mark.parametrize("schedule", Schedule)
def test_a_large_partial_sum_and_the_next_weight_are_there_together_where_one_hides_the_other(
    formulated, mesh_of, schedule
):
    """Partial sum and gathered weights take 256 MiB each, more than XLA joins. For the least memory, the sum is reduced
    before the next product gathers its weight. To hide it, it is there until the product after that begins, whose
    weight is gathered behind the second product."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    mesh = mesh_of(2)
    mesh = dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, product_workspace_bytes=2**20))
    shapes = (f32(8192, 8192),) * 2, f32(1024, 8192), f32(1024, 8192)
    f = formulated(two_layers, shapes, mesh, donate=(0,), schedule=schedule)
    graph, first_group = f.program.graph, len(f.program.graph.arguments)
    first, second, third = (o.index for o in graph.operations if o.name == "dot_general")
    node = next(first_group + g.index for g in f.program.groups if g.operations[0] == first)
    held = set()
    for u, use in zip(f.problem.usages, f.buffers, strict=False):
        if use.kind is BufferKind.PARTIAL_SUM and u.node == node and u.amounts.max() == WHOLE_BYTES:
            held.update(f.instants[u.start : u.stop])
    copied = {graph.arguments[0].value: set(), graph.arguments[1].value: set()}
    for u in f.problem.edge_usages:
        value = f.flows[u.edge].value
        if value in copied and u.amounts.max() == WHOLE_BYTES:
            copied[value].update(f.instants[u.start : u.stop])
    of_second, of_third = copied.values()
    if schedule is Schedule.LEAST_MEMORY:
        assert held == {first} and first not in of_second and second not in of_third
    else:
        assert {first, second} <= held and third not in held
        assert second in of_second and {second, third} <= of_third

"""Which sums are exchanged: gradients that are scattered over few devices, for XLA:TPU where it hides collectives."""

import jax
import jax.numpy as jnp
import pytest
from planned import planned

from autoshard.cluster import AxisLevel, Link, MeshAxis, Wires
from autoshard.cluster.catalogue import catalogue
from autoshard.compiler.backends import XlaCpu, XlaGpu, XlaTpu, schedules_of
from autoshard.compiler.exchanged_sums import exchanged_on, exchanged_sums
from autoshard.compiler.options import compiler_options
from autoshard.compiler.ordering import orderings
from autoshard.compiler.orders import OrderKind, orders
from autoshard.compiler.schedule import Schedule
from autoshard.cost.collectives import all_reduce, all_to_all
from autoshard.graph.equation_plan import EquationPlan, ProductPieces
from autoshard.trace.trace import trace

ROWS, WHOLE = (("data",), ()), ((), ())
SCATTERED = EquationPlan(
    operands=((0, (ROWS[::-1],)), (1, (ROWS,))), results=((0, ROWS),), scatters=(("data", 0),)
)  # operand 0 is (features, batch)
LARGE, SMALL = 4 * 512 * 512, 4 * 512 * 512 + 1


def weight_gradient(x, y):
    return x @ y  # equation 0


def further(x, y):
    return jnp.tanh(x @ y) @ y[:512]  # equation 3 reads what 0 makes


def found(fn, plan, size, least_bytes):
    shapes, given = [(512, 1024), (1024, 512)], [ROWS[::-1], ROWS]
    graph = planned(fn, shapes, {0: plan}, {"data": size, "tensor": 2}, given)
    return exchanged_sums(graph, [graph.entry], least_bytes)


@pytest.mark.parametrize(
    ("fn", "plan", "size", "least_bytes", "expected"),
    [
        (weight_gradient, SCATTERED, 16, LARGE, {0}),
        (weight_gradient, SCATTERED, 4, LARGE, {0}),
        (weight_gradient, SCATTERED, 32, LARGE, set()),  # over too many devices
        (weight_gradient, SCATTERED, 16, SMALL, set()),  # its result takes a byte less
        (weight_gradient, EquationPlan(operands=SCATTERED.operands, results=((0, WHOLE),)), 16, LARGE, set()),  # whole
        (further, SCATTERED, 16, LARGE, set()),  # another product waits for it
    ],
)
def test_scattered_gradients_are_exchanged(fn, plan, size, least_bytes, expected):
    assert found(fn, plan, size, least_bytes) == expected


def test_a_product_in_pieces_sends_its_sum_itself():
    plan = EquationPlan(
        SCATTERED.operands, SCATTERED.results, scatters=(("data", 0),), pieces=ProductPieces("data", None, 0)
    )
    assert not found(weight_gradient, plan, 16, 0)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_only_xla_tpu_is_told_to_and_only_where_it_hides_collectives(schedule):
    hides = schedule is Schedule.LATENCY_HIDING
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 1024), (1024, 512))]
    for compiler, exchanges in ((XlaTpu(schedule), hides), (XlaGpu(0, schedule), False), (XlaCpu(), False)):
        assert compiler.hides_exchanged_sums == exchanges
        graph = trace(weight_gradient, shapes).graph
        made = orderings(graph, {0: SCATTERED}, [ROWS[::-1], ROWS], {"data": 4}, compiler.ordering)(None)
        assert made.equations[0].exchanges_parts == exchanges == made.equations[0].unordered.exchanges_parts
        told = [(o.tensor, o.size_bytes) for o in orders(made) if o.kind is OrderKind.EXCHANGED]
        assert told == [("result of dot_general", LARGE / 4)] * exchanges
    options = compiler_options("tpu", schedule) or {}
    assert options.get("xla_tpu_enable_async_all_to_all", False) == bool(options) == hides


@pytest.mark.parametrize(
    ("name", "num_devices", "hides"),
    [("TPU-v5e", 16, True), ("TPU-v5e", 1, False), ("H100-SXM", 1, True), ("CPU-generic", 8, False)],
)
def test_collectives_hide_by_default_on_gpus_and_on_more_than_one_tpu(name, num_devices, hides):
    """Where nothing fits the memory so, the order of least memory is asked for."""
    found = schedules_of(catalogue().device_type(name), num_devices)
    assert found == (Schedule.LATENCY_HIDING,) * hides + (Schedule.LEAST_MEMORY,)


def test_axes_over_which_sums_are_exchanged():
    """In any order, up to 16 devices together."""
    link = Link(0.0, 50e9, 0, "example")
    axes = [MeshAxis(name, size, (AxisLevel(size, link),)) for name, size in (("a", 4), ("b", 4), ("c", 2))]
    ab, ac, bc = (set(pair) for pair in ("ab", "ac", "bc"))
    assert {frozenset(some) for some in exchanged_on(axes)} == set(map(frozenset, ("a", "b", "c", ab, ac, bc)))
    assert ("b", "a") in exchanged_on(axes) and len(exchanged_on(axes)) == 3 + 6


@pytest.mark.parametrize(("side", "is_slower"), [(2, False), (4, True), (8, True)])
def test_over_16_chips_an_exchange_takes_as_long_as_an_all_reduce_and_over_more_longer(side, is_slower):
    """Over a square of chips whose axes end: side / 4 B / w to (1 - 1 / side^2) B / w, without latencies."""
    link = Link(0.0, 50e9, 0, "example", wires=Wires.OPEN)
    axes = [MeshAxis(name, side, (AxisLevel(side, link),)) for name in "ab"]
    exchange, reduction = all_to_all(axes, 1e9).time_s, all_reduce(axes, 1e9).time_s
    assert reduction == pytest.approx((1 - 1 / side**2) * 1e9 / 50e9)
    assert exchange == pytest.approx(max(side / 4, (side - 1) / side) * 1e9 / 50e9)
    assert (exchange > reduction) == is_slower and (side != 4 or exchange < 1.07 * reduction)

"""How long a sum is in flight by the pace of its program: planner, memory and orders agree, derived by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.buffer_uses import BufferKind
from autoshard.compiler.ordering import orderings
from autoshard.compiler.schedule import Schedule
from autoshard.graph.equation_plan import EquationPlan
from autoshard.planner.build import Formulation
from autoshard.planner.pace import pace_of

ROWS, WHOLE = (("a",), ()), ((), ())
PRODUCTS = 14
PRODUCT_S = 2 * 1024**3 / 4 / 1e12 + 1e-6
"""Of 1,024 each way, split over four devices of 1 TFLOP/s; one launch."""
GRADIENT_BYTES = 4 * 8192 * 1024
SUM_S = 0.75 * GRADIENT_BYTES / 1e10 + 3 * 1e-6 + 1e-6
"""Of (8192, 1024) in float32 over four devices at 10 GB/s: three hops, one launch."""


def updated(weight, x, gradient, a):
    """The gradient of a weight, and `PRODUCTS` more behind it."""
    of_weight = jax.lax.dot_general(x, gradient, (((0,), (0,)), ((), ())))
    y = jnp.sin(functools.reduce(jnp.matmul, [a] * PRODUCTS, gradient))
    return weight - of_weight, y


@pytest.fixture(scope="module")
def hidden(formulated, mesh_of) -> Formulation:
    """The problem on four GPUs that hide collectives."""
    mesh = mesh_of(4)
    mesh = dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, product_workspace_bytes=2**20))
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    args = f32(8192, 1024), f32(1024, 8192), f32(1024, 1024), f32(1024, 1024)
    return formulated(updated, args, mesh, donate=(0,), schedule=Schedule.LATENCY_HIDING)


def test_kernels_are_taken_as_split_over_all_devices_and_sums_as_scattered(hidden):
    pace = pace_of(hidden.program, hidden.tables, hidden.mesh)
    products = [o.index for o in hidden.program.graph.operations if o.name == "dot_general"]
    assert len(products) == 1 + PRODUCTS
    for product in products[1:]:
        assert pace.before_s[product + 1] - pace.before_s[product] == pytest.approx(PRODUCT_S)
    assert pace.sum_s(GRADIENT_BYTES) == pytest.approx(SUM_S)


def _of_one_link(mesh):
    """All axes of a mesh on the links of its last one."""
    link = mesh.axes[-1].levels[0].link
    axes = [dataclasses.replace(a, levels=(dataclasses.replace(a.levels[0], link=link),)) for a in mesh.axes]
    return dataclasses.replace(mesh, axes=tuple(axes))


def test_sums_are_taken_as_split_over_all_but_the_slowest_links(hidden, mesh_of):
    """Two nodes of four devices, at 1 GB/s between them and 5 us: one hop, half of a quarter, one launch. In one node
    all eight: three hops and one, of 1 us."""
    pace = pace_of(hidden.program, hidden.tables, mesh_of(2, 4))
    assert pace.sum_s(GRADIENT_BYTES) == pytest.approx(5e-6 + 1e-6 + GRADIENT_BYTES / 4 / 2 / 1e9)
    of_node = pace_of(hidden.program, hidden.tables, _of_one_link(mesh_of(2, 4)))
    assert of_node.sum_s(GRADIENT_BYTES) == pytest.approx(4e-6 + 1e-6 + GRADIENT_BYTES * (3 / 4 + 1 / 8) / 1e10)
    assert pace_of(hidden.program, hidden.tables, mesh_of(1)).sum_s(GRADIENT_BYTES) == pytest.approx(1e-6)


def test_planner_memory_and_orders_give_a_sum_the_same_products(hidden):
    """Ten of the products take more than twice the sum, and nine less: it is there before the eleventh."""
    assert 9 * PRODUCT_S < 2 * SUM_S < 10 * PRODUCT_S
    graph = hidden.program.graph
    gradient, *products = (o for o in graph.operations if o.name == "dot_general")
    due, value = products[10], gradient.results[0]
    assert hidden.overlap.window(value, None) == (gradient.index + 1, due.index)
    group = next(g.index for g in hidden.program.groups if gradient.index in g.operations)
    uses = [use for use in hidden.buffers if use.kind is BufferKind.PARTIAL_SUM and use.owner == group]
    assert max(use.stop for use in uses if use.size_bytes.max() == GRADIENT_BYTES) == due.index
    scattered = EquationPlan(operands=((0, (ROWS,)), (1, (ROWS,))), results=((0, ROWS),), scatters=(("a", 0),))
    equations = orderings(
        graph, {gradient.equation: scattered}, [ROWS] * 3 + [WHOLE], {"a": 4}, hidden.compiler.ordering
    )(None).equations
    followed = {n: [n - before for before, _ in e.follows] for n, e in equations.items() if e.follows}
    assert followed == {due.equation: [gradient.equation]}

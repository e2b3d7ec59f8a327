"""Copies of operands: when each is there, derived by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.compiler.buffer_uses import BufferKind
from autoshard.compiler.schedule import Schedule
from autoshard.graph.graph import OperationKind
from autoshard.graph.layout import WHOLE


def looked_up(tables, at):
    """The second table is read after two products; its indices are an argument."""
    first, second = tables
    x = first[at]
    return (0.9 * first, 0.9 * second), (x @ x.T) @ second[at]


@pytest.mark.parametrize("schedule", Schedule)
def test_where_latency_is_hidden_tables_are_gathered_when_their_indices_are_there(formulated, mesh_of, schedule):
    """Both when the step begins; for the least memory each when it is read."""
    table, mesh = jax.ShapeDtypeStruct((64, 64), jnp.float32), mesh_of(2)
    gpu = dataclasses.replace(mesh.device_type, product_workspace_bytes=4 * 2**20)
    args = (table, table), jax.ShapeDtypeStruct((64,), jnp.int32)
    f = formulated(looked_up, args, dataclasses.replace(mesh, device_type=gpu), donate=(0,), schedule=schedule)
    graph, first_group = f.program.graph, len(f.program.graph.arguments)
    starts, reads = {}, [o.index for o in graph.operations if o.name == "gather"]
    for u in f.problem.edge_usages:
        flow = f.flows[u.edge]
        if flow.read is not None and flow.value in f.program.analysis.weights:
            group = f.program.groups[flow.target - first_group]
            if graph.operations[group.operations[0]].name == "gather":
                starts[flow.value] = f.instants[u.start]
    wanted = [0, 0] if schedule is Schedule.LATENCY_HIDING else reads
    assert [starts[argument.value] for argument in graph.arguments[:2]] == wanted


def scaled(x, w, u, scale):
    """A scaled product that is read before and after another product."""
    a = (x @ w) * scale
    return (jnp.tanh(a) @ u) * a


def test_a_gathered_copy_stays_for_all_that_is_made_of_it(formulated, mesh_of):
    """The scaled product is never stored: both kernels that read it scale again. Where the product is gathered for
    that, the copy stays for the last of them; a slice of it, which kernels take by themselves, counts at the scaling
    alone.
    """
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    f = formulated(scaled, (f32(64, 8), f32(8, 16), f32(16, 16), f32(64, 16)), mesh_of(2))
    graph, first_group = f.program.graph, len(f.program.graph.arguments)
    product = next(o for o in graph.operations if o.name == "dot_general")
    scaling, again = (o.index for o in graph.operations if o.name == "mul")
    held: dict[str, set[int]] = {"slice": set(), "sent": set()}
    for u in f.problem.edge_usages:
        flow = f.flows[u.edge]
        if flow.value != product.results[0] or scaling not in f.program.groups[flow.target - first_group].operations:
            continue
        for source in np.argwhere(u.amounts)[:, 0].tolist():
            kind = "slice" if flow.defined_as.layouts[source] == (WHOLE,) else "sent"
            held[kind].update(f.instants[u.start : u.stop])
    assert held["slice"] == {scaling}
    assert (min(held["sent"]), max(held["sent"])) == (scaling, again)


def turned(state, x):
    """Two gradients, of which the first is turned before the second is made, and subtracted after."""
    w, v = state
    first = (x.T @ jnp.tanh(x)).T
    second = x.T @ (x @ v)
    return w - first, v - second


@pytest.mark.parametrize(("size", "is_there"), [(64, False), (4096, True)])
def test_large_gradients_are_gathered_when_they_are_there(formulated, mesh_of, size, is_there):
    """The turned gradient is never stored: it is made where it is subtracted. Gathered, one of 16 kB waits for others
    to be gathered with, and counts where it is turned alone; one of 64 MiB is joined with none, and there until then.
    """
    square = jax.ShapeDtypeStruct((size, size), jnp.float32)
    f = formulated(turned, ((square, square), square), mesh_of(2), donate=(0,))
    graph, first_group = f.program.graph, len(f.program.graph.arguments)
    product = next(o for o in graph.operations if o.name == "dot_general")
    turning = next(o.index for o in graph.operations if o.name == "transpose" and product.results[0] in o.operands)
    subtracted = next(o.index for o in graph.operations if o.name == "sub")
    held: set[int] = set()
    for u in f.problem.edge_usages:
        flow = f.flows[u.edge]
        if flow.value == product.results[0] and turning in f.program.groups[flow.target - first_group].operations:
            is_sent = [flow.defined_as.layouts[k] != (WHOLE,) for k in range(len(flow.defined_as.layouts))]
            if u.amounts[is_sent].any():
                held.update(f.instants[u.start : u.stop])
    assert (max(held) == subtracted) == is_there and min(held) == turning


def recomputed(x, w):
    """A checkpointed layer in which an activation is read again behind two products."""

    def layer(x):
        y = jnp.tanh(x @ w)
        return (((y @ w) @ w) @ w) @ y

    return jax.checkpoint(layer)(x)


def test_activations_of_a_checkpointed_function_are_moved_as_soon_as_they_are_there(formulated, mesh_of):
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    f = formulated(recomputed, (square, square), mesh_of(2))
    graph, first_group = f.program.graph, len(f.program.graph.arguments)
    made = next(o for o in graph.operations if o.name == "tanh")
    last = [o for o in graph.operations if o.name == "dot_general"][-1]
    held: set[int] = set()
    for u in f.problem.edge_usages:
        flow = f.flows[u.edge]
        is_last = last.index in f.program.groups[flow.target - first_group].operations
        if flow.value == made.results[0] and is_last:
            held.update(f.instants[u.start : u.stop])
    products = [o.index for o in graph.operations if o.name == "dot_general"]
    assert held == set(products[1:])


def in_parts(w, x):
    """A sum over four parts of 16 rows, each behind a product: what is made of x is scanned."""
    first = jnp.tanh(x).reshape(4, 16, 64)
    return jax.lax.scan(lambda total, part: (total + part @ w, None), jnp.zeros((16, 64)), first)[0]


def test_what_a_scan_slices_in_another_layout(formulated, mesh_of):
    """Each slice is moved by itself, 4 kB whole or 2 kB split. Of what is whole and read split, the loop is given a
    piece of all of it, 8 kB; of what is split over the four parts and read whole, all of it, 16 kB."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    f = formulated(in_parts, (f32(64, 64), f32(64, 64)), mesh_of(2))
    graph, first_group = f.program.graph, len(f.program.graph.arguments)
    (loop,) = graph.loops
    slicing = next(o.index for o in graph.operations if o.kind is OperationKind.SCAN_SLICE)
    reads = lambda flow: flow.read is not None and slicing in f.program.groups[flow.target - first_group].operations
    copies = [u for u in f.buffers if u.kind is BufferKind.OPERAND_COPY and reads(f.flows[u.owner])]
    held = {(u.start, u.stop): {*u.size_bytes[u.size_bytes > 0].tolist()} for u in copies}
    assert held == {(slicing, slicing + 1): {64 * 64, 32 * 64}, (loop.start, loop.stop): {4 * 32 * 64, 4 * 64 * 64}}


def read_again(x, w, u):
    """The product 0 is read by the product 1 at once, and by 3 behind the kernel 2."""
    y = x @ w
    return jnp.einsum("ni,nj->ij", y, jnp.tanh(y @ u))


@pytest.mark.parametrize("schedule", Schedule)
def test_where_latency_is_hidden_activations_are_moved_beside_the_kernel_before_their_reader(
    formulated, mesh_of, schedule
):
    square, mesh = jax.ShapeDtypeStruct((64, 64), jnp.float32), mesh_of(2)
    gpu = dataclasses.replace(mesh.device_type, product_workspace_bytes=4 * 2**20)
    f = formulated(read_again, (square,) * 3, dataclasses.replace(mesh, device_type=gpu), schedule=schedule)
    graph = f.program.graph
    assert [o.name for o in graph.operations] == ["dot_general", "dot_general", "tanh", "dot_general"]
    y = graph.operations[0].results[0]
    copies = [u for u in f.buffers if u.kind is BufferKind.OPERAND_COPY and f.flows[u.owner].value == y]
    moved = {(1, 2), (3, 4)}
    assert {(u.start, u.stop) for u in copies} == (moved | {(2, 3)} if schedule is Schedule.LATENCY_HIDING else moved)
    sent = next((u for u in copies if u.start == 2), None)
    assert sent is None or {*sent.size_bytes[sent.size_bytes > 0].tolist()} == {4 * 64 * 64, 2 * 64 * 64}

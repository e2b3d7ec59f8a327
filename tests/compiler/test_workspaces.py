"""What products need beside their operands and results."""

import dataclasses

import jax
import jax.numpy as jnp

from autoshard.cluster import LogicalMesh
from autoshard.compiler.buffer_uses import BufferKind


def workspaces(f) -> list:
    """The usages that are workspaces."""
    return [u for u, use in zip(f.problem.usages, f.buffers, strict=False) if use.kind is BufferKind.WORKSPACE]


def test_each_product_of_matrices_has_its_workspace_while_it_runs(formulated, mesh_of):
    """Of the products 0 and 2, the second is with a vector: a sum in a kernel of its own."""

    def fn(x, w, v):
        return jnp.tanh(x @ w) @ v

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    args = shape(8, 8), shape(8, 8), shape(8)
    without = formulated(fn, args, mesh_of(2))
    mesh = without.mesh
    device = dataclasses.replace(mesh.device_type, product_workspace_bytes=4096)
    f = formulated(fn, args, LogicalMesh(mesh.axes, device))
    graph = f.program.graph
    products = [o.index for o in graph.operations if o.name == "dot_general"]
    assert len(products) == 2
    (usage,) = workspaces(f)
    assert f.instants[usage.start : usage.stop] == (products[0],)
    assert set(usage.amounts.tolist()) == {4096.0}  # whatever the choice
    assert not workspaces(without)


def test_a_product_runs_when_what_it_reads_is_made_with_something_else(formulated, mesh_of):
    """The sine of a layer that is computed again is made with its gradient, the cosine's product (both of the product
    0): the weight gradient that reads it, which the program makes first, runs right behind that.
    """

    def step(state, x, d):
        a, b = state
        h = x @ a
        b_gradient = jnp.einsum("ni,nj->ij", jnp.sin(h), d)
        g = (d @ b) * jnp.cos(h)
        return (a - jnp.einsum("ni,nj->ij", x, g), b - b_gradient), (g @ a).sum(0)

    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    args = (square, square), square, square
    mesh = mesh_of(1)
    device = dataclasses.replace(mesh.device_type, product_workspace_bytes=4096)
    f = formulated(step, args, LogicalMesh(mesh.axes, device), donate=(0,))
    live, operations = f.program.analysis.live, f.program.graph.operations
    early = next(o for o in operations if o.name == "dot_general" and o.index)
    both = next(o for o in operations if o.name == "mul")
    assert live.delayed == {early.index: both.index + 1}
    (sine,) = (life for life in live.ranges if life.value == early.operands[0])
    assert (sine.start, sine.stop) == (both.index, both.index + 2)
    at = {f.instants[usage.start] for usage in workspaces(f)}
    assert both.index + 1 in at and early.index not in at


def test_rows_in_groups_are_laid_out_once_for_each_group(formulated, mesh_of):
    """For a product the rows, for the gradient of the rows the matrices as well, transposed, for that of the matrices
    both sides: of 3 groups, 8 rows x 4 and 3 matrices of 4 x 16 in float32.
    """

    def fn(x, w, y, sizes):
        made, back = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w)
        return made, back(y)

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    args = shape(8, 4), shape(3, 4, 16), shape(8, 16), jax.ShapeDtypeStruct((3,), jnp.int32)
    mesh = mesh_of(1)
    device = dataclasses.replace(mesh.device_type, product_workspace_bytes=5000)
    f = formulated(fn, args, LogicalMesh(mesh.axes, device))
    products = [o for o in f.program.graph.operations if o.name == "ragged_dot_general"]
    is_gradient = lambda o: f.program.graph.values[o.results[0]].shape == (3, 4, 16)
    rows, matrices, made = 4 * 8 * 4, 4 * 3 * 4 * 16, 4 * 8 * 16
    for product in products:
        found = sorted(u.amounts[0] for u in workspaces(f) if f.instants[u.start] == product.index)
        if is_gradient(product):
            assert found == [3 * rows, 3 * made, 5000]
        elif f.program.graph.values[product.results[0]].shape == (8, 16):
            assert found == [3 * rows, 5000]
        else:
            assert found == sorted([matrices, 3 * made, 5000])
    assert len(products) == 3

"""What products need beside their operands and results."""

import dataclasses

import jax
import jax.numpy as jnp

from autoshard.cluster import LogicalMesh


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
    (usage,) = (f.problem.usages[k] for k in f.workspaces)
    assert f.instants[usage.start : usage.stop] == (products[0],)
    assert set(usage.amounts.tolist()) == {4096.0}  # whatever the choice
    assert not without.workspaces

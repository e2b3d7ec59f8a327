"""Which gathered copies are tied to what is read with them."""

import jax
import jax.numpy as jnp

from autoshard.compiler.analysis import analyse
from autoshard.compiler.tied_copies import tied_copies
from autoshard.graph.layout import WHOLE
from autoshard.trace.trace import trace


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def scaled(x, w, scale):
    x = x @ w
    x = jnp.tanh(x) * scale
    x = x @ w
    return jnp.tanh(x) * scale @ w


def test_a_barrier_stores_nothing_larger_than_the_copy_that_it_puts_off(mesh_of):
    """Gathered again for every product, w is tied to the product's other operand, which is stored anyway. The scale of
    64 numbers is not tied to the 16 x 64 that are computed in the kernel that scales them; as large as they are, it is.
    """
    for shape, names in ((1, 64), ["dot_general"] * 2), ((16, 64), ["dot_general", "mul", "dot_general"]):
        program = analyse(trace(scaled, (f32(16, 64), f32(64, 64), f32(*shape))).graph)
        graph = program.graph
        copied = {a.value for a in graph.arguments[1:]}
        layouts = {v: (WHOLE,) for v in range(len(graph.values))}
        gathers = [
            (o.index, slot, (WHOLE,))
            for o in graph.operations
            for slot, v in enumerate(o.operands)
            if v in copied and o.name in ("dot_general", "mul")
        ]
        tied = tied_copies(program, mesh_of(8).shape, layouts, gathers)
        assert [graph.operations[o].name for o, _ in tied] == names

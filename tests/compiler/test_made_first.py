"""Products that others wait for, and when what they read is there, derived by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.compiler.buffer_uses import BufferKind
from autoshard.compiler.live_buffers import shortened
from autoshard.compiler.made_first import made_first
from autoshard.compiler.ordering import OrderingRules
from autoshard.compiler.schedule import Schedule
from autoshard.cost.collectives import all_reduce, reduce_scatter
from autoshard.graph.layout import WHOLE

MIB = 2.0**20


def gated(w, a, b, g):
    """The product 1 makes the gradient of the weight from 0, both branches multiplied; 4 and 5 are their gradients."""
    of_w, of_h = jnp.einsum("nd,ne->de", a * b, g), jnp.einsum("ne,de->nd", g, w)
    return w - of_w, (of_h * a) @ (of_h * b).T


@pytest.mark.parametrize(
    ("reduce", "mib", "schedule", "is_first"),
    [
        (None, 0, Schedule.LEAST_MEMORY, True),
        (reduce_scatter, 64, Schedule.LEAST_MEMORY, True),
        (reduce_scatter, 16, Schedule.LEAST_MEMORY, False),
        (all_reduce, 64, Schedule.LEAST_MEMORY, False),
        (all_reduce, 1, Schedule.LEAST_MEMORY, True),
        (reduce_scatter, 64, Schedule.LATENCY_HIDING, False),
    ],
)
def test_what_a_product_reads_that_others_wait_for_is_made_for_it(
    formulated, mesh_of, solved, reduce, mib, schedule, is_first
):
    """The product 2 waits for the weight's gradient if that is whole on each device, or scattered alone, or takes less
    than the branches multiplied, 2 MiB: the branches' gradients are behind it. Else one kernel makes what the product 1
    reads together with one of them, and the product runs right behind.
    """
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    f = formulated(gated, (f32(4096, 4096), *[f32(128, 4096)] * 3), mesh_of(2), donate=(0,))
    graph, layouts = f.program.graph, {v: (WHOLE,) for v in range(len(f.program.graph.values))}
    one = () if reduce is None else (reduce(f.mesh.axes, mib * MIB),)
    sums = [one if 1 in group.operations else () for group in f.program.groups]
    program = solved(f, layouts, [(WHOLE,)] * len(f.flows), sums)
    first = made_first(program, OrderingRules(schedule=schedule))
    spans, _ = shortened(program, f.buffers, np.ones(len(f.buffers)), first)
    span_of = lambda is_it: tuple(spans[next(k for k, use in enumerate(f.buffers) if is_it(use))].tolist())
    assert span_of(lambda use: use.value == graph.operations[0].results[0]) == ((0, 2) if is_first else (4, 6))
    assert span_of(lambda use: use.kind is BufferKind.PARTIAL_SUM) == ((1, 2) if is_first else (5, 6))

"""Gathers that wait for each other: from when on copies of weights are there, derived by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.buffer_uses import BufferKind, spans_of
from autoshard.compiler.queued_gathers import queued
from autoshard.compiler.schedule import Schedule
from autoshard.compiler.transfer_times import TransferTimes
from autoshard.graph.layout import WHOLE


def layers(state, x):
    """Products 0 to 4; weight v is read by the products 1 and 4, and u by 3."""
    w, v, u = state
    y = ((((x @ w) @ v) @ w) @ u) @ v
    return (0.9 * w, 0.9 * v, 0.9 * u), y


@pytest.mark.parametrize(
    ("reader", "begins", "expected"),
    [(3, 1, 1), (3, 3, 2), (3, None, 2), (4, 0, 2)],
    ids=["before the products in between", "no later than its orders say", "not told", "not before it is read before"],
)
def test_a_copy_is_there_from_when_its_gather_begins(
    formulated, mesh_of, solved, monkeypatch, reader, begins, expected
):
    """By its orders it would be there from the product before its reader on, or right behind the last that read it."""
    monkeypatch.setattr("autoshard.compiler.hiding_spans.FEW_PRODUCTS", 3)
    square, mesh = jax.ShapeDtypeStruct((64, 64), jnp.float32), mesh_of(2)
    gpu = dataclasses.replace(mesh.device_type, product_workspace_bytes=32 * 2**20)  # of Hopper
    mesh = dataclasses.replace(mesh, device_type=gpu)
    f = formulated(layers, ((square,) * 3, square), mesh, donate=(0,), schedule=Schedule.LATENCY_HIDING)
    operations = f.program.graph.operations
    assert [o.name for o in operations[:5]] == ["dot_general"] * 5
    weight = operations[reader].operand(1)
    key = operations[reader].equation, 1
    times = TransferTimes({} if begins is None else {key: begins}, {})
    layouts = dict.fromkeys(range(len(f.program.graph.values)), (WHOLE,))
    spans = queued(solved(f, layouts, [(WHOLE,)] * len(f.flows)), f.buffers, spans_of(f.buffers), times)
    starts = {
        int(start)
        for use, (start, stop) in zip(f.buffers, spans, strict=True)
        if use.kind is BufferKind.OPERAND_COPY and f.flows[use.owner].value == weight and stop == reader + 1
    }
    assert starts == {expected}

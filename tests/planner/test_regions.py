"""What parts cost that a program splits by hand (`shard_map`): by hand, on two devices."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from autoshard.planner.decode import estimate

TWO = AbstractMesh((2,), ("a",), (AxisType.Auto,))
LAUNCH_S, BANDWIDTH = 1e-6, 1e11
HOP_S, LINK = 1e-6, 1e10


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def by_hand(in_specs, out_specs):
    return functools.partial(jax.shard_map, mesh=TWO, in_specs=in_specs, out_specs=out_specs)


@pytest.fixture
def estimated(formulated, mesh_of):
    """(fn, args) -> the estimate of its only plan"""

    def make(fn, *args):
        f = formulated(fn, args, mesh_of(2))
        (table,), (row,) = f.tables, f.decisions[-1].rows  # the program says how it is split
        as_read = [f.argument_layouts[i].index(table.reads[i][row]) for i in range(len(args))]  # nothing moves
        picks = [f.decisions[i].rows.index(k) for i, k in enumerate(as_read)] + [0]
        solver_s = f.problem.nodes[-1].costs[0]
        return estimate(f, picks), solver_s

    return make


def test_a_product_and_a_sum(estimated):
    """Rows of 16 x 8 floats are split; each device multiplies 8 x 8 by 8 x 4, and both add what they have."""

    @by_hand((P("a"), P()), P())
    def fn(x, w):
        return jax.lax.psum(x @ w, "a")

    e, solver_s = estimated(fn, f32(16, 8), f32(8, 4))
    assert e.flops == 2 * 8 * 8 * 4
    assert e.compute_s == pytest.approx(LAUNCH_S + (256 + 128 + 128) / BANDWIDTH), "reads, writes, and nothing twice"
    assert e.comm_s == pytest.approx(2 * (HOP_S + 64 / LINK) + LAUNCH_S), "two passes of a ring, half of 128 B each"
    assert solver_s == pytest.approx(e.compute_s + e.comm_s)
    (sent,) = e.communication
    assert (sent.kind, sent.axes, sent.wire_bytes, sent.count, sent.shape) == ("all-reduce", ("a",), 128, 1, (8, 4))
    assert "test_regions.py" in sent.source
    assert [c.name for c in e.compute] == ["dot_general"]


def test_a_loop_of_exchanges(estimated):
    @by_hand(P("a"), P("a"))
    def fn(x):
        def turn(carry, _):
            return jax.lax.ppermute(carry, "a", [(0, 1), (1, 0)]), None

        return jax.lax.scan(turn, x, None, length=5)[0]

    e, _ = estimated(fn, f32(16, 8))
    (sent,) = e.communication
    assert (sent.kind, sent.count, sent.wire_bytes) == ("collective-permute", 5, 5 * 256)
    assert e.comm_s == pytest.approx(5 * (HOP_S + 256 / LINK + LAUNCH_S))


@pytest.mark.parametrize(
    ("collective", "kind", "sent_bytes"),
    [
        (lambda x: jax.lax.all_gather(x, "a", tiled=True)[:8], "all-gather", 256),  # half of 512 B
        (lambda x: jnp.tile(jax.lax.psum_scatter(x, "a", tiled=True), (2, 1)), "reduce-scatter", 128),  # half of 256 B
        (lambda x: jax.lax.all_to_all(x, "a", 0, 0, tiled=True), "all-to-all", 128),
        (lambda x: x + jax.lax.pmax(x, "a"), "all-reduce", 256),
        (lambda x: x + jax.lax.pmean(x, "a"), "all-reduce", 256),
    ],
)
def test_what_each_kind_sends(estimated, collective, kind, sent_bytes):
    e, _ = estimated(by_hand(P("a"), P("a"))(collective), f32(16, 8))
    assert [(c.kind, c.wire_bytes) for c in e.communication] == [(kind, sent_bytes)]


def test_what_is_held_inside_counts(estimated):
    """Each device multiplies 8 x 8 by 8 x 64, and the 2,048 B between two products are nowhere outside."""

    @by_hand((P("a"), P(), P()), P("a"))
    def fn(x, up, down):
        return jnp.sin(x @ up) @ down

    e, _ = estimated(fn, f32(16, 8), f32(8, 64), f32(64, 8))
    inside = [m for m in e.memory if m.memory_class == "workspaces"]
    arguments_bytes, result_bytes = 256 + 2048 + 2048, 256
    assert [m.size_bytes for m in inside] == [pytest.approx(2 * 2048)], "sin(x @ up) beside x @ up"
    assert e.peak_bytes == pytest.approx(arguments_bytes + result_bytes + inside[0].size_bytes)


def test_a_region_in_a_region_counts_as_often_as_it_runs(estimated):
    @by_hand(P("a"), P("a"))
    def fn(x):
        inner = jax.shard_map(lambda y: y + jax.lax.psum(y, "a"), in_specs=P(), out_specs=P(), axis_names=set())
        return jax.lax.fori_loop(0, 3, lambda _, y: inner(y), x)

    e, _ = estimated(fn, f32(16, 8))
    assert [(c.kind, c.count) for c in e.communication] == [("all-reduce", 3)]


def test_nothing_is_sent_over_an_axis_of_one_device(formulated, mesh_of):
    mesh = AbstractMesh((2, 1), ("a", "b"), (AxisType.Auto,) * 2)
    moved = lambda x: jax.lax.ppermute(jax.lax.psum(x, "b"), "b", [(0, 0)])
    fn = jax.shard_map(moved, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False)
    f = formulated(fn, (f32(16, 8),), mesh_of(2, 1))
    picks = [f.argument_layouts[0].index((0, -1)), 0]
    assert not [c for c in estimate(f, picks).communication if "b" in c.axes]

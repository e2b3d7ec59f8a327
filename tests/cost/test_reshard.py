"""Paths between layouts: their laws, their prices, and what XLA makes of them on eight CPU devices."""

import collections
import dataclasses
import itertools
import math
import re

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard.cluster import AxisLevel, DeviceType, Link, LogicalMesh, MeshAxis
from autoshard.cost.reshard import path, reshard, total_s
from autoshard.graph.layout import WHOLE, all_layouts, fits, shard_bytes, spec_entries

LINK = Link(latency_s=1e-6, bandwidth_bytes_per_s=100e9, level=0, source="test")
SLOW = Link(latency_s=10e-6, bandwidth_bytes_per_s=10e9, level=1, source="test")
DEVICE = DeviceType("test", {"float32": 1e12}, 10**9, 1e12, 0.0, "test")
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|collective-broadcast|reduce-scatter)(?:-start)?\("
)
AXES = st.sampled_from([(2,), (8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (8, 1), (2, 1, 4)])
SHAPES = st.lists(st.sampled_from([1, 2, 4, 6, 8, 16]), max_size=3).map(tuple)


def mesh_of(sizes, links=None) -> LogicalMesh:
    """A mesh with one level an axis."""
    links = links or [LINK] * len(sizes)
    return LogicalMesh(
        tuple(
            MeshAxis("abc"[a], n, (AxisLevel(n, link),) if n > 1 else ())
            for a, (n, link) in enumerate(zip(sizes, links, strict=True))
        ),
        DEVICE,
    )


@st.composite
def moves(draw):
    """(shape, source, target, axis sizes)"""
    shape, sizes = draw(SHAPES), draw(AXES)
    layouts = st.sampled_from(all_layouts(shape, sizes))
    return shape, draw(layouts), draw(layouts), sizes


@given(moves())
@settings(max_examples=400, deadline=None)
def test_a_path_leads_from_source_to_target_over_legal_layouts(move):
    shape, source, target, sizes = move
    steps = path(shape, source, target, sizes)
    assert (source == target) == (steps == ())
    now = source
    for step in steps:
        assert step.before == now and fits(step.after, shape, sizes)
        changed = [a for a in range(len(sizes)) if step.before[a] != step.after[a]]
        assert sorted(step.axes) == changed != []
        now = step.after
    assert now == target
    assert collections.Counter(a for s in steps for a in s.axes).most_common(1)[0][1] == 1 if steps else True


def is_slice(before, after, sizes) -> bool:
    """Whether each device's new piece lies inside its old one: axes only join behind those that split a dimension."""
    split = [a for a, n in enumerate(sizes) if n > 1]
    return all(
        before[a] == after[a] or (before[a] == WHOLE and not any(b > a and before[b] == after[a] for b in split))
        for a in split
    )


@given(moves())
@settings(max_examples=400, deadline=None)
def test_free_is_what_needs_no_bytes_of_others(move):
    shape, source, target, sizes = move
    time_s = total_s(reshard(shape, 4.0 * math.prod(shape), source, target, mesh_of(sizes)))
    assert (time_s == 0) == is_slice(source, target, sizes)


@given(moves())
@settings(max_examples=200, deadline=None)
def test_a_move_sends_at_least_what_the_devices_lack(move):
    """A device that ends with `held` bytes and begins with at most `had` of them receives the rest from others."""
    shape, source, target, sizes = move
    size_bytes = 4.0 * math.prod(shape)
    held, had = shard_bytes(size_bytes, target, sizes), shard_bytes(size_bytes, source, sizes)
    steps = reshard(shape, size_bytes, source, target, mesh_of(sizes))
    assert sum(c.wire_bytes for c in steps) >= held - had - 1e-6


@given(moves(), st.floats(1.0, 100.0))
@settings(max_examples=100, deadline=None)
def test_moving_more_bytes_takes_longer(move, scale):
    shape, source, target, sizes = move
    assume(source != target)
    price = lambda size_bytes: total_s(reshard(shape, size_bytes, source, target, mesh_of(sizes)))
    assert price(1e6) <= price(scale * 1e6)


def test_prices_by_hand():
    """A tensor of 16 x 16 floats (1024 B) on a mesh of 2 x 4 with 1 us a hop and 100 GB/s."""
    mesh = mesh_of((2, 4))
    price = lambda source, target: [
        (c.kind.value, c.wire_bytes, pytest.approx(c.time_s)) for c in reshard((16, 16), 1024.0, source, target, mesh)
    ]
    assert price((WHOLE, WHOLE), (0, 1)) == []
    assert price((0, 1), (0, WHOLE)) == [("all-gather", 384.0, 3e-6 + 3.84e-9)]  # 3/4 of the 512 B that each ends with
    assert price((0, 1), (0, 0)) == [("all-to-all", 96.0, 3e-6 + 0.96e-9)]  # 3/4 of the 128 B that each holds
    assert price((WHOLE, 0), (0, 0)) == [("collective-permute", 128.0, 1e-6 + 1.28e-9)]  # slice, then pieces in order


@given(moves(), st.sampled_from([(4, 2), (2, 4)]), st.data())
@settings(max_examples=200, deadline=None)
def test_axes_that_go_together_move_like_one_of_their_size(move, sizes, data):
    """Each move on (4, 2), the 4 in two levels, costs the same on (2, 2, 2), where both parts of the 4 go with it."""
    shape = move[0]
    layouts = st.sampled_from(all_layouts(shape, sizes))
    source, target = data.draw(layouts), data.draw(layouts)
    merged = sizes.index(4)
    axes = list(mesh_of(sizes, [SLOW, LINK]).axes)
    link = axes[merged].levels[0].link
    axes[merged] = MeshAxis("m", 4, (AxisLevel(2, link), AxisLevel(2, link)))
    parts = [MeshAxis(name, 2, (AxisLevel(2, link),)) for name in "mn"]
    split = [*axes[:merged], *parts, *axes[merged + 1 :]]
    finer = lambda layout: (*layout[: merged + 1], *layout[merged:])
    price = lambda mesh, *ends: [
        (c.kind, pytest.approx(c.wire_bytes), pytest.approx(c.time_s))
        for c in reshard(shape, 1e6, *ends, LogicalMesh(tuple(mesh), DEVICE))
    ]
    assert price(split, finer(source), finer(target)) == price(axes, source, target)


def test_gathers_cross_the_slow_axis_on_the_smallest_pieces():
    """1 MB sharded over a slow axis of 2 (dimension 0) and a fast one of 4 (dimension 1): the slow one goes first."""
    slow, fast = reshard((16, 16), 1e6, (0, 1), (WHOLE, WHOLE), mesh_of((2, 4), [SLOW, LINK]))
    assert (slow.axes, slow.wire_bytes) == (("a",), 125e3)
    assert (fast.axes, fast.wire_bytes) == (("b",), 750e3)


EXECUTED = [
    # mesh, shape, source, target, collectives
    ((8,), (16, 16), (WHOLE,), (0,), []),
    ((8,), (16, 16), (0,), (WHOLE,), ["all-gather"]),
    ((8,), (16, 16), (0,), (1,), ["all-to-all"]),
    ((2, 4), (16, 16), (0, 1), (0, 0), ["all-to-all"]),
    ((2, 4), (16, 16), (0, 1), (WHOLE, WHOLE), ["all-gather", "all-gather"]),
    ((2, 4), (16, 16), (0, 0), (WHOLE, WHOLE), ["all-gather"]),
    ((2, 4), (16, 16), (0, 0), (1, 1), ["all-to-all"]),
    ((2, 2, 2), (8, 8, 8), (0, 2, 0), (1, 2, 1), ["all-to-all"]),
    ((2, 2, 2), (8, 8), (0, 0, 0), (1, 0, 1), ["all-to-all", "collective-permute"]),
    ((2, 4), (16, 16), (0, 1), (1, 0), ["all-to-all", "all-to-all", "collective-permute"]),
    ((2, 4), (16, 16), (WHOLE, 0), (0, 0), ["collective-permute"]),
    ((2, 4), (16, 16), (0, 0), (WHOLE, 0), ["all-gather", "collective-permute"]),
    ((2, 4), (16, 16), (1, WHOLE), (0, 1), ["all-to-all", "collective-permute"]),  # slice, move the small pieces
    ((2, 2, 2), (8, 8), (0, 0, 1), (1, WHOLE, 1), None),
    ((2, 2, 2), (8, 8), (0, 1, WHOLE), (WHOLE, 1, 0), None),
    ((2, 2, 2), (8, 8), (WHOLE, 0, 1), (0, WHOLE, WHOLE), None),
    ((2, 2, 2), (2, 4), (0, 1, WHOLE), (1, 0, 1), ["collective-permute"]),  # the axes change places all at once
    ((2, 2, 2), (4, 2, 8), (0, 2, 2), (2, 2, 0), None),
    ((2, 2, 2), (4, 2, 8), (2, 1, 0), (WHOLE, 0, 2), None),
]


@pytest.mark.parametrize(("sizes", "shape", "source", "target", "expected"), EXECUTED)
def test_xla_moves_as_predicted(sizes, shape, source, target, expected):
    """The path, compiled for eight devices, has exactly the predicted collectives, and keeps the values."""
    mesh = jax.make_mesh(sizes, tuple("abc"[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes))
    sharding = lambda layout: NamedSharding(
        mesh, PartitionSpec(*[e or None for e in spec_entries(layout, len(shape), "abc")])
    )
    steps = path(shape, source, target, sizes)

    def move(x):
        for step in steps:
            x = jax.lax.with_sharding_constraint(x, sharding(step.after))
        return x * 2

    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    program = jax.jit(move, in_shardings=sharding(source), out_shardings=sharding(target)).lower(x).compile()
    predicted = sorted(c.kind.value for c in reshard(shape, float(x.nbytes), source, target, mesh_of(sizes)))
    assert sorted(COLLECTIVE.findall(program.as_text())) == predicted
    assert expected is None or predicted == sorted(expected)
    np.testing.assert_array_equal(program(jax.device_put(x, sharding(source))), 2 * x)


def test_every_pair_on_the_widest_tensor_has_a_price():
    sizes, shape = (2, 2, 2), (8, 8)
    for source, target in itertools.product(all_layouts(shape, sizes), repeat=2):
        assert math.isfinite(total_s(reshard(shape, 256.0, source, target, mesh_of(sizes))))


@pytest.mark.parametrize(
    ("shape", "source", "target", "num_kernels"),
    [
        ((64, 32), (0, 0), (WHOLE, WHOLE), 0),  # rows of a matrix
        ((64, 32), (1, 1), (WHOLE, WHOLE), 0),  # columns: products take either
        ((64, 32), (0, 1), (WHOLE, WHOLE), 1),  # both: one of them is in the other's way
        ((64, 8, 16), (0, 0), (WHOLE, WHOLE), 0),  # outermost
        ((64, 8, 16), (1, 1), (WHOLE, WHOLE), 1),  # heads, behind features
        ((64, 8, 16), (1, 0), (WHOLE, 0), 1),
        ((2, 8, 16), (1, 0), (WHOLE, 0), 0),  # one example a device: a matrix
    ],
)
def test_gpus_put_in_order_what_is_gathered_along_inner_dimensions(shape, source, target, num_kernels):
    """A kernel that reads and writes what each device ends with, on top of what other devices take."""
    gpu = dataclasses.replace(DEVICE, product_workspace_bytes=1)
    mesh, size_bytes = mesh_of((4, 2)), 4.0 * math.prod(shape)
    times_s = [total_s(reshard(shape, size_bytes, source, target, LogicalMesh(mesh.axes, d))) for d in (gpu, DEVICE)]
    ends_bytes = shard_bytes(size_bytes, target, mesh.shape)
    kernel_s = DEVICE.launch_overhead_s + 2 * ends_bytes / DEVICE.memory_bandwidth_bytes_per_s
    assert times_s[0] - times_s[1] == pytest.approx(num_kernels * kernel_s, abs=1e-15)

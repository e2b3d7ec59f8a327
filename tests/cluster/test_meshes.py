"""Logical meshes: hand-derived layouts, and laws over many cluster shapes checked against explicit device grids."""

import collections
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cluster import AxisLevel, Cluster, DeviceType, Link, LogicalMesh, MeshAxis, NodeGroup
from autoshard.errors import AutoshardError, MeshError

CHIP = DeviceType("Chip", {"float32": 1e12, "bfloat16": 8e12}, 32e9, 1e12, 4e-6, "example")
INTRA = Link(3e-6, 300e9, 0, "example")
INTER = Link(10e-6, 25e9, 1, "example")
NODES = st.integers(1, 12)
PER_NODE = st.integers(1, 12)


def one_group(num_nodes, devices_per_node):
    return Cluster("example", (NodeGroup("group", CHIP, num_nodes, devices_per_node, INTRA, INTER),))


def levels_of(mesh):
    """For each axis, (size, hardware level) pairs, innermost first."""
    return {axis.name: [(level.size, level.link.level) for level in axis.levels] for axis in mesh.axes}


@pytest.mark.parametrize(
    ("nodes", "per_node", "axes", "expected"),
    [
        (2, 8, {"data": 4, "tensor": 4}, {"data": [(2, 0), (2, 1)], "tensor": [(4, 0)]}),
        (2, 8, {"data": 2, "tensor": 8}, {"data": [(2, 1)], "tensor": [(8, 0)]}),
        (2, 8, {"data": 16}, {"data": [(8, 0), (2, 1)]}),
        (2, 8, {"data": 1, "tensor": 16}, {"data": [], "tensor": [(8, 0), (2, 1)]}),
        (4, 8, {"data": 2, "tensor": 16}, {"data": [(2, 1)], "tensor": [(8, 0), (2, 1)]}),
        (2, 8, {"data": 2, "fsdp": 2, "tensor": 4}, {"data": [(2, 1)], "fsdp": [(2, 0)], "tensor": [(4, 0)]}),
        (3, 6, {"data": 6, "tensor": 3}, {"data": [(2, 0), (3, 1)], "tensor": [(3, 0)]}),
        (3, 6, {"data": 9, "tensor": 2}, {"data": [(3, 0), (3, 1)], "tensor": [(2, 0)]}),
        (5, 7, {"data": 5, "tensor": 7}, {"data": [(5, 1)], "tensor": [(7, 0)]}),
        (1, 1, {"data": 1}, {"data": []}),
    ],
)
def test_hand_derived_layouts(nodes, per_node, axes, expected):
    mesh = one_group(nodes, per_node).slices()[0].logical_mesh(axes)
    assert levels_of(mesh) == expected
    assert mesh.shape == tuple(axes.values())
    assert mesh.axis_names == tuple(axes)
    assert mesh.num_devices == nodes * per_node


@pytest.mark.parametrize(
    ("nodes", "per_node", "axes"),
    [
        (2, 8, {"data": 4, "tensor": 5}),
        (2, 8, {}),
        (2, 8, {"data": 16, "tensor": 0}),
        (2, 8, {"data": -4, "tensor": -4}),
        (2, 8, {"data": 4.0, "tensor": 4}),
        (2, 8, {"data": True, "tensor": 16}),
        (3, 6, {"data": 2, "tensor": 9}),  # 9 is one and a half nodes
        (3, 6, {"a": 3, "b": 2, "c": 3, "d": 2}),
        (2, 8, {"": 16}),
    ],
)
def test_meshes_that_do_not_fit(nodes, per_node, axes):
    with pytest.raises(MeshError):
        one_group(nodes, per_node).slices()[0].logical_mesh(axes)


def test_the_message_tells_what_would_fit():
    with pytest.raises(MeshError, match=r"16 devices.*makes 20.*\{data: 8, tensor: 2\}; \{data: 4, tensor: 4\}; "):
        one_group(2, 8).slices()[0].logical_mesh({"x": 4, "y": 5})
    with pytest.raises(MeshError, match=r"6, 3 members.*\{data: 9, tensor: 2\}; \{data: 6, tensor: 3\}"):
        one_group(3, 6).slices()[0].logical_mesh({"x": 2, "y": 9})


def test_all_meshes_of_two_nodes_of_eight():
    meshes = one_group(2, 8).slices()[0].logical_meshes()
    assert [dict(zip(mesh.axis_names, mesh.shape, strict=True)) for mesh in meshes] == [
        {"data": 16},
        {"data": 8, "tensor": 2},
        {"data": 4, "tensor": 4},
        {"data": 2, "tensor": 8},
        {"data": 4, "fsdp": 2, "tensor": 2},
        {"data": 2, "fsdp": 4, "tensor": 2},  # {2, 2, 4} has the same axes: 2 across nodes, 2 and 4 inside
    ]
    assert meshes[:4] == one_group(2, 8).slices()[0].logical_meshes(max_axes=2)
    assert meshes[:1] == one_group(2, 8).slices()[0].logical_meshes(max_axes=1)


def test_the_list_stays_short_for_a_thousand_devices():
    meshes = one_group(128, 8).slices()[0].logical_meshes()
    assert len(meshes) <= 67
    assert collections.Counter(len(mesh.axes) for mesh in meshes)[2] == 9  # 2 x 512 ... 512 x 2, all different


@pytest.mark.parametrize("max_axes", [0, 4, -1])
def test_the_number_of_axes_is_limited(max_axes):
    with pytest.raises(MeshError, match="1, 2 or 3"):
        one_group(2, 8).slices()[0].logical_meshes(max_axes)


def grid_link_level(nodes, per_node, axis_sizes, axis):
    """For each pair along an axis of a row-major grid of device numbers, whether it crosses nodes."""
    grid = np.arange(nodes * per_node).reshape(axis_sizes)
    lines = np.moveaxis(grid, axis, -1).reshape(-1, axis_sizes[axis])
    return [tuple(device // per_node for device in line) for line in lines]


@settings(deadline=None, max_examples=150)
@given(nodes=NODES, per_node=PER_NODE)
def test_laws_of_logical_meshes(nodes, per_node):
    part = one_group(nodes, per_node).slices()[0]
    meshes = part.logical_meshes()
    assert meshes == part.logical_meshes()
    assert len(set(meshes)) == len(meshes)
    assert meshes[0].shape == (nodes * per_node,)
    for mesh in meshes:
        assert mesh.num_devices == math.prod(mesh.shape) == nodes * per_node
        assert mesh.device_type is CHIP
        totals = collections.Counter()
        for position, axis in enumerate(mesh.axes):
            assert math.prod(level.size for level in axis.levels) == axis.size
            assert mesh.axis(axis.name) is axis
            numbers = [level.link.level for level in axis.levels]
            assert numbers == sorted(set(numbers))
            sizes = {level.link.level: level.size for level in axis.levels}
            for level in axis.levels:
                totals[level.link.level] += math.log(level.size)
            # In the explicit grid, a line of the axis meets as many nodes as the levels say, equally often.
            for line in grid_link_level(nodes, per_node, mesh.shape, position):
                met = collections.Counter(line)
                assert set(met.values()) == {sizes.get(0, 1)}
                assert len(met) == sizes.get(1, 1)
        assert math.isclose(math.exp(totals[0]), per_node)
        assert math.isclose(math.exp(totals[1]), nodes)


@settings(deadline=None, max_examples=100)
@given(nodes=st.integers(1, 8), per_node=st.integers(1, 8))
def test_every_even_layout_is_listed_once_up_to_names(nodes, per_node):
    """Brute force: a layout is even if each line of each axis meets its nodes in equal, adjacent runs."""
    total = nodes * per_node
    part = one_group(nodes, per_node).slices()[0]
    expected = set()
    for count in (1, 2, 3):
        for sizes in itertools.product([size for size in range(2, total + 1) if total % size == 0], repeat=count):
            if math.prod(sizes) != total:
                continue
            axes = []
            for axis in range(count):
                shapes = set()
                for line in grid_link_level(nodes, per_node, sizes, axis):
                    runs = [len(list(run)) for _, run in itertools.groupby(line)]
                    shapes.add((runs[0], len(runs)) if len(set(runs)) == 1 else None)
                axes.append(shapes.pop() if len(shapes) == 1 else None)
            if None not in axes:
                expected.add(tuple(sorted(axes)))
    listed = [
        tuple(
            sorted(
                (
                    math.prod(level.size for level in axis.levels if level.link == INTRA),
                    math.prod(level.size for level in axis.levels if level.link == INTER),
                )
                for axis in mesh.axes
            )
        )
        for mesh in part.logical_meshes()
    ]
    assert len(listed) == len(set(listed))
    assert set(listed) == (expected or {((1, 1),)})


@settings(deadline=None, max_examples=200)
@given(nodes=NODES, per_node=PER_NODE, sizes=st.lists(st.integers(-1, 12), max_size=4))
def test_any_request_gives_that_mesh_or_an_error(nodes, per_node, sizes):
    axes = {f"a{index}": size for index, size in enumerate(sizes)}
    try:
        mesh = one_group(nodes, per_node).slices()[0].logical_mesh(axes)
    except AutoshardError as error:
        assert isinstance(error, MeshError)
    else:
        assert mesh.shape == tuple(sizes)
        assert mesh.num_devices == nodes * per_node


def test_meshes_refuse_contradictions():
    with pytest.raises(MeshError, match="multiply to its size"):
        MeshAxis("data", 4, (AxisLevel(2, INTRA),))
    with pytest.raises(MeshError, match="distinct names"):
        LogicalMesh((MeshAxis("data", 2, (AxisLevel(2, INTRA),)),) * 2, CHIP)
    with pytest.raises(MeshError, match="at least one axis"):
        LogicalMesh((), CHIP)
    with pytest.raises(MeshError, match="no axis 'tensor'"):
        one_group(1, 2).slices()[0].logical_mesh({"data": 2}).axis("tensor")
    with pytest.raises(AutoshardError, match="at least 2"):
        AxisLevel(1, INTRA)


def test_meshes_print():
    mesh = one_group(2, 8).slices()[0].logical_mesh({"data": 4, "tensor": 4})
    assert str(mesh) == "16 x Chip as data=4 (2 at level 0 x 2 at level 1), tensor=4 (4 at level 0)"

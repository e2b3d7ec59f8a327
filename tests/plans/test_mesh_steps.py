"""Steps between meshes, and the walk that a search takes over them."""

import math
import pathlib

import pytest

from autoshard.cluster import Slice, load

H100 = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x1024.yaml"


@pytest.fixture(scope="module")
def hardware() -> Slice:
    return load(H100).slices()[0]


def steps_of(hardware, shape, like=None):
    names = ("data", "fsdp", "tensor")
    meshes = [m for m in hardware.logical_meshes(3) if len(m.axes) == 3]
    at = hardware.logical_mesh(dict(zip(names if len(shape) == 3 else ("data", "tensor"), shape, strict=True)))
    return [(step, mesh.shape) for step, mesh in MeshSteps(meshes).of(at, like)]


def test_a_step_moves_one_prime_factor(hardware):
    found = steps_of(hardware, (32, 4, 8))
    assert {shape for _, shape in found} == {(16, 8, 8), (16, 4, 16), (64, 2, 8), (32, 2, 16), (64, 4, 4), (32, 8, 4)}
    for (source, target), shape in found:
        ratios = [new / old for new, old in zip(shape, (32, 4, 8), strict=True)]
        assert ratios[source] == 1 / 2 and ratios[target] == 2 and math.prod(shape) == 1024


def test_steps_lead_from_fewer_axes_and_never_back(hardware):
    assert {shape for _, shape in steps_of(hardware, (128, 8))} == {(64, 2, 8), (128, 2, 4)}
    assert [step for step, _ in steps_of(hardware, (32, 4, 8), like=(2, 1))][0] == (2, 1)
    assert steps_of(hardware, (1024,)) == []  # two axes lie between


def test_all_meshes_of_three_axes_can_be_reached(hardware):
    every = {m.shape for m in hardware.logical_meshes(3) if len(m.axes) == 3}
    reached, waiting = set(), [(128, 8)]
    while waiting:
        for _, shape in steps_of(hardware, waiting.pop()):
            if shape not in reached:
                reached.add(shape)
                waiting.append(shape)
    assert reached == every

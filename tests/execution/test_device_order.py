"""Which live device is at which coordinate: by number, and on a torus by the coordinates that JAX tells."""

import dataclasses

import jax
import pytest

from autoshard.errors import MeshError
from autoshard.execution.jit import by_coordinates, device_mesh


@dataclasses.dataclass(frozen=True)
class Chip:
    """What JAX tells of a TPU: host by host, so that numbers do not follow coordinates."""

    id: int
    coords: tuple[int, int, int]
    slice_index: int = 0


def chips(slices=1):
    """2 x 4 x 1 chips a slice, two by two to a host."""
    places = [(x, y + 2 * host, 0) for host in range(2) for y in range(2) for x in range(2)]
    return [Chip(s * 8 + n, place, s) for s in range(slices) for n, place in enumerate(places)]


def test_an_order_of_numbers():
    devices = jax.devices()[:4]
    mesh = device_mesh((("data", 2), ("tensor", 2)), devices, (2, 0, 3, 1))
    assert mesh.devices.tolist() == [[devices[2], devices[0]], [devices[3], devices[1]]]
    assert device_mesh((("data", 4),), devices).devices.tolist() == devices


def test_chips_are_numbered_by_their_coordinates():
    found = by_coordinates(chips(), (2, 4))
    assert [chip.coords[:2] for chip in found] == [(x, y) for x in range(2) for y in range(4)]
    assert [chip.id for chip in found] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_slices_come_one_after_another():
    found = by_coordinates(chips(2)[::-1], (2, 2, 4))
    assert [(chip.slice_index, *chip.coords[:2]) for chip in found] == [
        (s, x, y) for s in range(2) for x in range(2) for y in range(4)
    ]


def test_another_torus_is_refused():
    with pytest.raises(MeshError, match=r"torus of 4x2 chips, but the given devices span 1x2x4x1"):
        by_coordinates(chips(), (4, 2))


def test_devices_without_coordinates_stay_as_listed():
    assert by_coordinates(jax.devices()[:8], (2, 4)) == jax.devices()[:8]

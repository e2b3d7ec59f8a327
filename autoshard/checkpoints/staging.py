"""Getting the shards of a process off its devices while the next step is about to reuse their memory."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.checkpoints.layout import Piece

Places = Callable[[], Sequence[np.ndarray]]
"""Gives the bytes on the host that shards are copied to."""


@dataclasses.dataclass(frozen=True, slots=True)
class Staged:
    """Shards that may be read at leisure: `arrays` in the order of the pieces. None if they were copied already."""

    arrays: tuple[Any, ...] | None


class Staging:
    """Copies shards to the host: on CPUs at once; on accelerators from a copy on the device, if there is room for it.

    A copy within a device takes some thousandths of the time that it takes to the host, and the copy to the host then
    runs beside the next step, which would otherwise wait for it.
    """

    def __init__(self) -> None:
        self._has_room: bool | None = None

    def begin(self, arrays: Sequence[Any], pieces: Sequence[Piece], places: Places) -> Staged:
        """Takes the shards; `finish` has them in `places` afterwards.

        Args:
            arrays: the leaves of a state, which may be donated when this returns.
            pieces: which of their shards.
            places: gives bytes on the host, as many for each piece as it has. Called once, here or by `finish`, and not
                before all shards are computed.
        """
        of_leaf = {n: arrays[n].addressable_shards for n in {piece.leaf for piece in pieces} if _is_array(arrays[n])}
        shards = [of_leaf[p.leaf][p.shard].data if p.leaf in of_leaf else arrays[p.leaf] for p in pieces]
        on_device = [shard for shard in shards if _is_array(shard) and _is_distant(shard)]
        if not on_device:
            _fill_all(shards, places)
            return Staged(None)
        if self._has_room is None:
            self._has_room = _has_room(on_device)
        if self._has_room:
            shards = _copies(shards)
        for shard in shards:
            if isinstance(shard, jax.Array):
                shard.copy_to_host_async()
        if self._has_room:
            return Staged(tuple(shards))
        _fill_all(shards, places)
        return Staged(None)

    def finish(self, staged: Staged, places: Places) -> None:
        """Waits until the bytes are in `places`."""
        if staged.arrays is not None:
            _fill_all(staged.arrays, places)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def _fill_all(shards: Sequence[Any], places: Places) -> None:
    jax.block_until_ready(shards)
    for shard, place in zip(shards, places(), strict=True):
        _fill(place, np.asarray(shard))  # a view that is kept would make the next step copy the array


def _fill(place: np.ndarray, numbers: np.ndarray) -> None:
    place[:] = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)


def _is_distant(shard: jax.Array) -> bool:
    """Whether a shard lies in memory that the host does not read as its own."""
    return shard.device.platform != "cpu"  # pyright: ignore[reportAttributeAccessIssue]: of one device, it is that


def _has_room(shards: Sequence[jax.Array]) -> bool:
    """Whether every device has room for copies of its shards beside what it needed at its fullest so far."""
    need: dict[jax.Device, int] = {}
    for shard in shards:
        (device,) = shard.devices()
        need[device] = need.get(device, 0) + shard.nbytes
    for device, need_bytes in need.items():
        stats = device.memory_stats() or {}
        free_bytes = stats.get("bytes_limit", 0) - stats.get("peak_bytes_in_use", 0)
        if free_bytes < need_bytes + need_bytes // 8:  # an eighth for what fragmentation makes unusable
            return False
    return True


def _copies(shards: Sequence[Any]) -> list[Any]:
    """Copies on the same devices, one program for each device."""
    found = list(shards)
    by_device: dict[jax.Device, list[int]] = {}
    for number, shard in enumerate(shards):
        if isinstance(shard, jax.Array):
            by_device.setdefault(next(iter(shard.devices())), []).append(number)
    for numbers in by_device.values():
        for number, copy in zip(numbers, _copy([shards[n] for n in numbers]), strict=True):
            found[number] = copy
    return found


@jax.jit
def _copy(shards: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(shard) for shard in shards]

"""Values and the layouts that they are known to have."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.compiler.versions import jax_version
from autoshard.errors import MissingExtraError
from autoshard.execution.row_major import shards_row_major
from autoshard.graph.layout import SpecEntries, is_slice


def partition_spec(entries: SpecEntries) -> PartitionSpec:
    """Axis names per dimension as a PartitionSpec, trailing whole dimensions dropped."""
    spec = [e[0] if len(e) == 1 else (e or None) for e in entries]
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)


HOST_MEMORY = "pinned_host"
"""What JAX calls the memory of the host from which devices copy by themselves."""

HOST_MEMORY_SINCE = 0, 10, 2
"""The JAX from which on programs over several devices may have values there."""


def refuse_host_memory(mesh: Mesh) -> None:
    """Refuses a program with anything in the memory of the host that this JAX cannot compile for several devices.

    JAX 0.10.1 says of each result of such a program in which memory it lies, and not how devices split it; XLA's
    partitioner refuses that ("Side-effect HLO must have sharding").

    Raises:
      MissingExtraError: This is such a JAX; says what to do.
    """
    if mesh.size > 1 and jax_version() < HOST_MEMORY_SINCE:
        needed, found = (".".join(map(str, version)) for version in (HOST_MEMORY_SINCE, jax_version()))
        raise MissingExtraError(
            f"a plan with state or activations in the memory of the host needs JAX {needed} or later on several "
            f"devices; this is {found}, and XLA refuses what it makes of such a program. Install a later JAX, or plan "
            'with PlanOptions(offload="never")'
        )


def sharding_of(mesh: Mesh, entries: SpecEntries, in_host: bool) -> NamedSharding:
    """The sharding of an argument or output that lies on the devices of `mesh`, or in the memory of their hosts."""
    spec = partition_spec(entries)
    return NamedSharding(mesh, spec, memory_kind=HOST_MEMORY) if in_host else NamedSharding(mesh, spec)


class Placed(NamedTuple):
    """A value and the layout that it is known to have; None where the plan has not said any.

    `filled`: the scalar that fills the value, where the program makes it of one. `copy`: The value as it was read in
    another layout, and that layout, where later readers wait for the same as those of the value. `in_host`: whether it
    lies in the memory of the host.
    """

    value: Any
    entries: SpecEntries | None
    filled: Any = None
    copy: tuple[Any, SpecEntries] | None = None
    in_host: bool = False


def known_layouts(placed: Sequence[Placed]) -> dict[int, SpecEntries]:
    """The layouts that are known, by position."""
    return {slot: p.entries for slot, p in enumerate(placed) if p.entries is not None}


def is_moved(entries: SpecEntries | None, wanted: SpecEntries) -> bool:
    """Whether pieces are sent to other devices, and none is larger, on the way from one layout to another."""
    if entries is None or is_slice(entries, wanted):
        return False
    return {a for axes in entries for a in axes} <= {a for axes in wanted for a in axes}


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Puts values into layouts on a mesh of devices."""

    mesh: Mesh

    def constrain(self, value: Any, entries: SpecEntries | None) -> Any:
        """`value` in a layout; as it is, if that is None."""
        if entries is None or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, partition_spec(entries)))

    def move(self, value: Any, steps: Sequence[SpecEntries]) -> Any:
        """`value` taken through the layouts `steps`, one after another."""
        for entries in steps:
            value = self.constrain(value, entries)
        return value

    def place(self, value: Any, entries: SpecEntries | None) -> Placed:
        """`value` in a layout, which is known of it then."""
        return Placed(self.constrain(value, entries), entries)

    def tied(self, value: Any, like: Placed) -> Placed:
        """`value`, which a barrier made of `like`, where that lies."""
        return like._replace(value=value) if like.in_host else self.place(value, like.entries)

    def fetched(self, placed: Placed) -> Placed:
        """What lies in the memory of the host, copied to the devices."""
        if not placed.in_host:
            return placed
        return self.place(jax.device_put(placed.value, jax.memory.Space.Device), placed.entries)

    def stored(self, placed: Placed) -> Placed:
        """What lies on the devices, copied to the memory of the host."""
        held = jax.device_put(placed.value, jax.memory.Space.Host)
        return placed._replace(value=held, copy=None, in_host=True)

    def row_major(self, value: Any, entries: SpecEntries) -> Any:
        """`value`, which lies as `entries` say, with each shard stored row by row."""
        return shards_row_major(value, partition_spec(entries), self.mesh)

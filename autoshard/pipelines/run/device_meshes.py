"""The devices of a staged plan, the meshes of its submeshes, and arrays that every device has a copy of."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.errors import MeshError
from autoshard.execution.jit import by_coordinates
from autoshard.pipelines.plan.parameter_owners import StageId
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan, PlacedMesh
from autoshard.transfer.cross_mesh import CrossMeshTransfer, as_array


class DeviceMeshes:
    """Devices and meshes of a plan.

    Attributes:
      devices: One for each device of the cluster, in its order.
      meshes: The mesh of every submesh, all pipelines one after another.
      everywhere: The sharding of what every device has a copy of, such as the step counter.
      readable: The sharding of what every process can read, also one whose devices no stage runs on, such as metrics.
    """

    def __init__(self, plan: PipelinePlan, devices: Sequence[Any] | None):
        chosen = list(jax.devices() if devices is None else devices)
        if len(chosen) != plan.num_devices:
            kinds = ", ".join(f"{s.num_devices} x {s.device}" for s in plan.slices)
            raise MeshError(
                f"The plan is for the {plan.num_devices} devices of cluster `{plan.cluster}` ({kinds}), but "
                f"{len(chosen)} are given. Pass devices= with that many, slice after slice, or plan again for the "
                "devices at hand."
            )
        for part in plan.slices:
            if part.torus:
                own = slice(part.first_device, part.first_device + part.num_devices)
                chosen[own] = by_coordinates(chosen[own], part.torus)
        self.devices = chosen
        self.meshes: list[Mesh] = []
        self._submesh_of: dict[tuple[int, int], int] = {}
        for p, submeshes in enumerate(plan.meshes):
            for k, placed in enumerate(submeshes):
                self._submesh_of[p, k] = len(self.meshes)
                self.meshes.append(_mesh(placed, chosen))
        used = list(dict.fromkeys(d for mesh in self.meshes for d in mesh.devices.flat))
        self.everywhere = NamedSharding(Mesh(np.array(used), ("device",)), PartitionSpec())
        firsts = {d.process_index: d for d in reversed(chosen)}
        idle = [firsts[p] for p in sorted(firsts) if all(d.process_index != p for d in used)]
        self.readable = NamedSharding(Mesh(np.array([*used, *idle]), ("device",)), PartitionSpec())
        self._plan = plan

    def submesh_of(self, one: StageId) -> int:
        """The number of the submesh that holds a stage."""
        return self._submesh_of[one.pipeline, one.stage % len(self._plan.meshes[one.pipeline])]

    def mesh_of(self, one: StageId) -> Mesh:
        """The mesh that a stage runs on."""
        return self.meshes[self.submesh_of(one)]

    def is_local(self, submesh: int) -> bool:
        """Whether this process has any devices of a submesh."""
        here = jax.process_index()
        return any(d.process_index == here for d in self.meshes[submesh].devices.flat)

    def others(self, submesh: int) -> list[int]:
        """The processes that run the programs of a submesh together with this one; none if this one has no part."""
        found = {d.process_index for d in self.meshes[submesh].devices.flat}
        return sorted(found - {jax.process_index()}) if self.is_local(submesh) else []

    def copy_on(self, array: jax.Array, submesh: int) -> jax.Array | jax.ShapeDtypeStruct:
        """The copies on one submesh of an array that lies `everywhere`; no data moves."""
        sharding = NamedSharding(self.meshes[submesh], PartitionSpec())
        if not self.is_local(submesh):
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        wanted = set(self.meshes[submesh].devices.flat)
        shards = [s.data for s in array.addressable_shards if s.device in wanted]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)

    def joined(self, copies: Sequence[Any]) -> jax.Array:
        """One array `everywhere`, of its copies on all submeshes, by submesh."""
        by_device: dict[Any, Any] = {}
        for copy in copies:
            if isinstance(copy, jax.Array):
                by_device.update((s.device, s.data) for s in copy.addressable_shards)
        first = copies[0]
        return jax.make_array_from_single_device_arrays(
            first.shape, self.everywhere, list(by_device.values()), dtype=first.dtype
        )


def _mesh(placed: PlacedMesh, devices: Sequence[Any]) -> Mesh:
    own = np.empty(placed.num_devices, dtype=object)
    own[:] = [devices[n] for n in placed.devices]
    names, sizes = [a for a, _ in placed.axes], [n for _, n in placed.axes]
    return Mesh(own.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


def bring(leaf: Any, target: NamedSharding, mover: CrossMeshTransfer, name: str) -> jax.Array:
    """A leaf of the user's state or batch in the layout in which the step keeps it.

    What every process has in full (host arrays; in a run of several, arrays on a process's own devices alone) is taken
    to be equal in all of them; each takes its part. Anything else is moved.
    """
    if isinstance(leaf, jax.Array) and leaf.sharding == target:
        return leaf
    is_shared = jax.process_count() > 1 and isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    if is_shared or (isinstance(leaf, jax.Array) and jax.process_count() == 1):
        moved = mover.move(leaf, target, name=name)
        return as_array(moved)
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    plain = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    plain = plain.astype(jax.dtypes.canonicalize_dtype(plain.dtype))
    made = jax.make_array_from_callback(plain.shape, target, lambda index: plain[index], dtype=plain.dtype)
    return jax.random.wrap_key_data(made, impl=jax.random.key_impl(leaf)) if is_key else made

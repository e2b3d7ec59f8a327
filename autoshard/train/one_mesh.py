"""One mesh for what a run does outside of its step in stages: evaluations, and searching a step for its first NaN."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.checkpoints.agreement import met
from autoshard.checkpoints.spread_out import is_small
from autoshard.pipelines.run.staged_function import StagedFunction
from autoshard.transfer.cross_mesh import as_array

_AXIS = "device"


class OneMesh:
    """The devices of that slice of a staged plan which has most memory, as a mesh of one axis.

    Arrays that are not small are split by the first dimension that the number of devices divides, so that a model that
    fits the slice in stages mostly fits it so too; the compiler shards what lies between.

    Attributes:
      whole: The layout of what each of its devices has a copy of.
      is_local: Whether this process has any of its devices.
    """

    def __init__(self, step: StagedFunction):
        self._step = step
        largest = max(step.plan.slices, key=lambda s: s.limit_bytes * s.num_devices)
        own = np.empty(largest.num_devices, dtype=object)
        own[:] = step.device_meshes.devices[largest.first_device : largest.first_device + largest.num_devices]
        self._mesh = Mesh(own, (_AXIS,), axis_types=(AxisType.Auto,))
        self.whole = NamedSharding(self._mesh, PartitionSpec())
        self.is_local = any(d.process_index == jax.process_index() for d in own)

    def shardings(self, shapes: Any) -> Any:
        """Where the arrays of a pytree lie on the mesh, by shape."""
        return jax.tree.map(self._sharding, shapes)

    def bring(self, tree: Any) -> Any:
        """The arrays of a pytree, wherever they lie, on the mesh; waits until all processes have theirs."""
        move = lambda x: as_array(self._step.mover.move(x, self._sharding(x)))
        return self._arrived(jax.tree.map(move, tree))

    def everywhere(self, tree: Any) -> Any:
        """Arrays of the mesh where each process can read them."""
        move = lambda x: as_array(self._step.mover.move(x, self._step.device_meshes.readable))
        return self._arrived(jax.tree.map(move, tree))

    def _arrived(self, moved: Any) -> Any:
        self._step.wait(moved)
        met("moved what a run does outside of its step", self._step.mover.timeout_s)
        return moved

    def absent(self, shapes: Any) -> Any:
        """What stands for whole arrays on the mesh in a process that has none of its devices."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.whole), shapes)

    def _sharding(self, x: Any) -> NamedSharding:
        count = self._mesh.size
        if is_small(x):
            return self.whole
        split = next((k for k, extent in enumerate(x.shape) if extent and extent % count == 0), None)
        entries = [_AXIS if k == split else None for k in range(len(x.shape))]
        return NamedSharding(self._mesh, PartitionSpec(*entries))

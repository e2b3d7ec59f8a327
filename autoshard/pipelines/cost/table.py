"""What a layer costs on a mesh: the table that the stage search reads."""

import dataclasses
from collections.abc import Mapping

from autoshard.cluster.mesh import LogicalMesh


@dataclasses.dataclass(frozen=True, slots=True)
class MeshOption:
    """A way to run a stage: on so many devices of one slice, as one logical mesh.

    Attributes:
      slice: Index into `Cluster.slices()`.
      mesh: The logical mesh; its first axis is the major one.
      shards_weights: Whether stages are priced with their weights split over the mesh, also where copies are faster: so
        the search sees what it costs to fit the memory. A stage is planned within its memory in either case.
    """

    slice: int
    mesh: LogicalMesh
    shards_weights: bool = False

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.mesh.num_devices

    def __str__(self) -> str:
        axes = ",".join(f"{a.name}={a.size}" for a in self.mesh.axes)
        return f"{self.mesh.device_type.name} {axes}{', weights split' if self.shards_weights else ''}"


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer on one mesh, for one micro-batch; bytes are those of one device.

    Attributes:
      forward_s, backward_s, weight_s: Time of each phase: backward_s makes the gradients of the layer's inputs, and
        weight_s those of its weights.
      update_s: Time of the optimizer's update of all its weights, once a step.
      weight_bytes: Its weights. gradient_bytes: The sums of their gradients. optimizer_bytes: The optimizer's state.
      weight_total_bytes: Its weights over the whole mesh, copies not counted: what travels when a copy is sent.
      residual_bytes: What is held of a micro-batch from the forward to the backward pass.
      weight_residual_bytes: What is held from the backward to the weight phase, where they are apart.
      input_bytes: Its inputs, held in place of the residuals if the stage is computed again in the backward pass.
      working_bytes: Most that is needed while a phase runs, besides all of the above.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    update_s: float
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    weight_total_bytes: float
    residual_bytes: float
    weight_residual_bytes: float
    input_bytes: float
    working_bytes: float


@dataclasses.dataclass(frozen=True, slots=True)
class CostKey:
    """What a `LayerCost` depends on: the kind of layer, the index of the mesh option, the micro-batch's examples."""

    kind: int
    option: int
    micro_batch_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class CostTable:
    """Costs of all kinds of layers on all mesh options, for the micro-batch sizes that are tried.

    Attributes:
      options: The ways to run a stage.
      costs: By key; a key that is absent is not possible (the size does not divide, or nothing fits).
    """

    options: tuple[MeshOption, ...]
    costs: Mapping[CostKey, LayerCost]

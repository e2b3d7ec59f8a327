"""A run of identical nodes, and what readers of cluster files and of live devices make of them."""

import dataclasses
from typing import NamedTuple

from autoshard.cluster.checks import require_text, require_whole
from autoshard.cluster.device import DeviceType, Link
from autoshard.cluster.mesh import AxisLevel
from autoshard.errors import ClusterError

MOST_DEVICES = 1 << 24
"""Most devices of one node group; beyond every machine there is, it catches figures in the wrong unit."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeGroup:
    """Identical nodes with identical devices.

    A TPU slice is described as one node whose devices are its chips: `intra_node` is the torus (ICI), with the
    one-way bandwidth that a chip has along one torus axis, and `inter_node` the data-centre network between
    slices. This simplification sees neither the torus coordinates nor that a mesh axis laid over several torus
    axes has more bandwidth; it errs on the slow side.

    Attributes:
      name: Name of the group.
      device_type: What the devices are.
      num_nodes: Number of nodes.
      devices_per_node: Number of devices in each node; any number, also not a power of two.
      intra_node: Link between devices of one node.
      inter_node: Link between nodes of the group; may be None if there is one node.
    """

    name: str
    device_type: DeviceType
    num_nodes: int
    devices_per_node: int
    intra_node: Link
    inter_node: Link | None = None

    def __post_init__(self) -> None:
        require_text("node group", "name", self.name)
        owner = f"node group {self.name!r}"
        object.__setattr__(self, "num_nodes", require_whole(owner, "num_nodes", self.num_nodes))
        object.__setattr__(self, "devices_per_node", require_whole(owner, "devices_per_node", self.devices_per_node))
        require_whole(owner, "num_nodes x devices_per_node", self.num_devices, most=MOST_DEVICES)
        if self.inter_node is None:
            if self.num_nodes > 1:
                raise ClusterError(f"{owner} has {self.num_nodes} nodes and so must have an inter_node link.")
        elif self.inter_node.level <= self.intra_node.level:
            raise ClusterError(
                f"{owner}: the level of inter_node must be above that of intra_node; received "
                f"{self.inter_node.level} and {self.intra_node.level}. Use 0 inside a node and 1 between nodes."
            )

    @property
    def num_devices(self) -> int:
        """Number of devices in all nodes."""
        return self.num_nodes * self.devices_per_node

    @property
    def levels(self) -> tuple[AxisLevel, ...]:
        """Hardware levels, innermost first, without levels of size 1."""
        levels = ((self.devices_per_node, self.intra_node), (self.num_nodes, self.inter_node))
        return tuple(AxisLevel(size, link) for size, link in levels if size > 1 and link is not None)

    def __str__(self) -> str:
        return f"{self.name}: {self.num_nodes} nodes of {self.devices_per_node} x {self.device_type.name}"


class ClusterDescription(NamedTuple):
    """The fields of a `Cluster`, not yet checked against each other."""

    name: str
    groups: tuple[NodeGroup, ...]
    between_groups: Link | None = None

"""The cluster: groups of identical nodes, possibly of several device types."""

import dataclasses
import os

from autoshard.cluster.checks import require_text, require_whole
from autoshard.cluster.device import DeviceType, Link
from autoshard.cluster.mesh import AxisLevel
from autoshard.cluster.slices import Slice
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


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """All devices that a program may use.

    Attributes:
      name: Name of the cluster.
      groups: The node groups, in device order.
      between_groups: Link between devices of different groups; may be None if there is one group.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    between_groups: Link | None = None

    def __post_init__(self) -> None:
        require_text("cluster", "name", self.name)
        object.__setattr__(self, "groups", tuple(self.groups))
        owner = f"cluster {self.name!r}"
        if not self.groups:
            raise ClusterError(f"{owner} must have at least one node group; received none.")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ClusterError(f"{owner}: node groups must have distinct names; received {', '.join(names)}.")
        types = {group.device_type.name: group.device_type for group in self.groups}
        for group in self.groups:
            if types[group.device_type.name] != group.device_type:
                raise ClusterError(
                    f"{owner}: the name of a device type must stand for one set of figures; {group.device_type.name!r} "
                    "stands for two. Give the types different names."
                )
        if self.between_groups is None:
            if len(self.groups) > 1:
                raise ClusterError(f"{owner} has {len(self.groups)} node groups and so must have between_groups.")
        elif any(level.link.level > self.between_groups.level for group in self.groups for level in group.levels):
            raise ClusterError(
                f"{owner}: the level of between_groups must not be below that of a link inside a group; received "
                f"{self.between_groups.level}. Use 2 where groups are further apart than nodes."
            )

    @property
    def num_devices(self) -> int:
        """Number of devices in all groups."""
        return sum(group.num_devices for group in self.groups)

    @property
    def is_homogeneous(self) -> bool:
        """Whether the whole cluster is one slice."""
        return len(self.slices()) == 1

    def slices(self) -> tuple[Slice, ...]:
        """The homogeneous parts of the cluster, in device order.

        A run of adjacent groups that are equal in all but name becomes one slice, with `between_groups` as a
        further level outside the nodes; every other group is a slice of its own, also where only the number
        of nodes differs.
        """
        runs: list[list[NodeGroup]] = []
        for group in self.groups:
            if runs and dataclasses.replace(runs[-1][0], name=group.name) == group:
                runs[-1].append(group)
            else:
                runs.append([group])
        return tuple(self._slice(run) for run in runs)

    def _slice(self, run: list[NodeGroup]) -> Slice:
        levels = run[0].levels
        if len(run) > 1 and self.between_groups is not None:
            if levels and levels[-1].link == self.between_groups:
                levels = (*levels[:-1], AxisLevel(levels[-1].size * len(run), self.between_groups))
            else:
                levels = (*levels, AxisLevel(len(run), self.between_groups))
        return Slice("+".join(group.name for group in run), run[0].device_type, levels)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "Cluster":
        """Reads a cluster file; see `autoshard.cluster.load` for its schema.

        Raises:
          FileFormatError: If the file cannot be read, is of another format or version, or has unknown keys.
          ClusterError: If its values are out of range or contradict each other.
        """
        from autoshard.cluster.load import read_cluster

        return read_cluster(path)

    @classmethod
    def from_paddle_json(cls, path: str | os.PathLike[str]) -> "Cluster":
        """Reads PaddlePaddle's cluster JSON; see `autoshard.cluster.paddle` for what is made of it.

        Raises:
          FileFormatError: If the file cannot be read or does not have that schema.
          ClusterError: If its values are out of range or contradict each other.
        """
        from autoshard.cluster.paddle import read_paddle_json

        return read_paddle_json(path)

    @classmethod
    def detect(cls) -> "Cluster":
        """Describes the devices that JAX sees now; see `autoshard.cluster.detect`.

        Raises:
          ClusterError: If a device is of a kind that the catalogue does not know.
        """
        from autoshard.cluster.detect import detect_cluster

        return detect_cluster()

    def to_dict(self) -> dict[str, object]:
        """The cluster as the content of a cluster file that needs no catalogue."""
        from autoshard.cluster.load import cluster_to_dict

        return cluster_to_dict(self)

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Writes a cluster file that `from_file` reads back to an equal cluster.

        Raises:
          FileFormatError: If the file cannot be written.
        """
        from autoshard.cluster.load import write_cluster

        write_cluster(self, path)

    def __str__(self) -> str:
        return f"{self.name} ({self.num_devices} devices): " + "; ".join(str(group) for group in self.groups)

"""The cluster: groups of identical nodes, possibly of several device types."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator

from autoshard.cluster.checks import require_text
from autoshard.cluster.detect import detect_cluster
from autoshard.cluster.device import Link
from autoshard.cluster.load import cluster_to_dict, read_cluster
from autoshard.cluster.mesh import AxisLevel
from autoshard.cluster.node_group import ClusterDescription, NodeGroup
from autoshard.cluster.paddle import read_paddle_json
from autoshard.cluster.slices import Slice
from autoshard.errors import ClusterError
from autoshard.files import write_text_atomically, yaml_text


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
        of nodes differs, or where no levels describe how its devices are joined.
        """
        runs: list[list[NodeGroup]] = []
        for group in self.groups:
            if runs and group.uneven is None and dataclasses.replace(runs[-1][0], name=group.name) == group:
                runs[-1].append(group)
            else:
                runs.append([group])
        return tuple(self._slice(run) for run in runs)

    def _slice(self, run: list[NodeGroup]) -> Slice:
        group = run[0]
        levels = group.levels
        if len(run) > 1 and self.between_groups is not None:
            if levels and levels[-1].link == self.between_groups:
                levels = (*levels[:-1], AxisLevel(levels[-1].size * len(run), self.between_groups))
            else:
                levels = (*levels, AxisLevel(len(run), self.between_groups))
        name, order = "+".join(group.name for group in run), group.order
        if order and len(run) > 1:
            order = tuple(k * group.num_devices + device for k in range(len(run)) for device in order)
        num_nodes = group.num_nodes * len(run)
        torus = () if group.torus is None else (*((num_nodes,) if num_nodes > 1 else ()), *group.torus.shape)
        return Slice(name, group.device_type, levels, order, torus, group.rails, group.uneven, group.host)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "Cluster":
        """Reads a cluster file; see `autoshard.cluster.load` for its schema.

        Raises:
          FileFormatError: If the file cannot be read, is of another format or version, or has unknown keys.
          ClusterError: If its values are out of range or contradict each other.
        """
        with _naming(path):
            return cls(*read_cluster(path))

    @classmethod
    def from_paddle_json(cls, path: str | os.PathLike[str]) -> "Cluster":
        """Reads PaddlePaddle's cluster JSON; see `autoshard.cluster.paddle` for what is made of it.

        Raises:
          FileFormatError: If the file cannot be read or does not have that schema.
          ClusterError: If its values are out of range or contradict each other.
        """
        with _naming(path):
            return cls(*read_paddle_json(path))

    @classmethod
    def detect(cls) -> "Cluster":
        """Describes the devices that JAX sees now; see `autoshard.cluster.detect`.

        Raises:
          ClusterError: If a device is of a kind that the catalogue does not know.
        """
        return cls(*detect_cluster())

    def to_dict(self) -> dict[str, object]:
        """The cluster as the content of a cluster file that needs no catalogue."""
        return cluster_to_dict(ClusterDescription(self.name, self.groups, self.between_groups))

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Writes a cluster file that `from_file` reads back to an equal cluster.

        Raises:
          FileFormatError: If the file cannot be written.
        """
        write_text_atomically(path, yaml_text(self.to_dict()))

    def __str__(self) -> str:
        return f"{self.name} ({self.num_devices} devices): " + "; ".join(str(group) for group in self.groups)


@contextlib.contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts the path before the text of errors that do not know it."""
    try:
        yield
    except ClusterError as error:
        raise ClusterError(f"{os.fsdecode(path)}: {error}") from error

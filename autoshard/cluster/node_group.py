"""A run of identical nodes, and what readers of cluster files and of live devices make of them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from autoshard.cluster.checks import require_text, require_whole
from autoshard.cluster.device import DeviceType, Link
from autoshard.cluster.host import Host
from autoshard.cluster.mesh import AxisLevel
from autoshard.cluster.pair_speeds import PairSpeeds
from autoshard.cluster.tiers import Tier, check_tiers, even_sizes, sorted_nodes
from autoshard.cluster.uneven import Uneven
from autoshard.cluster.wiring import Torus
from autoshard.errors import ClusterError

MOST_DEVICES = 1 << 24
"""Most devices of one node group; beyond every machine there is, it catches figures in the wrong unit."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeGroup:
    """Identical nodes with identical devices.

    A TPU slice is described as one node whose devices are its chips: `intra_node` is a ring along one closed axis of
    the torus (ICI), with the one-way bandwidth that a chip has along it, and `inter_node` the data-centre network
    between slices. Without `torus`, neither coordinates are seen nor that a mesh axis laid over several torus axes has
    more bandwidth; that errs on the slow side.

    Attributes:
      name: Name of the group.
      device_type: What the devices are.
      num_nodes: Number of nodes.
      devices_per_node: Number of devices in each node; any number, also not a power of two.
      intra_node: Link between devices of one node.
      inter_node: Link between nodes of the group; may be None if there is one node.
      torus: How the devices of a node are wired, where they are a torus.
      tiers: Switches above the nodes, innermost first; `inter_node` then joins the nodes within one innermost part.
      rails: Where devices with one number in their nodes share switches: the link between devices with different
        numbers in different nodes. None where that makes no difference.
      pairs: Speeds of pairs of nodes, or of devices, which take the place of `inter_node`, or of all links.
      host: CPUs and memory of each node; None if nothing is told of them.
    """

    name: str
    device_type: DeviceType
    num_nodes: int
    devices_per_node: int
    intra_node: Link
    inter_node: Link | None = None
    torus: Torus | None = None
    tiers: tuple[Tier, ...] = ()
    rails: Link | None = None
    pairs: PairSpeeds | None = None
    host: Host | None = None

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
        object.__setattr__(self, "tiers", tuple(self.tiers))
        self._check_interconnect(owner)

    def _check_interconnect(self, owner: str) -> None:
        if self.torus is not None and math.prod(self.torus.shape) != self.devices_per_node:
            raise ClusterError(
                f"{owner}: a torus must hold the devices of a node; received {self.torus.shape} for "
                f"{self.devices_per_node}."
            )
        check_tiers(owner, self.tiers, self.num_nodes, self.inter_node)
        if self.pairs is None:
            return
        if self.pairs.num_units not in (self.num_nodes, self.num_devices):
            raise ClusterError(
                f"{owner}: pairs must be those of its {self.num_nodes} nodes or {self.num_devices} devices; received "
                f"{self.pairs.num_units} rows."
            )
        if self.tiers or self.rails or self.torus:
            raise ClusterError(
                f"{owner}: pairs tell what tiers, rails and torus would; give pairs alone, or leave them out."
            )

    @property
    def num_devices(self) -> int:
        """Number of devices in all nodes."""
        return self.num_nodes * self.devices_per_node

    @property
    def levels(self) -> tuple[AxisLevel, ...]:
        """Hardware levels, innermost first, without levels of size 1."""
        if self.torus is not None:
            inside = self.torus.levels(self.intra_node)
        else:
            inside = _levels([(self.devices_per_node, self.intra_node)])
        if self.pairs is not None:
            return self._levels_of_pairs(self.pairs)
        sizes = even_sizes(self.tiers, self.num_nodes)
        links = [self.inter_node, *(tier.link for tier in self.tiers)]
        if sizes is None:  # the outermost link holds wherever a mesh is laid
            sizes, links = [self.num_nodes], links[-1:]
        return (*inside, *_levels(list(zip(sizes, links, strict=True))))

    @property
    def order(self) -> tuple[int, ...]:
        """The device at each place of the levels, near ones side by side; empty if they are in turn."""
        uneven = self.uneven
        if uneven is not None:
            units = uneven.sorted_units()
        elif self.tiers:
            units = sorted_nodes(self.tiers, self.num_nodes)
        else:
            return ()
        size = self.num_devices // len(units)
        in_turn = units == tuple(range(len(units)))
        return () if in_turn else tuple(unit * size + k for unit in units for k in range(size))

    @property
    def uneven(self) -> Uneven | None:
        """What levels do not tell of how the devices are joined; None where they tell all."""
        if self.pairs is not None:
            levels = self.levels
            inside = levels[:1] if self.pairs.num_units == self.num_nodes < self.num_devices else ()
            first = levels[len(inside)].link.level if len(levels) > len(inside) else 0
            return Uneven.of_pairs(inside, self.pairs, first) if self.pairs.num_units > 1 else None
        if self.inter_node is None or even_sizes(self.tiers, self.num_nodes) is not None:
            return None
        return Uneven.of_tiers(self.levels[:-1], self.tiers, self.inter_node, self.num_nodes)

    def _levels_of_pairs(self, pairs: PairSpeeds) -> tuple[AxisLevel, ...]:
        """Levels at the worst speed of any pair."""
        latency_s, bandwidth = pairs.slowest
        if pairs.num_units == self.num_nodes > 1:
            level = self.intra_node.level + 1 if self.inter_node is None else self.inter_node.level
            between = Link(latency_s, bandwidth, level, pairs.source)
            return _levels([(self.devices_per_node, self.intra_node), (self.num_nodes, between)])
        everywhere = Link(latency_s, bandwidth, self.intra_node.level, pairs.source)
        return _levels([(self.num_devices, everywhere)] if self.num_nodes == 1 else [
            (self.devices_per_node, everywhere),
            (self.num_nodes, dataclasses.replace(everywhere, level=everywhere.level + 1)),
        ])  # fmt: skip

    def __str__(self) -> str:
        host = f", each with {self.host}" if self.host else ""
        return f"{self.name}: {self.num_nodes} nodes of {self.devices_per_node} x {self.device_type.name}{host}"


def _levels(sizes: Sequence[tuple[int, Link | None]]) -> tuple[AxisLevel, ...]:
    return tuple(AxisLevel(size, link) for size, link in sizes if size > 1 and link is not None)


class ClusterDescription(NamedTuple):
    """The fields of a `Cluster`, not yet checked against each other."""

    name: str
    groups: tuple[NodeGroup, ...]
    between_groups: Link | None = None

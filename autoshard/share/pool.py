"""Nodes, and who is on them."""

import dataclasses
from collections.abc import Iterable

from autoshard.cluster import Cluster
from autoshard.share.footprint import Footprint


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A node that is there.

    Attributes:
        number: among all nodes of the cluster, in the order of its groups.
        group: name of its group.
        num_devices: devices that work.
    """

    number: int
    group: str
    num_devices: int


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """Devices of one node."""

    node: int
    num_devices: int


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """A footprint on nodes of its own."""

    footprint: Footprint
    taken: tuple[Taken, ...]

    @property
    def nodes(self) -> frozenset[int]:
        """The numbers of its nodes."""
        return frozenset(one.node for one in self.taken)


def nodes_of(cluster: Cluster) -> tuple[Node, ...]:
    """All nodes of a cluster, numbered in the order of its groups."""
    groups = [(g.name, g.devices_per_node) for g in cluster.groups for _ in range(g.num_nodes)]
    return tuple(Node(number, name, size) for number, (name, size) in enumerate(groups))


class FreeDevices:
    """How many devices of each node nobody has, as placements come and go."""

    def __init__(self, nodes: Iterable[Node], placements: Iterable[Placement] = ()):
        self._nodes = {node.number: node for node in nodes}
        self._free = {node.number: node.num_devices for node in self._nodes.values()}
        for placement in placements:
            self.take(placement)

    def copy(self) -> "FreeDevices":
        """Another with the same devices free."""
        other = FreeDevices(self._nodes.values())
        other._free = dict(self._free)
        return other

    def take(self, placement: Placement) -> None:
        """Devices are taken."""
        for one in placement.taken:
            self._free[one.node] -= one.num_devices

    def give(self, placement: Placement) -> None:
        """Devices are free again; those of nodes that are gone are not."""
        for one in placement.taken:
            if one.node in self._free:
                self._free[one.node] += one.num_devices

    def place(self, footprint: Footprint) -> Placement | None:
        """A footprint on free devices, on the nodes that it fills best; None if it does not fit."""
        taken: list[Taken] = []
        for part in footprint.parts:
            fits = [
                (free, number)
                for number, free in self._free.items()
                if free >= part.devices_per_node and self._nodes[number].group == part.group
            ]
            if len(fits) < part.num_nodes:
                return None
            taken += [Taken(number, part.devices_per_node) for _, number in sorted(fits)[: part.num_nodes]]
        return Placement(footprint, tuple(taken))

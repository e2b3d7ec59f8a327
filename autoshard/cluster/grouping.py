"""From single devices and the speeds of pairs of them to node groups and links.

A place (inside the nodes of a group, between its nodes, between groups) gets the worst speed of its pairs, since the
slowest pair rules a collective. The work runs over the pairs that are described and counts them, rather than over all
pairs: a place with fewer described pairs than pairs has one at the default speed.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from autoshard.cluster.device import DeviceType, Link
from autoshard.cluster.node_group import ClusterDescription, NodeGroup


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedDevice:
    """One device.

    Attributes:
      identity: What distinguishes it from all others.
      machine: The machine that it is in.
      device_type: What it is.
    """

    identity: int
    machine: int
    device_type: DeviceType


@dataclasses.dataclass(frozen=True, slots=True)
class PairSpeed:
    """How fast one device reaches another, or several others at worst.

    Attributes:
      latency_s: Time of a message of no bytes.
      bandwidth_bytes_per_s: One-way bandwidth.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def worst(self, other: "PairSpeed") -> "PairSpeed":
        """The greater latency and the lesser bandwidth of the two."""
        return PairSpeed(
            max(self.latency_s, other.latency_s), min(self.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """The devices of one type in one machine."""

    machine: int
    device_type: DeviceType


@dataclasses.dataclass(frozen=True, slots=True)
class _NodeKind:
    """What the nodes of one group share."""

    device_type: DeviceType
    num_devices: int
    inside: PairSpeed


def grouped_cluster(
    name: str,
    devices: Sequence[PlacedDevice],
    pairs: Mapping[tuple[int, int], PairSpeed],
    *,
    default_inside: PairSpeed,
    default_across: PairSpeed,
    source: str,
) -> ClusterDescription:
    """Groups devices into nodes and equal nodes into groups, in order of first appearance.

    Args:
      name: Name of the cluster.
      devices: The devices; those of one type in one machine form a node.
      pairs: Speeds of pairs of identities, the lesser identity first; pairs with other devices are skipped.
      default_inside: Speed of a pair that is not described, within a machine.
      default_across: The same between machines.
      source: Where the speeds come from.

    Raises:
      ClusterError: If a value is out of range.
    """
    node_of = {device.identity: _Node(device.machine, device.device_type) for device in devices}
    sizes = collections.Counter(node_of.values())
    described = [
        (node_of[first], node_of[second], speed)
        for (first, second), speed in pairs.items()
        if first != second and first in node_of and second in node_of
    ]
    members = _members(sizes, described, default_inside)
    kind_of = {node: kind for kind, nodes in members.items() for node in nodes}
    groups = []
    for index, (kind, nodes) in enumerate(members.items()):
        across = [speed for one, other, speed in described if one != other and kind_of[one] == kind_of[other] == kind]
        num_pairs = math.comb(len(nodes), 2) * kind.num_devices**2
        inter_node = _link(_worst(across, num_pairs, default_across), 1, source) if num_pairs else None
        groups.append(
            NodeGroup(
                name=f"group{index}",
                device_type=kind.device_type,
                num_nodes=len(nodes),
                devices_per_node=kind.num_devices,
                intra_node=_link(kind.inside, 0, source),
                inter_node=inter_node,
            )
        )
    between = None
    if len(groups) > 1:
        foreign = [(one, other, speed) for one, other, speed in described if kind_of[one] != kind_of[other]]
        between = _link(_between(foreign, sizes, groups, default_inside, default_across), 2, source)
    return ClusterDescription(name, tuple(groups), between)


def _members(
    sizes: Mapping[_Node, int], described: Iterable[tuple[_Node, _Node, PairSpeed]], default_inside: PairSpeed
) -> dict[_NodeKind, list[_Node]]:
    """The nodes of each group."""
    inside = collections.defaultdict(list)
    for one, other, speed in described:
        if one == other:
            inside[one].append(speed)
    members: dict[_NodeKind, list[_Node]] = {}
    for node, size in sizes.items():
        speed = _worst(inside[node], math.comb(size, 2), default_inside)
        members.setdefault(_NodeKind(node.device_type, size, speed), []).append(node)
    return members


def _between(
    foreign: Sequence[tuple[_Node, _Node, PairSpeed]],
    sizes: Mapping[_Node, int],
    groups: Sequence[NodeGroup],
    default_inside: PairSpeed,
    default_across: PairSpeed,
) -> PairSpeed:
    """The worst speed of pairs in different groups, some of which may share a machine."""
    of_machine = collections.defaultdict(list)
    for node, size in sizes.items():
        of_machine[node.machine].append(size)
    num_near = sum(_num_pairs_of_different(counts) for counts in of_machine.values())
    num_far = _num_pairs_of_different([group.num_devices for group in groups]) - num_near
    near = [speed for one, other, speed in foreign if one.machine == other.machine]
    far = [speed for one, other, speed in foreign if one.machine != other.machine]
    if not num_far:
        return _worst(near, num_near, default_inside)
    worst_far = _worst(far, num_far, default_across)
    return worst_far.worst(_worst(near, num_near, default_inside)) if num_near else worst_far


def _num_pairs_of_different(counts: Sequence[int]) -> int:
    """Number of pairs whose members belong to different parts of the given sizes."""
    return (sum(counts) ** 2 - sum(count**2 for count in counts)) // 2


def _worst(speeds: Sequence[PairSpeed], num_pairs: int, default: PairSpeed) -> PairSpeed:
    """The worst of the described speeds, and of the default where some of the `num_pairs` pairs have none."""
    result = default if len(speeds) < num_pairs or not speeds else speeds[0]
    for speed in speeds:
        result = result.worst(speed)
    return result


def _link(speed: PairSpeed, level: int, source: str) -> Link:
    return Link(speed.latency_s, speed.bandwidth_bytes_per_s, level, source)

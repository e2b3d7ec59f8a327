"""What a job can run on: so many devices on so many nodes of a group, or of several groups."""

import dataclasses
import re
from collections.abc import Sequence

from autoshard.cluster import Cluster
from autoshard.errors import ShareError

_PART = re.compile(r"(?P<group>[^:+\s]+):(?:(?P<nodes>[1-9]\d*)x)?(?P<devices>[1-9]\d*)")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Part:
    """Equal parts of nodes of one group.

    Attributes:
        group: name of the node group.
        num_nodes: nodes that the job is on.
        devices_per_node: devices that it has on each of them.
    """

    group: str
    num_nodes: int
    devices_per_node: int

    @property
    def num_devices(self) -> int:
        """Devices on all nodes."""
        return self.num_nodes * self.devices_per_node

    def __str__(self) -> str:
        nodes = "" if self.num_nodes == 1 else f"{self.num_nodes}x"
        return f"{self.group}:{nodes}{self.devices_per_node}"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Footprint:
    """Devices by kind and node, without saying which nodes: `v100:4`, `v100:2x8`, or `v100:8+p100:8`."""

    parts: tuple[Part, ...]

    @property
    def num_devices(self) -> int:
        """Devices of all kinds."""
        return sum(part.num_devices for part in self.parts)

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups that it takes devices of."""
        return tuple(part.group for part in self.parts)

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))


def read_footprint(text: str) -> Footprint:
    """A footprint from its text: `GROUP:DEVICES` within one node, `GROUP:NODESxDEVICES` over nodes, joined by `+`.

    Raises:
        ShareError: the text is none.
    """
    parts = []
    for item in text.split("+"):
        match = _PART.fullmatch(item.strip())
        if match is None:
            raise ShareError(
                f"A footprint is written GROUP:DEVICES or GROUP:NODESxDEVICES, joined by +; received {text!r:.80}. "
                "Try: v100:4, v100:2x8, or v100:8+p100:8."
            )
        parts.append(Part(match["group"], int(match["nodes"] or 1), int(match["devices"])))
    if len({part.group for part in parts}) < len(parts):
        raise ShareError(f"A footprint names each group once; received {text!r:.80}. Write its nodes as one part.")
    return Footprint(tuple(parts))


def cluster_of(footprint: Footprint, cluster: Cluster) -> Cluster:
    """The part of a cluster that a footprint stands for, as a cluster of its own, to plan for."""
    groups = []
    for part in footprint.parts:
        group = next((g for g in cluster.groups if g.name == part.group), None)
        if group is None:
            known = ", ".join(g.name for g in cluster.groups)
            raise ShareError(
                f"{footprint}: the cluster {cluster.name!r} has no group {part.group!r}, but {known}. Name one of them "
                "in the jobs file, or take another cluster."
            )
        if part.num_nodes > group.num_nodes or part.devices_per_node > group.devices_per_node:
            raise ShareError(
                f"{footprint}: the group {group.name!r} has {group.num_nodes} nodes of {group.devices_per_node} "
                "devices. Name a footprint that fits."
            )
        groups.append(
            dataclasses.replace(
                group,
                num_nodes=part.num_nodes,
                devices_per_node=part.devices_per_node,
                inter_node=group.inter_node if part.num_nodes > 1 else None,
            )
        )
    between = cluster.between_groups if len(groups) > 1 else None
    return Cluster(str(footprint).replace(":", "-").replace("+", "_"), tuple(groups), between)


def usual_footprints(
    cluster: Cluster,
    least_devices: int,
    most_devices: int,
    groups: Sequence[str] | None = None,
    cuts_nodes: bool = False,
    is_mixed: bool = False,
) -> tuple[Footprint, ...]:
    """The sizes at which a job is tried: powers of two within a node, then powers of two of whole nodes.

    Args:
        cluster: the devices.
        least_devices, most_devices: the job's limits.
        groups: names of the groups that it may use; None for all.
        cuts_nodes: also equal parts of several nodes.
        is_mixed: also whole groups together, which are planned in stages.
    """
    own = [g for g in cluster.groups if groups is None or g.name in groups]
    found: dict[Footprint, None] = {}
    for group in own:
        inside = _powers(group.devices_per_node)
        for size in inside:
            found[Footprint((Part(group.name, 1, size),))] = None
        for nodes in _powers(group.num_nodes)[1:]:
            for size in inside if cuts_nodes else (group.devices_per_node,):
                found[Footprint((Part(group.name, nodes, size),))] = None
    if is_mixed:
        for stop in range(2, len(own) + 1):
            for start in range(len(own) - stop + 1):
                run = own[start : start + stop]
                found[Footprint(tuple(Part(g.name, g.num_nodes, g.devices_per_node) for g in run))] = None
                found[Footprint(tuple(Part(g.name, 1, g.devices_per_node) for g in run))] = None
    return tuple(f for f in found if least_devices <= f.num_devices <= most_devices)


def _powers(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `most`, and `most` itself."""
    return tuple(sorted({*(1 << n for n in range(most.bit_length())), most}))

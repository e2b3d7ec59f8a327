"""Describing the devices that JAX sees now, with the catalogue's figures.

The only file of this room that touches JAX, and only when `detect_cluster` is called. Nothing is measured: figures
are the catalogue's, and links are those usual for the device type (for TPUs, the slower one, since whether the axes
of the torus close is not asked). The host is described where all devices are this process's: its CPUs and its memory
are what the system tells, the link to a GPU is the catalogue's, and rates are not known.
"""

import dataclasses
import math
from collections.abc import Sequence

import psutil

from autoshard.cluster.catalogue import KnownDevice, catalogue
from autoshard.cluster.device import Link
from autoshard.cluster.host import Host
from autoshard.cluster.node_group import ClusterDescription, NodeGroup
from autoshard.cluster.wiring import Torus
from autoshard.errors import ClusterError


@dataclasses.dataclass(frozen=True, slots=True)
class SeenDevice:
    """What tells one live device's place and kind.

    Attributes:
      device_kind: The name that the device gives itself.
      node: Devices with the same number are in the same node (for TPUs: in the same slice).
      coords: Where the chip is in its slice; empty where it does not tell.
    """

    device_kind: str
    node: int
    coords: tuple[int, ...] = ()


def detect_cluster() -> ClusterDescription:
    """Describes all devices of the default backend, in the order of `jax.devices()`.

    Devices with the same `slice_index` (hosts of GPUs, slices of TPUs) form a node; where a backend does not tell
    it, devices of the same process do.

    Raises:
      ClusterError: If a device is of a kind that the catalogue does not know.
    """
    import jax

    seen = []
    for device in jax.devices():
        slice_index = getattr(device, "slice_index", None)
        node = device.process_index if slice_index is None else slice_index
        kind = "cpu" if device.platform == "cpu" else device.device_kind
        seen.append(SeenDevice(kind, node, tuple(getattr(device, "coords", None) or ())))
    return cluster_from_seen(seen, detect_host() if jax.process_count() == 1 else None)


def detect_host() -> Host:
    """This machine, as its system tells it."""
    num_cpus = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    return Host(num_cpus, psutil.virtual_memory().total, "as the operating system tells (psutil)")


def cluster_from_seen(seen: Sequence[SeenDevice], host: Host | None = None) -> ClusterDescription:
    """Builds a cluster from live devices.

    Adjacent nodes with equally many devices of one kind form a group.

    Args:
      seen: The devices, in order.
      host: Of each node; None if it is not known.

    Raises:
      ClusterError: If a device is of a kind that the catalogue does not know.
    """
    nodes: list[list[SeenDevice]] = []
    for device in seen:
        if nodes and (nodes[-1][0].device_kind, nodes[-1][0].node) == (device.device_kind, device.node):
            nodes[-1].append(device)
        else:
            nodes.append([device])
    merged: list[tuple[KnownDevice, int, tuple[int, ...], int]] = []
    for node in nodes:
        known = _known(node[0].device_kind)
        kind = known, len(node), _grid(node)
        if merged and merged[-1][:3] == kind:
            merged[-1] = (*kind, merged[-1][3] + 1)
        else:
            merged.append((*kind, 1))
    groups = tuple(
        NodeGroup(
            name=f"group{index}",
            device_type=known.device_type,
            num_nodes=num_nodes,
            devices_per_node=per_node,
            intra_node=catalogue().link(_inside(known, grid), level=0),
            inter_node=catalogue().link(known.inter_node, level=1) if num_nodes > 1 else None,
            host=_host_of(known, host),
            torus=Torus(grid, known.torus.wraps(grid)) if known.torus and grid else None,
        )
        for index, (known, per_node, grid, num_nodes) in enumerate(merged)
    )
    between = None
    if len(groups) > 1:
        one_node = len({device.node for device in seen}) == 1
        names = [_inside(known, grid) if one_node else known.inter_node for known, _, grid, _ in merged]
        between = _slowest([catalogue().link(name, level=2) for name in names])
    return ClusterDescription("detected", groups, between)


def _host_of(known: KnownDevice, host: Host | None) -> Host | None:
    """The host of devices of a kind, with the link that usually joins them to its memory."""
    if host is None or known.to_host is None:
        return host
    return dataclasses.replace(host, to_device=catalogue().link(known.to_host, level=0))


def _grid(node: Sequence[SeenDevice]) -> tuple[int, ...]:
    """The shape of the grid that the chips of a node fill, one chip at each place; empty where they do not."""
    places = {device.coords for device in node}
    if len(places) < len(node) or len({len(place) for place in places}) > 1:
        return ()
    spans = [max(along) - min(along) + 1 for along in zip(*places, strict=True)]
    shape = tuple(span for span in spans if span > 1)
    return shape if shape and math.prod(spans) == len(node) else ()


def _inside(known: KnownDevice, grid: tuple[int, ...]) -> str:
    """The name of the link that joins the devices of a node."""
    return known.torus.link if known.torus and grid else known.intra_node


def _known(device_kind: str) -> KnownDevice:
    known = catalogue().known_device(device_kind)
    if known is None:
        kinds = ", ".join(kind for device in catalogue().devices for kind in device.device_kinds)
        raise ClusterError(
            f"the catalogue must know a device to describe it; it does not know {device_kind!r:.80}. It knows {kinds}. "
            "Write a cluster file for this device (autoshard/cluster/load.py tells how) and pass that instead."
        )
    return known


def _slowest(links: Sequence[Link]) -> Link:
    return min(links, key=lambda link: (link.bandwidth_bytes_per_s, -link.latency_s))

"""Describing the devices that JAX sees now, with the catalogue's figures.

The only file of this room that touches JAX, and only when `detect_cluster` is called. Nothing is measured: figures
are the catalogue's, and links are those usual for the device type (for TPUs, the slower one, since whether the axes
of the torus close is not asked).
"""

import dataclasses
from collections.abc import Sequence

from autoshard.cluster.catalogue import KnownDevice, catalogue
from autoshard.cluster.device import Link
from autoshard.cluster.node_group import ClusterDescription, NodeGroup
from autoshard.errors import ClusterError


@dataclasses.dataclass(frozen=True, slots=True)
class SeenDevice:
    """What tells one live device's place and kind.

    Attributes:
      device_kind: The name that the device gives itself.
      node: Devices with the same number are in the same node (for TPUs: in the same slice).
    """

    device_kind: str
    node: int


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
        seen.append(SeenDevice(kind, node))
    return cluster_from_seen(seen)


def cluster_from_seen(seen: Sequence[SeenDevice]) -> ClusterDescription:
    """Builds a cluster from live devices.

    Adjacent nodes with equally many devices of one kind form a group.

    Args:
      seen: The devices, in order.

    Raises:
      ClusterError: If a device is of a kind that the catalogue does not know.
    """
    runs: list[tuple[SeenDevice, int]] = []
    for device in seen:
        if runs and runs[-1][0] == device:
            runs[-1] = (device, runs[-1][1] + 1)
        else:
            runs.append((device, 1))
    merged: list[tuple[KnownDevice, int, int]] = []
    for device, count in runs:
        known = _known(device.device_kind)
        if merged and merged[-1][:2] == (known, count):
            merged[-1] = (known, count, merged[-1][2] + 1)
        else:
            merged.append((known, count, 1))
    groups = tuple(
        NodeGroup(
            name=f"group{index}",
            device_type=known.device_type,
            num_nodes=num_nodes,
            devices_per_node=per_node,
            intra_node=catalogue().link(known.intra_node, level=0),
            inter_node=catalogue().link(known.inter_node, level=1) if num_nodes > 1 else None,
        )
        for index, (known, per_node, num_nodes) in enumerate(merged)
    )
    between = None
    if len(groups) > 1:
        one_node = len({device.node for device in seen}) == 1
        names = [known.intra_node if one_node else known.inter_node for known, _, _ in merged]
        between = _slowest([catalogue().link(name, level=2) for name in names])
    return ClusterDescription("detected", groups, between)


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

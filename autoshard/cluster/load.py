"""Cluster files: YAML, versions 1 and 2. Version 2 may also have measured figures, and is else the same.

    format: autoshard-cluster
    version: 1
    name: h100x16
    groups:                        # one entry for each run of identical nodes, in device order
      - name: h100
        device_type: H100-SXM      # a name from `device_types` below or from the catalogue
        num_nodes: 2
        devices_per_node: 8
        intra_node: NVLink4        # a name from `links` below or from the catalogue, or a mapping
        inter_node: InfiniBand-NDR # may be left out if there is one node
    between_groups: ...            # a link; may be left out if there is one group
    device_types:                  # optional: your own, by name; they come before the catalogue's
      My-Chip:
        peak_flops_per_s: {float32: 1e13, bfloat16: 1e14}
        memory_bytes: 32e9
        memory_bandwidth_bytes_per_s: 1e12
        launch_overhead_s: 4e-6
        matmul_efficiency: 0.8     # optional, 1 by default
        source: where the figures come from
    links:                         # optional: your own, by name
      My-Link:
        latency_s: 3e-6
        bandwidth_bytes_per_s: 50e9
        source: where the figures come from

Version 2, as `autoshard calibrate` writes it. A device type may also have:

    measured:                      # rates of one device while all others are as busy
      calibrated: {date: 2026-01-31, jax: 0.10.2, device_kind: cpu, spread: 0.05}   # spread: of repeated timings
      product_flops_per_s:         # matrix products: [flops of one product, rate] with rising flops, for each dtype
        float32: [[1e4, 1e9], [1e8, 5e10]]
      narrow_share: [[8, 0.5], [128, 1.0]]          # [least dimension of a product, share of that rate]
      memory_bytes_per_s: [[1e4, 2e10], [1e7, 5e9]] # [bytes that a kernel moves, rate]
      elementwise_per_s: 1e10      # additions and the like, where memory does not bind
      function_per_s: 2e8          # exponentials and the like
      hidden_share: 0.8            # of the lesser of arithmetic and memory time, what hides behind the greater (or 1)
      transposed_bytes_per_s: [[1e5, 2e9], [4e6, 2e8]]  # [bytes of an array, rate of putting its dimensions into
                                   # another order] (or that takes no time)

and a link:

    collectives:                   # by kind and number of devices: hop and bandwidth of the ring that takes as long,
                                   # and the share of hops that is paid even where many could be joined (0 by default)
      - {kind: all-gather, size: 8, latency_s: 2e-5, bandwidth_bytes_per_s: 1e9, separate_share: 0.5,
         inner_bytes_per_s: 2e9}   # how fast pieces along inner dimensions are put in order (or takes no time)

What is not measured is left out, and the other figures of the device type or link serve.

A link written in place is the same mapping with an optional `level`, by default 0 for `intra_node`, 1 for
`inter_node` and 2 for `between_groups`. A named link takes that default. The catalogue is
`autoshard/cluster/catalogue.yaml`. Unknown keys are refused.
"""

import dataclasses
import os
from collections.abc import Sequence

from autoshard.cluster.catalogue import catalogue
from autoshard.cluster.describe import (
    DEVICE_TYPE_KEYS,
    LINK_KEYS,
    device_type_from_fields,
    device_type_to_dict,
    link_from_fields,
    link_to_dict,
)
from autoshard.cluster.device import DeviceType, Link
from autoshard.cluster.fields import Fields
from autoshard.cluster.node_group import Made, Make, NodeGroup
from autoshard.errors import ClusterError, FileFormatError
from autoshard.files import read_yaml

FORMAT = "autoshard-cluster"
VERSIONS = (1, 2)
"""Read. Written is the lesser one that can hold the cluster."""

_ROOT_KEYS = ("format", "version", "name", "groups", "between_groups", "device_types", "links")
_GROUP_KEYS = ("name", "device_type", "num_nodes", "devices_per_node", "intra_node", "inter_node")
_INTRA_NODE, _INTER_NODE, _BETWEEN_GROUPS = 0, 1, 2


def read_cluster(path: str | os.PathLike[str], make: Make[Made]) -> Made:
    """Reads a cluster file, and makes of it what `make` makes.

    Raises:
      FileFormatError: If the file cannot be read, is of another format or version, has unknown or missing keys,
        or has a value of the wrong type.
      ClusterError: If its values are out of range or contradict each other.
    """
    data = read_yaml(path)
    try:
        return cluster_from_dict(data, os.fsdecode(path), make)
    except ClusterError as error:
        raise ClusterError(f"{os.fsdecode(path)}: {error}") from error


def cluster_from_dict(data: object, place: str, make: Make[Made]) -> Made:
    """Builds a cluster from the content of a cluster file.

    Args:
      data: The content.
      place: What to call it in messages.
      make: What to make of name, groups and the link between them.

    Raises:
      FileFormatError: If it does not follow the schema.
      ClusterError: If its values are out of range or contradict each other.
    """
    root = Fields.of(place, data)
    if root.values.get("format") != FORMAT:
        raise FileFormatError(
            f"{place} must have `format: {FORMAT}`; received {root.values.get('format')!r:.60}. "
            "A PaddlePaddle cluster JSON is read by Cluster.from_paddle_json."
        )
    version = root.required("version")
    if isinstance(version, bool) or version not in VERSIONS:
        raise FileFormatError(
            f"{place} must have `version: {VERSIONS[0]}` or `{VERSIONS[-1]}`; received {version!r:.60}. "
            "Rewrite the file."
        )
    root.refuse_unknown(_ROOT_KEYS)
    own = _own_parts(root)
    groups = []
    for index, item in enumerate(root.items("groups")):
        fields = Fields.of(f"{place}: groups[{index}]", item)
        fields.refuse_unknown(_GROUP_KEYS)
        groups.append(
            NodeGroup(
                name=fields.text("name"),
                device_type=own.device_type(fields.text("device_type")),
                num_nodes=fields.whole("num_nodes"),
                devices_per_node=fields.whole("devices_per_node"),
                intra_node=own.link(fields, "intra_node", _INTRA_NODE),
                inter_node=own.link(fields, "inter_node", _INTER_NODE) if "inter_node" in fields.values else None,
            )
        )
    between = own.link(root, "between_groups", _BETWEEN_GROUPS) if "between_groups" in root.values else None
    return make(root.text("name"), tuple(groups), between)


def cluster_document(name: str, groups: Sequence[NodeGroup], between_groups: Link | None) -> dict[str, object]:
    """The content of a cluster file that describes a cluster without the catalogue."""
    entries = []
    for group in groups:
        entry = {
            "name": group.name,
            "device_type": group.device_type.name,
            "num_nodes": group.num_nodes,
            "devices_per_node": group.devices_per_node,
            "intra_node": link_to_dict(group.intra_node),
        }
        if group.inter_node is not None:
            entry["inter_node"] = link_to_dict(group.inter_node)
        entries.append(entry)
    version = VERSIONS[-1] if _is_measured(groups, between_groups) else VERSIONS[0]
    result: dict[str, object] = {"format": FORMAT, "version": version, "name": name, "groups": entries}
    if between_groups is not None:
        result["between_groups"] = link_to_dict(between_groups)
    result["device_types"] = {group.device_type.name: device_type_to_dict(group.device_type) for group in groups}
    return result


def _is_measured(groups: Sequence[NodeGroup], between_groups: Link | None) -> bool:
    links = [between_groups, *(link for g in groups for link in (g.intra_node, g.inter_node))]
    return any(g.device_type.measured for g in groups) or any(link and link.collectives for link in links)


@dataclasses.dataclass(frozen=True, slots=True)
class _OwnParts:
    """The device types and links that a file describes itself; they come before the catalogue's."""

    device_types: tuple[DeviceType, ...]
    links: tuple[tuple[str, Fields], ...]

    def device_type(self, name: str) -> DeviceType:
        own = [device_type for device_type in self.device_types if device_type.name == name]
        return own[0] if own else catalogue().device_type(name)

    def link(self, holder: Fields, key: str, level: int) -> Link:
        value = holder.required(key)
        if not isinstance(value, str):
            fields = Fields.of(f"{holder.place}.{key}", value)
            fields.refuse_unknown((*LINK_KEYS, "level"))
            return link_from_fields(fields, fields.whole("level") if "level" in fields.values else level)
        own = [fields for name, fields in self.links if name == value]
        return link_from_fields(own[0], level) if own else catalogue().link(value, level)


def _own_parts(root: Fields) -> _OwnParts:
    types, links = root.fields("device_types"), root.fields("links")
    device_types = []
    for name in types.values:
        fields = types.fields(name)
        fields.refuse_unknown(DEVICE_TYPE_KEYS)
        device_types.append(device_type_from_fields(name, fields))
    for name in links.values:
        fields = links.fields(name)
        fields.refuse_unknown(LINK_KEYS)
        link_from_fields(fields, level=_INTRA_NODE)
    return _OwnParts(tuple(device_types), tuple((name, links.fields(name)) for name in links.values))

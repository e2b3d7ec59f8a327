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

`device_schema.py` describes every key of device types and links, also those of version 2, which `autoshard calibrate`
writes. A link written in place is the same mapping with an optional `level`, by default 0 for `intra_node`, 1 for
`inter_node` and 2 for `between_groups`. A named link takes that default. The catalogue is
`autoshard/cluster/catalogue.yaml`. Unknown keys are refused.
"""

import os
from typing import Any

from autoshard.cluster.catalogue import catalogue
from autoshard.cluster.device import Link
from autoshard.cluster.device_schema import DeviceTypeSchema, LinkSchema
from autoshard.cluster.node_group import ClusterDescription, NodeGroup
from autoshard.cluster.schema import Schema, Text, Whole
from autoshard.errors import FileFormatError
from autoshard.files import read_yaml

FORMAT = "autoshard-cluster"
VERSIONS = (1, 2)
"""Read. Written is the lesser one that can hold the cluster."""
_INTRA_NODE, _INTER_NODE, _BETWEEN_GROUPS = 0, 1, 2


class LinkInPlace(LinkSchema):
    """A link that has no name, with its level."""

    level: Whole | None = None


LinkOrName = LinkInPlace | Text


class GroupSchema(Schema):
    """A run of identical nodes."""

    name: Text
    device_type: Text
    num_nodes: Whole
    devices_per_node: Whole
    intra_node: LinkOrName
    inter_node: LinkOrName | None = None


class ClusterSchema(Schema):
    """A cluster file."""

    format: Text
    version: Whole
    name: Text
    groups: list[GroupSchema] = []
    between_groups: LinkOrName | None = None
    device_types: dict[str, DeviceTypeSchema] = {}
    links: dict[str, LinkSchema] = {}

    def description(self) -> ClusterDescription:
        """What the file describes, with the catalogue's figures for the names that are not its own."""
        own = {name: schema.device_type(name) for name, schema in self.device_types.items()}
        groups = tuple(
            NodeGroup(
                group.name,
                own.get(group.device_type) or catalogue().device_type(group.device_type),
                group.num_nodes,
                group.devices_per_node,
                self._link(group.intra_node, _INTRA_NODE),
                None if group.inter_node is None else self._link(group.inter_node, _INTER_NODE),
            )
            for group in self.groups
        )
        for link in self.links.values():
            link.link(_INTRA_NODE)  # one that nothing refers to has to be right, too
        between = None if self.between_groups is None else self._link(self.between_groups, _BETWEEN_GROUPS)
        return ClusterDescription(self.name, groups, between)

    def _link(self, value: LinkOrName, level: int) -> Link:
        if isinstance(value, LinkInPlace):
            return value.link(level if value.level is None else value.level)
        return self.links[value].link(level) if value in self.links else catalogue().link(value, level)


def read_cluster(path: str | os.PathLike[str]) -> ClusterDescription:
    """Reads a cluster file.

    Raises:
      FileFormatError: If the file cannot be read, is of another format or version, has unknown or missing keys,
        or has a value of the wrong type.
      ClusterError: If its values are out of range.
    """
    data, place = read_yaml(path), os.fsdecode(path)
    if isinstance(data, dict) and data.get("format") != FORMAT:
        raise FileFormatError(
            f"{place} must have `format: {FORMAT}`; received {data.get('format')!r:.60}. "
            "A PaddlePaddle cluster JSON is read by Cluster.from_paddle_json."
        )
    if isinstance(data, dict) and (isinstance(data.get("version"), bool) or data.get("version") not in VERSIONS):
        raise FileFormatError(
            f"{place} must have `version: {VERSIONS[0]}` or `{VERSIONS[-1]}`; received {data.get('version')!r:.60}. "
            "Rewrite the file."
        )
    return ClusterSchema.read(data, place).description()


def cluster_to_dict(cluster: ClusterDescription) -> dict[str, Any]:
    """The content of a cluster file that describes `cluster` without the catalogue."""
    groups = [
        GroupSchema(
            name=group.name,
            device_type=group.device_type.name,
            num_nodes=group.num_nodes,
            devices_per_node=group.devices_per_node,
            intra_node=LinkInPlace.model_validate(group.intra_node),
            inter_node=group.inter_node and LinkInPlace.model_validate(group.inter_node),
        )
        for group in cluster.groups
    ]
    types = {group.device_type.name: DeviceTypeSchema.model_validate(group.device_type) for group in cluster.groups}
    links = [cluster.between_groups, *(link for g in cluster.groups for link in (g.intra_node, g.inter_node))]
    is_measured = any(own.measured for own in types.values()) or any(link and link.collectives for link in links)
    document = ClusterSchema(
        format=FORMAT,
        version=VERSIONS[is_measured],
        name=cluster.name,
        groups=groups,
        between_groups=cluster.between_groups and LinkInPlace.model_validate(cluster.between_groups),
        device_types=types,
    )
    return document.model_dump(mode="json", by_alias=True, exclude_defaults=True)

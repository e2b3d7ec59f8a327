"""Cluster files: YAML, versions 1 to 4. Version 2 may also have measured figures, version 3 also tells how nodes and
devices are joined, and version 4 also what hosts they have; they are else the same.

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
        torus: {shape: [4, 4, 8], wraps: [true, true, false]} # version 3: the devices of a node are wired so
        tiers:                     # version 3: switches above the nodes, innermost first; `inter_node` joins the nodes
          - name: rack             #   within one part of the first
            nodes_each: 4          # or `part_of_node`: the number of each node's rack, in device order
            oversubscription: 4    # or `link`: what joins different racks
        rails: ...                 # version 3: the link between devices with other numbers in other nodes
        pairs:                     # version 3: speeds of pairs of nodes, or of devices, in place of all this
          bandwidth_bytes_per_s: [[0, 50e9], [50e9, 0]]
          latency_s: 10e-6         # optional; one figure, or one a pair
          source: where the figures come from
        host:                      # version 4: CPUs and memory of each node; a name from the catalogue, or a mapping
          num_cpus: 112
          memory_bytes: 2e12
          memory_bandwidth_bytes_per_s: 614e9 # optional, as all that follows
          flops_per_s: 14e12       # of all cores, at float32
          to_device: PCIe5-x16     # between the memory and one device while all others are as busy
          source: where the figures come from
    between_groups: ...            # a link; may be left out if there is one group
    device_types:                  # optional: your own, by name; they come before the catalogue's
      My-Chip:
        peak_flops_per_s: {float32: 1e13, bfloat16: 1e14}
        memory_bytes: 32e9
        memory_bandwidth_bytes_per_s: 1e12
        launch_overhead_s: 4e-6
        matmul_efficiency: 0.8     # optional, 1 by default
        memory_efficiency: 0.9     # optional, 1 by default
        convolution_efficiency: 0.5 # optional, by default that of matrix products
        source: where the figures come from
    links:                         # optional: your own, by name
      My-Link:
        latency_s: 3e-6
        bandwidth_bytes_per_s: 50e9
        source: where the figures come from

`device_schema.py` describes every key of device types and links, also those of version 2, which `autoshard calibrate`
writes, and `interconnect_schema.py` and `host_schema.py` those of versions 3 and 4. A link written in place is the same
mapping with an optional `level`, by default 0 for `intra_node` and `to_device`, 1 for `inter_node`, rising from tier to
tier, and the next, at least 2, for `between_groups`. A named link takes that default. The catalogue is
`autoshard/cluster/catalogue.yaml`. Unknown keys are refused.
"""

import os
from typing import Any

from autoshard.cluster.catalogue import catalogue
from autoshard.cluster.device import DeviceType
from autoshard.cluster.device_schema import DeviceTypeSchema, LinkSchema
from autoshard.cluster.interconnect_schema import (
    HostOrName,
    HostSchema,
    LinkInPlace,
    LinkOrName,
    PairsSchema,
    TierSchema,
    TorusSchema,
    named_host,
    named_link,
)
from autoshard.cluster.node_group import ClusterDescription, NodeGroup
from autoshard.cluster.schema import Schema, Text, Whole
from autoshard.cluster.tiers import Tier
from autoshard.errors import ClusterError, FileFormatError
from autoshard.files import read_yaml

FORMAT = "autoshard-cluster"
VERSIONS = (1, 2, 3, 4)
"""Read. Written is the least one that can hold the cluster."""
_INTRA_NODE, _INTER_NODE, _BETWEEN_GROUPS = 0, 1, 2


class GroupSchema(Schema):
    """A run of identical nodes."""

    name: Text
    device_type: Text
    num_nodes: Whole
    devices_per_node: Whole
    intra_node: LinkOrName
    inter_node: LinkOrName | None = None
    torus: TorusSchema | None = None
    tiers: list[TierSchema] = []
    rails: LinkOrName | None = None
    pairs: PairsSchema | None = None
    host: HostOrName | None = None

    def group(self, device_type: DeviceType, links: dict[str, LinkSchema]) -> NodeGroup:
        """The group; `links`: those that the file names."""
        intra = named_link(self.intra_node, links, _INTRA_NODE)
        inter = None if self.inter_node is None else named_link(self.inter_node, links, _INTER_NODE)
        if self.tiers and inter is None:
            raise ClusterError(f"node group {self.name!r} has tiers and so must have an inter_node link within a part.")
        tiers: list[Tier] = []
        within = intra if inter is None else inter
        for tier in self.tiers:
            tiers.append(tier.tier(self.num_nodes, within, links))
            within = tiers[-1].link
        return NodeGroup(
            self.name,
            device_type,
            self.num_nodes,
            self.devices_per_node,
            intra,
            inter,
            None if self.torus is None else self.torus.torus(),
            tuple(tiers),
            None if self.rails is None else named_link(self.rails, links, _INTER_NODE),
            None if self.pairs is None else self.pairs.pairs((inter or intra).latency_s),
            named_host(self.host, links),
        )


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
            group.group(own.get(group.device_type) or catalogue().device_type(group.device_type), self.links)
            for group in self.groups
        )
        for link in self.links.values():
            link.link(_INTRA_NODE)  # one that nothing refers to has to be right, too
        above = max((level.link.level + 1 for group in groups for level in group.levels), default=0)
        between = self.between_groups
        if between is not None:
            between = named_link(between, self.links, max(_BETWEEN_GROUPS, above))
        return ClusterDescription(self.name, groups, between)


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
            f"{place} must have a `version` of {VERSIONS[0]} to {VERSIONS[-1]}; received {data.get('version')!r:.60}. "
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
            torus=TorusSchema.of(group.torus),
            tiers=[
                TierSchema(
                    name=tier.name, part_of_node=list(tier.part_of_node), link=LinkInPlace.model_validate(tier.link)
                )
                for tier in group.tiers
            ],
            rails=group.rails and LinkInPlace.model_validate(group.rails),
            pairs=PairsSchema.of(group.pairs),
            host=HostSchema.of(group.host),
        )
        for group in cluster.groups
    ]
    types = {group.device_type.name: DeviceTypeSchema.model_validate(group.device_type) for group in cluster.groups}
    links = [cluster.between_groups, *(link for g in cluster.groups for link in (g.intra_node, g.inter_node))]
    is_measured = any(own.measured for own in types.values()) or any(link and link.collectives for link in links)
    is_joined_otherwise = any(g.torus or g.tiers or g.rails or g.pairs for g in cluster.groups)
    has_hosts = any(g.host for g in cluster.groups)
    document = ClusterSchema(
        format=FORMAT,
        version=VERSIONS[3 if has_hosts else 2 if is_joined_otherwise else is_measured],
        name=cluster.name,
        groups=groups,
        between_groups=cluster.between_groups and LinkInPlace.model_validate(cluster.between_groups),
        device_types=types,
    )
    return document.model_dump(mode="json", by_alias=True, exclude_defaults=True)

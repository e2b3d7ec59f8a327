"""How nodes and devices are joined, as it stands in cluster files of version 3: torus, tiers, rails, pairs; and hosts,
as they stand in files of version 4.
"""

import dataclasses

import pydantic

from autoshard.cluster.catalogue import catalogue
from autoshard.cluster.device import Link
from autoshard.cluster.device_schema import LinkSchema
from autoshard.cluster.host import Host
from autoshard.cluster.host_schema import HostFigures
from autoshard.cluster.pair_speeds import PairSpeeds
from autoshard.cluster.schema import Number, Schema, Text, Whole, broken_rule
from autoshard.cluster.tiers import Tier
from autoshard.cluster.wiring import Torus


class LinkInPlace(LinkSchema):
    """A link that has no name, with its level."""

    level: Whole | None = None


LinkOrName = LinkInPlace | Text


def named_link(value: LinkOrName, links: dict[str, LinkSchema], level: int) -> Link:
    """The link that a file means, by name or in place; `level`: where the file does not say."""
    if isinstance(value, LinkInPlace):
        return value.link(level if value.level is None else value.level)
    return links[value].link(level) if value in links else catalogue().link(value, level)


class TorusSchema(Schema):
    """A grid of chips."""

    shape: list[Whole]
    """Chips along each axis, major to minor, in the order of the chips' coordinates."""
    wraps: bool | list[bool] = True
    """Whether the axes close, all alike or each. An axis of two chips has one wire anyway."""

    @classmethod
    def of(cls, torus: Torus | None) -> "TorusSchema | None":
        """As a file has it."""
        return None if torus is None else cls(shape=list(torus.shape), wraps=list(torus.wraps))

    def torus(self) -> Torus:
        """The torus."""
        wraps = [self.wraps] * len(self.shape) if isinstance(self.wraps, bool) else self.wraps
        return Torus(tuple(self.shape), tuple(wraps))


class TierSchema(Schema):
    """Switches above the nodes."""

    name: Text
    nodes_each: Whole | None = None
    """How many nodes, side by side in device order, are in each part; else `part_of_node` tells."""
    part_of_node: list[Whole] | None = None
    """For each node, in device order, the number of the part (rack, pod, spine) that it is in."""
    link: LinkOrName | None = None
    """What joins different parts; else `oversubscription` tells."""
    oversubscription: Number | None = None
    """How many times slower than the level within a device sends to other parts while all others do so too."""

    @pydantic.model_validator(mode="after")
    def _one_of_each(self) -> "TierSchema":
        for one, other in (("nodes_each", "part_of_node"), ("link", "oversubscription")):
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise broken_rule(f"must have either {one} or {other}.")
        if self.nodes_each is not None and self.nodes_each < 1:
            raise broken_rule("must have nodes_each of at least 1.")
        if self.oversubscription is not None and self.oversubscription < 1:
            raise broken_rule("must have an oversubscription of at least 1, as in 4 for four to one.")
        return self

    def tier(self, num_nodes: int, within: Link, links: dict[str, LinkSchema]) -> Tier:
        """The tier; `within`: the link of the level below."""
        if self.part_of_node is not None:
            parts = self.part_of_node
        else:
            assert self.nodes_each is not None
            parts = [node // self.nodes_each for node in range(num_nodes)]
        if self.link is not None:
            return Tier(self.name, tuple(parts), named_link(self.link, links, within.level + 1))
        assert self.oversubscription is not None
        slower = dataclasses.replace(
            within,
            bandwidth_bytes_per_s=within.bandwidth_bytes_per_s / self.oversubscription,
            level=within.level + 1,
            source=f"Oversubscribed {self.oversubscription:g} to one: {within.source}",
            collectives=(),
        )
        return Tier(self.name, tuple(parts), slower)


class PairsSchema(Schema):
    """Speeds of pairs of nodes or of devices."""

    bandwidth_bytes_per_s: list[list[Number]]
    """A row for each node or device. Of the two ways between a pair the slower counts; the diagonal is not read."""
    latency_s: list[list[Number]] | Number | None = None
    """The same, or one figure for all; without it that of `inter_node`, or of `intra_node` where there is none."""
    source: Text
    """Where the figures come from."""

    @classmethod
    def of(cls, pairs: PairSpeeds | None) -> "PairsSchema | None":
        """As a file has it."""
        if pairs is None:
            return None
        rows = lambda matrix: [list(row) for row in matrix]
        return cls(
            bandwidth_bytes_per_s=rows(pairs.bandwidth_bytes_per_s),
            latency_s=rows(pairs.latency_s),
            source=pairs.source,
        )

    def pairs(self, latency_s: float) -> PairSpeeds:
        """The speeds; `latency_s`: where the file does not say."""
        given = latency_s if self.latency_s is None else self.latency_s
        if not isinstance(given, list):
            given = [[given] * len(self.bandwidth_bytes_per_s)] * len(self.bandwidth_bytes_per_s)
        as_matrix = lambda rows: tuple(map(tuple, rows))
        return PairSpeeds(as_matrix(self.bandwidth_bytes_per_s), as_matrix(given), self.source)


class HostSchema(HostFigures):
    """A host that has no name."""

    to_device: LinkOrName | None = None
    """Between its memory and one device while all others are as busy, each way."""

    @classmethod
    def of(cls, host: Host | None) -> "HostSchema | None":
        """As a file has it."""
        if host is None:
            return None
        return cls(
            num_cpus=host.num_cpus,
            memory_bytes=host.memory_bytes,
            source=host.source,
            memory_bandwidth_bytes_per_s=host.memory_bandwidth_bytes_per_s,
            flops_per_s=host.flops_per_s,
            to_device=host.to_device and LinkInPlace.model_validate(host.to_device),
        )


HostOrName = HostSchema | Text


def named_host(value: HostOrName | None, links: dict[str, LinkSchema]) -> Host | None:
    """The host that a file means, by name or in place; `links`: those that the file names."""
    if isinstance(value, HostSchema):
        return value.host(None if value.to_device is None else named_link(value.to_device, links, 0))
    return None if value is None else catalogue().host(value)

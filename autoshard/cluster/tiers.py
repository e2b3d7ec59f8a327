"""What lies above the nodes: racks, pods, spines. Tiers nest: nodes of one rack are in one spine.

The link within the innermost parts is `inter_node`; a tier's own link joins its parts with each other. All figures are
those of one device while all others are as busy, so that a spine that is oversubscribed four to one has a quarter of
the bandwidth of the level below.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

from autoshard.cluster.checks import require_text
from autoshard.cluster.device import Link
from autoshard.errors import ClusterError


@dataclasses.dataclass(frozen=True, slots=True)
class Tier:
    """One tier of switches above the nodes of a group.

    Attributes:
      name: Such as `rack`.
      part_of_node: For each node of the group, in device order, the number of the part (rack) that it is in.
      link: What joins different parts of this tier.
    """

    name: str
    part_of_node: tuple[int, ...]
    link: Link

    def __post_init__(self) -> None:
        require_text("tier", "name", self.name)
        object.__setattr__(self, "part_of_node", tuple(self.part_of_node))


def check_tiers(owner: str, tiers: Sequence[Tier], num_nodes: int, inner: Link | None) -> None:
    """Raises ClusterError unless the tiers cover `num_nodes` nodes, nest, and lie further out one after another."""
    level = -1 if inner is None else inner.level
    for tier in tiers:
        if len(tier.part_of_node) != num_nodes:
            raise ClusterError(
                f"{owner}: tier {tier.name!r} must tell the part of each of the {num_nodes} nodes; received "
                f"{len(tier.part_of_node)}."
            )
        if tier.link.level <= level:
            raise ClusterError(
                f"{owner}: the level of tier {tier.name!r} must be above that of the links within it, {level}; "
                f"received {tier.link.level}. Leave levels out, and they rise by one from tier to tier."
            )
        level = tier.link.level
    for inner_tier, outer in itertools.pairwise(tiers):
        homes: dict[int, int] = {}
        for node, (part, home) in enumerate(zip(inner_tier.part_of_node, outer.part_of_node, strict=True)):
            if homes.setdefault(part, home) != home:
                raise ClusterError(
                    f"{owner}: all nodes of one {inner_tier.name} must be in one {outer.name}; node {node} of "
                    f"{inner_tier.name} {part} is in {outer.name} {home}, others of it in {homes[part]}."
                )


def sorted_nodes(tiers: Sequence[Tier], num_nodes: int) -> tuple[int, ...]:
    """The nodes, those of one part side by side; parts in order of their first node."""
    first: dict[tuple[int, ...], int] = {}
    key: list[tuple[int, ...]] = []
    for node in range(num_nodes):
        home = tuple(tier.part_of_node[node] for tier in reversed(tiers))
        own = tuple(first.setdefault(home[: k + 1], node) for k in range(len(home)))
        key.append((*own, node))
    return tuple(sorted(range(num_nodes), key=key.__getitem__))


def even_sizes(tiers: Sequence[Tier], num_nodes: int) -> tuple[int, ...] | None:
    """Nodes in each innermost part, then parts of each tier in one of the next, the last in the group; None where some
    parts have more than others.
    """
    homes = [tuple(range(num_nodes)), *(tier.part_of_node for tier in tiers), (0,) * num_nodes]
    sizes = []
    for inner, outer in itertools.pairwise(homes):
        members = collections.Counter(home for _, home in set(zip(inner, outer, strict=True)))
        if len(set(members.values())) > 1:
            return None
        sizes.append(next(iter(members.values())))
    return tuple(sizes)

"""The price of moving a tensor from one layout to another: the collectives that XLA emits for it.

In this order, so that each works on the least bytes:
  1. an axis that newly shards a dimension: every device keeps its slice, nothing moves;
  2. an axis that leaves one dimension for another: all-to-all;
  3. pieces in the wrong order (an axis joins or leaves a dimension in front of one that stays): collective-permute;
  4. an axis that no longer shards anything: all-gather, over all such axes at once.
"""

from collections.abc import Sequence

from autoshard.cluster import LogicalMesh
from autoshard.cost.collectives import Collective, all_gather, all_to_all, permute
from autoshard.graph.layout import WHOLE, Layout, shard_bytes


def _out_of_order(source: Layout, target: Layout) -> list[int]:
    """Axes that stay on their dimension but whose major neighbours there change."""
    stays = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s == t != WHOLE]
    return [
        a
        for a in stays
        if [b for b in range(a) if source[b] == source[a]] != [b for b in range(a) if target[b] == source[a]]
    ]


def reshard(size_bytes: float, source: Layout, target: Layout, mesh: LogicalMesh) -> tuple[Collective, ...]:
    """The collectives that turn a tensor of `size_bytes` (whole) from layout `source` into `target`."""
    if source == target:
        return ()
    pairs = list(zip(source, target, strict=True))
    sizes = [axis.size for axis in mesh.axes]
    sliced = tuple(t if s == WHOLE else s for s, t in pairs)
    local_bytes = shard_bytes(size_bytes, sliced, sizes)
    steps: list[Collective] = []
    for a, (s, t) in enumerate(pairs):
        if s != t and WHOLE not in (s, t):
            steps.append(all_to_all(mesh.axes[a], local_bytes))
    moved = _out_of_order(source, target)
    if moved:
        steps.append(permute([mesh.axes[a] for a in moved], local_bytes))
    gathered = [mesh.axes[a] for a, (s, t) in enumerate(pairs) if s != WHOLE and t == WHOLE]
    if gathered:
        steps.append(all_gather(gathered, shard_bytes(size_bytes, target, sizes)))
    return tuple(steps)


def total_s(collectives: Sequence[Collective]) -> float:
    """Time of collectives that run one after another."""
    return sum(c.time_s for c in collectives)

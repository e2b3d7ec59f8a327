"""Dimensions of values and factors of groups that are split together, whatever the mesh."""

from collections.abc import Iterable, Sequence

from autoshard.graph.graph import Dims
from autoshard.graph.groups import Group


class TiedDims:
    """Disjoint sets of dimensions of values and factors of groups that are split together."""

    def __init__(self, groups: Sequence[Group]):
        self.parent: dict[tuple, tuple] = {}
        for group in groups:
            for access in (*group.reads, *group.writes):
                for d, factor in enumerate(_major(group, access.dims)):
                    if factor is not None:
                        self._join(("value", access.value, d), ("factor", group.index, factor))

    def find(self, node: tuple) -> tuple:
        """The representative of a node's set."""
        root = node
        while self.parent.get(root, root) != root:
            root = self.parent[root]
        while self.parent.get(node, node) != root:
            self.parent[node], node = root, self.parent[node]
        return root

    def _join(self, x: tuple, y: tuple) -> None:
        x, y = self.find(x), self.find(y)
        if x != y:
            self.parent[y] = x

    def of(self, dims: Iterable[tuple[int, int]]) -> set[tuple]:
        """The sets of (value, dimension) pairs."""
        return {self.find(("value", v, d)) for v, d in dims}

    def factors(self, group: Group, sets: set[tuple]) -> frozenset[int]:
        """The factors of `group` that belong to any of `sets`."""
        return frozenset(f for f in range(len(group.factors)) if self.find(("factor", group.index, f)) in sets)


def _major(group: Group, dims: Dims) -> list[int | None]:
    """For each dimension, its first factor that has an extent; None where it must stay whole."""
    return [next((f for f in factors if group.factors[f].size > 1), None) for factors in dims]

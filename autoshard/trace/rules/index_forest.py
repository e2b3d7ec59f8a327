"""Indices that are found equal, or found to be made of others, while the rules of several operations are composed.

Each operation of a program names its own indices. Where a tensor passes from one operation to the next, the indices
that the two give to a dimension are tied: they become one where their sizes agree, and one is split where the other
operation sees more of its structure (a reshape). What cannot be tied must stay whole.
"""

import dataclasses


@dataclasses.dataclass(slots=True)
class _Node:
    """One index; `parent` is itself for a root, and only a root without parts is an index in its own right."""

    size: int
    parent: int
    parts: tuple[int, int] | None = None
    is_whole: bool = False
    reduced_by: frozenset[int] = frozenset()


class IndexForest:
    """A union-find structure whose classes can be split in two, major part first."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []

    def new(self, size: int) -> int:
        """Adds an index."""
        self._nodes.append(_Node(size, len(self._nodes)))
        return len(self._nodes) - 1

    def _root(self, index: int) -> int:
        while self._nodes[index].parent != index:
            index = self._nodes[index].parent
        return index

    def leaves(self, indices: list[int]) -> list[int]:
        """What a dimension made of these indices is made of now, major to minor; sizes of 1 are left out."""
        found = []
        for index in indices:
            root = self._root(index)
            parts = self._nodes[root].parts
            if parts is not None:
                found += self.leaves(list(parts))
            elif self._nodes[root].size != 1:
                found.append(root)
        return found

    def size(self, leaf: int) -> int:
        """Extent of a leaf."""
        return self._nodes[leaf].size

    def is_whole(self, leaf: int) -> bool:
        """Whether a leaf must not be split over devices."""
        return self._nodes[leaf].is_whole

    def reduced_by(self, leaf: int) -> frozenset[int]:
        """The operations that sum a leaf up (or combine it in another way), by the caller's numbers."""
        return self._nodes[leaf].reduced_by

    def mark_whole(self, indices: list[int]) -> None:
        """Forbids to split these indices over devices."""
        for leaf in self.leaves(indices):
            self._nodes[leaf].is_whole = True

    def mark_reduced(self, index: int, operation: int) -> None:
        """Notes that an operation combines the elements along an index."""
        for leaf in self.leaves([index]):
            self._nodes[leaf].reduced_by |= {operation}

    def _split(self, leaf: int, major_size: int) -> None:
        node = self._nodes[leaf]
        parts = self.new(major_size), self.new(node.size // major_size)
        for part in parts:
            self._nodes[part].is_whole = node.is_whole
            self._nodes[part].reduced_by = node.reduced_by
        node.parts = parts

    def _unite(self, left: int, right: int) -> None:
        kept, gone = self._nodes[left], self._nodes[right]
        gone.parent = left
        kept.is_whole |= gone.is_whole
        kept.reduced_by |= gone.reduced_by

    def tie(self, left: list[int], right: list[int]) -> None:
        """Makes two descriptions of one dimension (major to minor) agree; what does not fit becomes whole."""
        while True:
            left, right = self.leaves(left), self.leaves(right)
            if not left or not right:
                self.mark_whole(left + right)
                return
            size, other = self.size(left[0]), self.size(right[0])
            if left[0] == right[0] or size == other:
                if left[0] != right[0]:
                    self._unite(left[0], right[0])
                left, right = left[1:], right[1:]
            elif size % other == 0:
                self._split(left[0], other)
            elif other % size == 0:
                self._split(right[0], size)
            else:
                self.mark_whole(left + right)
                return

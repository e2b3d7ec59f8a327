"""The layouts that one tensor gets from the choices of a decision; equal columns are one object."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autoshard.graph.layout import WHOLE, Layout, shard_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutColumn:
    """The layout that a tensor gets from each choice of a decision; equal columns are one object.

    Attributes:
      layouts: The distinct layouts, in order of first appearance.
      of_choice: intp [K]; which of them each choice gives.
    """

    layouts: tuple[Layout, ...]
    of_choice: np.ndarray

    def shard_bytes(self, size_bytes: float, axis_sizes: Sequence[int]) -> np.ndarray:
        """[K] what a tensor of `size_bytes` takes on one device under each choice, on a mesh of these sizes."""
        return np.array([shard_bytes(size_bytes, layout, axis_sizes) for layout in self.layouts])[self.of_choice]


@dataclasses.dataclass(frozen=True, slots=True)
class MoveKinds:
    """What kind of move leads from each of some layouts to each of others; bool [sources, targets].

    Attributes:
      moved: They differ. sent: It takes a collective (`layout.is_sent`). gathered: It gathers (`layout.is_gather`).
    """

    moved: np.ndarray
    sent: np.ndarray
    gathered: np.ndarray

    @classmethod
    def between(cls, sources: Sequence[Layout], targets: Sequence[Layout]) -> "MoveKinds":
        """Those of all pairs."""
        before, after = np.array(sources)[:, None, :], np.array(targets)[None, :, :]
        differs, is_split = before != after, before != WHOLE
        gathered = is_split & (after == WHOLE)
        return cls(differs.any(axis=2), (is_split & differs).any(axis=2), gathered.any(axis=2))


class LayoutColumns:
    """Interns columns: by content, and by where they come from, so that copies of a layer cost a look-up."""

    def __init__(self) -> None:
        self._by_content: dict[tuple[Layout, ...], LayoutColumn] = {}
        self._by_origin: dict[tuple[int, tuple[int, ...]], LayoutColumn] = {}

    def of(self, layouts: tuple[Layout, ...], rows: tuple[int, ...]) -> LayoutColumn:
        """The column of `layouts` at `rows`; `layouts` must stay alive as long as this object."""
        key = id(layouts), rows
        column = self._by_origin.get(key)
        if column is None:
            chosen = tuple(layouts[k] for k in rows)
            column = self._by_content.get(chosen)
            if column is None:
                number = {l: i for i, l in enumerate(dict.fromkeys(chosen))}
                column = LayoutColumn(tuple(number), np.array([number[l] for l in chosen], np.intp))
                self._by_content[chosen] = column
            self._by_origin[key] = column
        return column

"""The different rows that a batch reads, and which of them the last steps have, too, not written back yet.

In `pipelined` such a row is patched from the newest step that has it; in `async` what a step changes in it is added to
what earlier steps make of it meanwhile, while all other rows are just written. There the rows of each owner are ordered
by the newest step that has them, so that those that are added are its first, and no others have to be picked out.

For every row of every table a mark tells which step was the last to read it, and at which place among its rows. Marking
the ids of a batch finds the different ones among them, and what the marks said before, where steps have them: a place
holds if that step still has that row there. Where marks would take too much memory, ids and rows are sorted, which
takes longer.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from autoshard.host_tables.sharding import Layout
from autoshard.tables.rows_of_batch import different_keys

_MARK = np.int32
_MOST_MARKS = 1 / 4
"""The most bytes of marks, as a part of those of the rows that a process has; a choice, not a measurement."""


def marks_fit(layout: Layout, workers: Iterable[int]) -> bool:
    """Whether marks of all rows take little memory beside the rows of these workers."""
    own = sum(layout.own_rows(x.table, worker) * x.row_bytes for worker in workers for x in layout.arrays)
    return np.dtype(_MARK).itemsize * sum(layout.num_keys) <= _MOST_MARKS * own


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Rows of a batch that steps in flight have, too.

    Attributes:
      to: Their positions in the batch, rising. steps: The newest step that has each. at: The positions there.
    """

    to: np.ndarray
    steps: np.ndarray
    at: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Patch:
    """Rows of a batch that an earlier step was the last to change since they were looked up.

    Attributes:
      step: The earlier step.
      places: (2, tables, n), int32: for each table, the positions of such rows in the batch, filled up by one that does
        not exist, and their positions among the rows of the earlier step.
    """

    step: int
    places: np.ndarray


class InFlight:
    """The rows of the last steps."""

    def __init__(self, layout: Layout, num_steps: int, has_marks: bool, newest_first: bool = False):
        """
        Args:
          layout: Whose keys name rows, and whose owners put them in order.
          num_steps: The most steps that are in flight at a time, the one that comes included.
          has_marks: Whether there is memory for marks.
          newest_first: Whether rows of one owner are ordered by the newest step that has them, those of none last.
        """
        self._layout, self._num_steps, self._newest_first = layout, num_steps, newest_first
        self._step = -1
        self._steps = np.full(num_steps, -1)
        self._keys = [np.full(num_steps * capacity, -1) for capacity in layout.capacities]
        """For each table, the keys of the rows of each of these steps, filled up by none."""
        self._marks = [np.zeros(count, _MARK) for count in layout.num_keys] if has_marks else None
        """For each table, for each key, a place in `_keys`."""
        self._patch_sizes: dict[int, int] = {}
        """For patches from so many steps back, the largest size so far."""
        self._had: list[np.ndarray] = [np.zeros(0, np.int64)] * len(layout.capacities)
        """For each table, for each row of the last batch, its newest place in `_keys` before; -1 for none."""

    def begin(self, step: int) -> None:
        """The batch of a step comes; one more than the last."""
        self._steps[self._step % self._num_steps] = self._step
        self._step = step

    def different(self, table: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The different keys that the batch reads of a table, which are in flight from now on; called once for each.

        Returns:
          Where each different key stands once, those of one owner side by side; for each key its number in that order.
        """
        if self._marks is None:
            first, numbers = different_keys(keys)
            had = self._sorted_places(table, keys[first])
            if (order := self._order(table, keys[first], had)) is not None:
                first, had, rank = first[order], had[order], np.empty_like(order)
                rank[order] = np.arange(len(order))
                numbers = rank[numbers]
            self._had[table] = had
            self._remember(table, keys[first])
            return first, numbers
        marks, ids = self._marks[table], np.arange(len(keys), dtype=_MARK)
        before = marks[keys]
        marks[keys] = ids
        first = np.flatnonzero(marks[keys] == ids)  # of ids that are alike, the mark is one's
        own, places = keys[first], before[first]
        had = np.where(self._keys[table][places] == own, places, -1)
        if (order := self._order(table, own, had)) is not None:
            first, own, had = first[order], own[order], had[order]
        self._had[table] = had
        begin = self._remember(table, own)
        marks[own] = np.arange(begin, begin + len(own), dtype=_MARK)
        return first, marks[keys] - _MARK(begin)

    def _order(self, table: int, own: np.ndarray, had: np.ndarray) -> np.ndarray | None:
        """The order of different keys, by owner and, if so wanted, by the newest step that has them; None: as they are.

        Args:
          own: The keys. had: Of each, its newest place in `_keys`; -1 for none.
        """
        layout, count = self._layout, self._num_steps
        if not self._newest_first:
            several = layout.num_workers > 1
            return np.argsort(layout.owners(table, own), kind="stable") if several else None
        hits = np.flatnonzero(had >= 0)
        backs = np.minimum(self._step - self._steps, count).astype(np.min_scalar_type(layout.num_workers * (count + 1)))
        groups = np.full(len(had), count, backs.dtype)
        groups[hits] = backs[had[hits] // layout.capacities[table]]
        if layout.num_workers == 1:  # of few groups faster than a sort
            return np.concatenate([np.flatnonzero(groups == back) for back in range(1, count + 1)])
        groups += layout.owners(table, own).astype(groups.dtype) * groups.dtype.type(count + 1)
        return np.argsort(groups, kind="stable")

    def _remember(self, table: int, own: np.ndarray) -> int:
        """Has the keys of the step's rows in `_keys`; returns the place of the first."""
        capacity = self._layout.capacities[table]
        begin = self._step % self._num_steps * capacity
        self._keys[table][begin : begin + len(own)] = own
        self._keys[table][begin + len(own) : begin + capacity] = -1
        return begin

    def _sorted_places(self, table: int, own: np.ndarray) -> np.ndarray:
        """Where in `_keys` the newest step has each of these rising keys; -1 for nowhere.

        A stable sort merges the rising keys of all steps in one pass, the batch's in front of the newest of the others.
        """
        keys, capacity = self._keys[table], self._layout.capacities[table]
        begins = [(self._step - back) % self._num_steps * capacity for back in range(1, self._num_steps)]
        in_use = [begin + np.flatnonzero(keys[begin : begin + capacity] >= 0) for begin in begins]
        theirs = np.concatenate([np.zeros(0, np.int64), *in_use])
        joined = np.concatenate([own, keys[theirs]])
        order = np.argsort(joined, kind="stable")
        ordered = joined[order]
        pairs = np.flatnonzero((ordered[1:] == ordered[:-1]) & (order[:-1] < len(own)))
        places = np.full(len(own), -1)
        places[order[pairs]] = theirs[order[pairs + 1] - len(own)]
        return places

    def patches(self, found: Sequence[Found]) -> tuple[Patch, ...]:
        """What the batch takes from which step, each row from one, the oldest step first.

        Args:
          found: For each table, its rows in flight, as `found` tells.
        """
        patches = []
        for step in sorted(self._steps.tolist()):
            are_its = [own.steps == step for own in found]
            if not any(map(np.any, are_its)):
                continue
            pairs = [(own.to[its], own.at[its]) for own, its in zip(found, are_its, strict=True)]
            size = self._patch_size(self._step - step, max(len(to) for to, _ in pairs))
            places = np.zeros((2, len(pairs), size), np.int32)
            for t, (to, at) in enumerate(pairs):
                places[0, t], places[0, t, : len(to)] = self._layout.capacities[t], to
                places[1, t, : len(at)] = at
            patches.append(Patch(step, places))
        return tuple(patches)

    def _patch_size(self, back: int, count: int) -> int:
        """Places of a patch from so many steps back; few sizes, for each of which one program is compiled."""
        eighth = 1 << max(0, count.bit_length() - 3)
        self._patch_sizes[back] = max(self._patch_sizes.get(back, 0), -(-count // eighth) * eighth)
        return self._patch_sizes[back]

    def found(self, since: int) -> tuple[Found, ...]:
        """For each table, which rows of the batch are in flight.

        Args:
          since: The first step whose new rows the batch may have been too early for.
        """
        tables = []
        for capacity, places in zip(self._layout.capacities, self._had, strict=True):
            to = np.flatnonzero(places >= 0)
            steps = self._steps[places[to] // capacity]
            if not (are_in := steps >= since).all():
                to, steps = to[are_in], steps[are_in]
            tables.append(Found(to, steps, places[to] % capacity))
        return tuple(tables)


class Patcher:
    """Puts rows of an earlier step into those of a batch, on their devices."""

    def __init__(self, tables: Sequence[int]):
        """
        Args:
          tables: For each array of rows, the number of its table.
        """

        def patched(rows: Any, new: Any, places: Any) -> Any:
            put = lambda x, y, t: x.at[places[0, t]].set(y[places[1, t]], mode="drop", unique_indices=False)
            return [put(x, y, t) for x, y, t in zip(rows, new, tables, strict=True)]

        self._patched, self._programs = patched, dict[Any, Any]()

    def __call__(self, rows: list[Any], new: Sequence[Any], patch: Patch) -> list[Any]:
        """The rows of a batch with those of an earlier step in place; `rows` are used up."""
        shardings = tuple(x.sharding for x in rows)
        if shardings not in self._programs:
            self._programs[shardings] = jax.jit(self._patched, donate_argnums=0, out_shardings=list(shardings))
        new = [y if y.sharding == x.sharding else jax.device_put(y, x.sharding) for x, y in zip(rows, new, strict=True)]
        return self._programs[shardings](rows, new, patch.places)

"""Which predicted collectives the compiled program lacks, and which of its own were not predicted.

The compiler joins, splits and moves collectives, so they are matched by what they do: kind, mesh axes and bytes a time,
where possible of the same equation, else from the same line of the user's program.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from autoshard.hlo.collectives import CompiledCollective, Piece
from autoshard.planner.estimate import CommunicationItem
from autoshard.trace.trace import Trace
from autoshard.verify.figures import Flow, Stray


@dataclasses.dataclass(frozen=True, slots=True)
class Origins:
    """What the equations of a planned program are: operation and line, by number; and the paths of its arguments."""

    names: Mapping[int, str]
    sources: Mapping[int, str]
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, traced: Trace) -> "Origins":
        names: dict[int, str] = {}
        sources: dict[int, str] = {}
        for operation in traced.graph.operations:
            names.setdefault(operation.equation, operation.name)
            if operation.source:
                sources.setdefault(operation.equation, operation.source)
        return cls(names, sources, tuple(a.name for a in traced.graph.arguments))

    def source(self, equations: Sequence[int]) -> str:
        """The line of the first equation that has one; the line before, of one whose operation was left out."""
        return next((self.sources[e] for e in equations if e in self.sources), "")

    def name(self, piece: Piece) -> str:
        """What a piece of a collective is made of, or serves."""
        if piece.argument:
            return self._argument(piece.argument)
        return next((self.names[e] for e in piece.equations if e in self.names), "an unnamed tensor")

    def _argument(self, op_name: str) -> str:
        """The path of an argument as plans write it, of one as the compiler has it: `inner[0].params['up']`."""
        _, *keys = re.findall(r"\w+", op_name)
        heads = list(dict.fromkeys(a.partition(".")[0] for a in self.arguments))
        if keys and keys[0].isdecimal() and int(keys[0]) < len(heads):
            path = ".".join((heads[int(keys[0])], *keys[1:]))
            if path in self.arguments:
                return path
        return op_name


@dataclasses.dataclass(slots=True)
class _Side:
    """Collectives of equal kind, axes, bytes a time and line, on one side, that are not matched yet."""

    stray: Stray
    left: float


def flows(
    predicted: Iterable[CommunicationItem], compiled: Iterable[CompiledCollective], order: Sequence[str]
) -> tuple[Flow, ...]:
    """Both sides by kind and axes, those with most bytes first; `order` are the axes of the mesh."""
    sums: dict[tuple, list[float]] = collections.defaultdict(lambda: [0.0] * 4)
    for item in predicted:
        row = sums[item.kind, _ordered(item.axes, order)]
        row[0] += item.count
        row[2] += item.wire_bytes
    for collective in compiled:
        row = sums[collective.kind, _ordered(collective.axes, order)]
        row[1] += collective.times
        row[3] += collective.wire_bytes
    rows = [Flow(*key, *row) for key, row in sums.items()]
    return tuple(sorted(rows, key=lambda f: (-max(f.predicted_bytes, f.compiled_bytes), f.kind, f.axes)))


def _ordered(axes: Iterable[str], order: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(axes, key=order.index))


def strays(
    predicted: Iterable[CommunicationItem],
    compiled: Iterable[CompiledCollective],
    origins: Origins,
    order: Sequence[str],
) -> tuple[Stray, ...]:
    """What is left on either side when collectives that do the same are matched; most bytes first."""
    ours = [
        Stray(
            True,
            i.kind,
            _ordered(i.axes, order),
            i.value,
            i.shape,
            i.source,
            i.count,
            i.wire_bytes,
            equations=() if i.equation is None else (i.equation,),
        )
        for i in predicted
        if i.wire_bytes and i.count
    ]
    theirs = [
        Stray(
            False,
            c.kind,
            _ordered(c.axes, order),
            origins.name(p),
            p.array.dims,
            origins.source(p.equations),
            c.times,
            p.wire_bytes * c.times,
            c.only_sliced,
            p.equations,
        )
        for c in compiled
        for p in c.pieces
        if p.wire_bytes
    ]
    sides = [[_Side(s, s.count) for s in rows] for rows in (ours, theirs)]
    for places_of in (lambda s: s.equations, lambda s: (s.source,), lambda s: (None,)):
        waiting: dict[tuple, collections.deque[_Side]] = collections.defaultdict(collections.deque)
        for side in sides[1]:
            for place in places_of(side.stray):
                waiting[_key(side.stray, place)].append(side)
        for side in sides[0]:
            for queue in [waiting[_key(side.stray, place)] for place in places_of(side.stray)]:
                while side.left > 1e-9 and queue:
                    matched = min(side.left, queue[0].left)
                    side.left -= matched
                    queue[0].left -= matched
                    if queue[0].left <= 1e-9:
                        queue.popleft()
    left = [
        dataclasses.replace(s.stray, count=s.left, wire_bytes=s.stray.wire_bytes * s.left / s.stray.count)
        for side in sides
        for s in side
        if s.left > 1e-9
    ]
    return _joined(left)


def _key(stray: Stray, place: int | str | None) -> tuple:
    return stray.kind, stray.axes, round(stray.wire_bytes / stray.count), place


def _joined(rows: Iterable[Stray]) -> tuple[Stray, ...]:
    """Rows that differ in nothing but their number are one."""
    alike: dict[Stray, list[Stray]] = collections.defaultdict(list)
    for row in rows:
        alike[dataclasses.replace(row, count=0.0, wire_bytes=0.0)].append(row)
    made = [
        dataclasses.replace(
            first,
            count=sum(r.count for r in group),
            wire_bytes=sum(r.wire_bytes for r in group),
            equations=tuple(dict.fromkeys(e for r in group for e in r.equations)),
        )
        for first, group in alike.items()
    ]
    return tuple(sorted(made, key=lambda s: -s.wire_bytes))

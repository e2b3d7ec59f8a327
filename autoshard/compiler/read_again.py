"""What the compiler stores since one kernel would otherwise compute it several times.

A kernel that reads parts of a value, such as its even and its odd rows, or that pads it in two ways, computes each part
where it needs it. What two parts need of one source is fetched twice. The levels of an associative scan double so from
level to level, and XLA:GPU stores every second one: its fusion counts what is fetched as often as it is
(`count_multiple_input_accesses`, OpenXLA, xla/backends/gpu/transforms/priority_fusion.cc). In which order it decides is
not followed: here the readers of a value come first.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set

from autoshard.compiler.def_use import DefUse
from autoshard.graph.graph import Operation

_PARTS = frozenset({"slice", "split"})
"""What takes a part of a value."""

_JOINS = frozenset({"pad", "concatenate"})
"""What makes a value a part of another."""

_CACHED = -1
"""Stands for all that is broadcast: it is read for each element that is made of it, from a cache."""

_Way = tuple[int, int]
"""A region or a value, and the part or join by which a kernel comes to it; -1 for none. By one way it comes once."""


def stored_for_parts(chains: DefUse, fused: Sequence[int], free: Set[int]) -> frozenset[int]:
    """The values, of those that are computed inside their readers, that take less time stored.

    Args:
      chains: The program. fused: For each value, whether its readers compute it. free: What is rebuilt from nothing.
    """
    if not any(o.name in _JOINS or o.name in _PARTS for o in chains.graph.operations):
        return frozenset()
    values = chains.graph.values
    kernels = _Kernels(chains, [bool(is_fused) and v not in free for v, is_fused in enumerate(fused)], free)
    several = kernels.computed_several_times()
    for value in several:
        kernels.inside[value] = False
    for value in sorted(several, reverse=True):
        kernels.inside[value] = True
        times = kernels.times(value)
        if kernels.needed_bytes(value) * (times - 1) > values[value].size_bytes * (times + 1):
            kernels.inside[value] = False
    return frozenset(v for v in several if not kernels.inside[v])


class _Kernels:
    """What kernels compute while it is decided what is stored.

    Attributes:
      inside: For each value, whether its readers compute it.
    """

    def __init__(self, chains: DefUse, inside: list[bool], free: Set[int]) -> None:
        self._chains, self.inside, self._free = chains, inside, free
        self._elements = [math.prod(v.shape) for v in chains.graph.values]

    def computed_several_times(self) -> list[int]:
        """The values of which kernels compute more elements than they have, as they read several parts."""
        known: dict[int, Mapping[_Way, float]] = {}
        found = []
        for operation in reversed(self._chains.graph.operations):
            for value in operation.results:
                if value is not None and self.inside[value] and self._elements[value]:
                    ways = self._ways_to(operation, value, known)
                    if sum(ways.values()) > self._elements[value] and any(part >= 0 for _, part in ways):
                        found.append(value)
                        ways = {(self._chains.region[operation.index], -1): float(self._elements[value])}
                    known[value] = ways
        return found

    def times(self, value: int) -> float:
        """How often kernels compute a value that is computed inside its readers."""
        known: dict[int, Mapping[_Way, float]] = {}
        for v in sorted(self._reached(value, self._made_inside), reverse=True, key=self._index):
            known[v] = self._ways_to(self._chains.made_by(v), v, known)
        return sum(known[value].values()) / self._elements[value]

    def needed_bytes(self, value: int) -> float:
        """What a kernel fetches to compute a value once."""
        known: dict[int, Mapping[_Way, float]] = {}
        for v in sorted(self._reached(value, self._read_inside), key=self._index):
            known[v] = self._reads(self._chains.made_by(v), v, known)
        return sum(known[value].values())

    def _index(self, value: int) -> int:
        return self._chains.made_by(value).index

    def _made_inside(self, value: int) -> list[int]:
        """What is made of a value in the same kernels."""
        after = [c for c, _ in self._chains.consumers[value] if c.index > self._index(value)]
        return [r for c in after for r in c.results if r is not None and self.inside[r]]

    def _read_inside(self, value: int) -> list[int]:
        """What a value is made of in the same kernel."""
        operation = self._chains.made_by(value)
        read = [o for o in operation.operands if o is not None and self.inside[o] and self._elements[o]]
        return [o for o in read if self._index(o) < operation.index]

    @staticmethod
    def _reached(value: int, following: Callable[[int], list[int]]) -> set[int]:
        """A value and what follows it, and so on."""
        found, left = {value}, [value]
        while left:
            new = [v for v in following(left.pop()) if v not in found]
            found.update(new)
            left += new
        return found

    def _ways_to(
        self, operation: Operation, value: int, known: Mapping[int, Mapping[_Way, float]]
    ) -> Mapping[_Way, float]:
        """How many elements of a value kernels compute, on each way, by region; `known`: of what is made of it."""
        own = float(self._elements[value])
        found: dict[_Way, float] = {}
        for reader, _ in self._chains.consumers[value]:
            if reader.index <= operation.index:
                continue
            here = self._chains.region[reader.index], -1
            for result in reader.results:
                if result is None:
                    continue
                made = float(self._elements[result])
                if reader.name in _PARTS or reader.name in _JOINS:
                    share = 1.0 if reader.name in _PARTS else own / max(made, 1.0)
                    for (region, _), count in known.get(result, {here: made}).items():
                        found[region, result] = found.get((region, result), 0.0) + share * count
                else:
                    for way, count in known.get(result, {here: own}).items():
                        found[way] = max(found.get(way, 0.0), own if way[1] < 0 else count)
        return found

    def _reads(
        self, operation: Operation, value: int, known: Mapping[int, Mapping[_Way, float]]
    ) -> Mapping[_Way, float]:
        """The bytes of stored values that a kernel fetches to compute a value once, by value and way; `known`: of what
        it is made of."""
        values, found = self._chains.graph.values, dict[_Way, float]()
        is_part = operation.name in _PARTS
        for operand in operation.operands:
            if operand is None or operand in self._free or not self._elements[operand]:
                continue
            if operation.name == "broadcast_in_dim":
                found[_CACHED, -1] = float(values[value].size_bytes)
                continue
            share = self._elements[value] / self._elements[operand] if is_part else 1.0
            for (source, part), size in known.get(operand, {(operand, -1): values[operand].size_bytes}).items():
                if is_part or operation.name in _JOINS:
                    found[source, value] = found.get((source, value), 0.0) + share * size
                else:
                    found[source, part] = max(found.get((source, part), 0.0), size)
        return found

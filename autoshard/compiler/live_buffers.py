"""Live ranges after the solve: a value is held until nothing needs more of it than slices or gathered copies.

The solver counts a value until its last reader is done, since only a solution tells how all of its readers take it.
"""

import collections
import math
from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.compiler.buffer_uses import BufferKind, BufferUse, spans_of
from autoshard.compiler.solved import SolvedProgram
from autoshard.graph.layout import Layout, is_sent, shard_bytes

_MOST_ADDED = 32
"""How many elements each of two reductions may sum on a device to be made by the kernel that adds them. XLA:GPU's
programs do so with up to 32, and not with 64.
"""


def shortened(
    solved: SolvedProgram,
    uses: Sequence[BufferUse],
    sizes_bytes: np.ndarray,
    made_first: Mapping[int, int],
    hides: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """(spans, bytes) of all buffers, as far as the solved program needs them.

    Where heavy kernels read slices of a value, XLA takes these as soon as nothing else needs the whole one, since its
    schedule for least memory does first what frees most. A pointwise result that nothing needs whole is computed inside
    its slices (`PriorityFusion`). Where a value is gathered for a reader, what is computed from the copy later needs
    the pieces no more. And what a product reads that others wait for is made for it, not in one kernel with what is
    made of values behind these others.

    Args:
      solved: The program. uses: Its buffers. sizes_bytes: [n] of each; 0 where there is none.
      made_first: The products that are made first, by operation, each with its group (`made_first.py`).
      hides: Whether XLA:GPU runs collectives behind kernels.

    Returns:
      int64 [n, 2], the first operation of each buffer and the one after its last; and [n] bytes.
    """
    return _Shortening(solved, uses, sizes_bytes, hides).shortened(made_first)


class _Shortening:
    """Shortens the live ranges of a program's buffers; `shortened` is its only user."""

    def __init__(self, solved: SolvedProgram, uses: Sequence[BufferUse], sizes_bytes: np.ndarray, hides: bool):
        self.solved, self.layouts, self.uses = solved, solved.layouts, uses
        self.analysis, self.chains, live = solved.analysis, solved.analysis.chains, solved.analysis.live
        self.mesh_shape = solved.mesh.shape
        self.named_until, self.fused_until = live.alias_stop, live.fused_stop
        self.apart_stop = live.hiding_apart_stop if hides else live.apart_stop
        self.starts = {life.value: life.start for life in live.ranges}
        self.spans, self.sizes_bytes = spans_of(uses), sizes_bytes.copy()
        self.copies: dict[int, list[int]] = collections.defaultdict(list)  # for each move, its buffers
        self.partial: dict[int, list[int]] = collections.defaultdict(
            list
        )  # for each group, what it needs beside values
        by_value: dict[int, list[int]] = collections.defaultdict(list)
        owned = {
            BufferKind.VALUE: by_value,
            BufferKind.PARTIAL_SUM: self.partial,
            BufferKind.WORKSPACE: self.partial,
            BufferKind.OPERAND_COPY: self.copies,
            BufferKind.HOST_COPY: collections.defaultdict(list),
            BufferKind.AROUND_HOST: collections.defaultdict(list),
        }
        for k, use in enumerate(uses):
            owned[use.kind][use.owner].append(k)
        self.buffer_of = {value: found[0] for value, found in by_value.items() if len(found) == 1}
        self.moved = self._moved()

    def shortened(self, made_first: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """(spans, bytes) of all buffers, as far as the solved program needs them; `made_first` as above."""
        for value in self.moved:
            is_made = value in self.buffer_of and self.chains.producer[value] is not None
            is_made = is_made and self.sizes_bytes[self.buffer_of[value]] > 0  # else it lies on the host
            if is_made and value not in self.chains.outputs:
                self._shorten(value, self.buffer_of[value])
        for product in made_first:
            self._make_first(product, made_first)
        if all(map(self._is_apart, self.analysis.live.added_reductions)):
            for value, stop in self.apart_stop.items():
                if value in self.buffer_of:
                    k = self.buffer_of[value]
                    self.spans[k, 1] = min(stop, self.spans[k, 1])
        return self.spans, self.sizes_bytes

    def _make_first(self, product: int, made_first: Mapping[int, int]) -> None:
        """Makes a product that was to run later where the program does, and what it reads before it."""
        delayed = self.analysis.live.delayed[product]
        for k in self.partial[made_first[product]]:
            if self.spans[k, 0] == delayed:
                self.spans[k] = product, product + 1
            elif self.spans[k, 0] == delayed + 1:
                self.spans[k, 0] = product + 1
        for value in self.chains.graph.operations[product].operands:
            made = None if value is None else self.chains.producer[value]
            if value is None or made is None or value not in self.buffer_of:
                continue
            k, readers = self.buffer_of[value], [c.index for c, _ in self.chains.consumers[value]]
            if made.index < self.spans[k, 0]:
                until = max(readers) + 1 if made_first.keys() >= set(readers) else int(self.spans[k, 1])
                self.spans[k] = made.index, until

    def _is_apart(self, operation: int) -> bool:
        """Whether a reduction sums too many elements on a device to be part of the kernel that adds two of them."""
        reduction = self.chains.graph.operations[operation]
        value, rule = reduction.operand(0), reduction.rule
        summed = [d for d, dim in enumerate(rule.operands[0]) if any(rule.factors[k].reduction for k in dim)]
        whole = math.prod(self.chains.graph.values[value].shape[d] for d in summed)
        ways = math.prod(n for d, n in zip(self.layouts[value], self.mesh_shape, strict=True) if d in summed)
        return whole == 1 or whole // ways > _MOST_ADDED

    def _moved(self) -> dict[int, dict[int, list[int]]]:
        """For each value, the operations that read it in another layout than it has, each with the moves."""
        found: dict[int, dict[int, list[int]]] = collections.defaultdict(lambda: collections.defaultdict(list))
        for n, move in enumerate(self.solved.moves):
            if self.layouts[move.value] != move.target:
                for o in self.solved.readers(move):
                    found[move.value][o].append(n)
        return found

    def _is_sent(self, move: int) -> bool:
        """Whether a move takes a collective."""
        return is_sent(self.layouts[self.solved.moves[move].value], self.solved.moves[move].target)

    def _shorten(self, value: int, buffer: int) -> None:
        """Ends the buffer of a value when nothing needs the whole one, and begins its slices then."""
        chains = self.chains
        slices: dict[Layout, list[tuple[int, int]]] = collections.defaultdict(list)  # -> (operation, move)
        whole_until, made = 0, chains.made_by(value).index
        for o, num in collections.Counter(o.index for o, _ in chains.consumers[value]).items():
            if chains.loop_nest[o] != chains.scope(value):
                return
            moves, operation, until = self.moved[value].get(o, ()), chains.graph.operations[o], self._until(o)
            sent = [n for n in moves if self._is_sent(n)]
            if len(moves) == num and sent and self._kept_until(sent) >= until:
                until = o + 1
            elif len(moves) == num and not sent and operation.rule.is_heavy:
                for n in moves:
                    slices[self.solved.moves[n].target].append((o, n))
                continue
            whole_until = max(whole_until, until)
        size_bytes = float(chains.graph.values[value].size_bytes)
        if sum(shard_bytes(size_bytes, s, self.mesh_shape) for s in slices) >= self.sizes_bytes[buffer]:
            whole_until = max([whole_until, *(o + 1 for reads in slices.values() for o, _ in reads)])
        if whole_until <= made and (value not in self.analysis.live.recomputable or self._is_stored_whole(value)):
            whole_until = made + 2  # slices are taken of what is there
        start, stop = self.spans[buffer].tolist()
        if whole_until < stop:
            self.spans[buffer, 1] = max(whole_until, start)
            for reads in slices.values():
                self._hold_slice(reads, max(start, whole_until - 1), whole_until)

    def _hold_slice(self, reads: Sequence[tuple[int, int]], start: int, whole_until: int) -> None:
        """Holds one slice from `start` on, which all `reads`, (operation, move), share from then on, if any is late."""
        read_at = {o + 1 for o, _ in reads}
        own = [k for n in {n for _, n in reads} for k in self.copies[n] if self.spans[k, 1] in read_at]
        last = max(own, key=lambda k: self.spans[k, 1])
        if self.spans[last, 1] > whole_until:
            self.spans[last, 0] = min(start, self.spans[last, 0])
            self.sizes_bytes[[k for k in own if k != last and self.spans[k, 0] >= start]] = 0.0

    def _kept_until(self, moves: Sequence[int]) -> int:
        """One past the last operation at which a copy of one of `moves` is there."""
        return max([int(self.spans[k, 1]) for n in moves for k in self.copies[n] if self.sizes_bytes[k]], default=0)

    def _is_stored_whole(self, value: int) -> bool:
        """Whether execution has a value stored (`materialized.py`): a product reads it, and it is made of a copy."""
        made = self.chains.made_by(value)
        moves = [n for o in made.operands if o is not None for n in self.moved.get(o, {}).get(made.index, ())]
        return any(map(self._is_sent, moves)) and any(c.name == "dot_general" for c, _ in self.chains.consumers[value])

    def _until(self, operation: int) -> int:
        """One past the last operation that needs what an operation reads."""
        until, seen = operation + 1, set()
        ahead = [r for r in self.chains.graph.operations[operation].results if r is not None]
        while ahead:
            value = ahead.pop()
            if value in seen:
                continue
            seen.add(value)
            known = (self.fused_until.get(value, 0), self.named_until.get(value, 0), self.starts.get(value, 0) + 1)
            until = max(until, *known)
            if value in self.named_until:
                until = max(until, len(self.chains.graph.operations) * (value in self.chains.outputs))
                names = (r for c, _ in self.chains.consumers[value] for r in c.results if r is not None)
                ahead += [r for r in names if r in self.named_until]
        return until

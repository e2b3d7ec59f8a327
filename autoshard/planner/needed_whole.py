"""How long a solution holds each value as it was made: until nothing needs more of it than slices or gathered copies.

The solver counts a value until its last reader is done, since only a solution tells how all of its readers take it.
"""

import collections
import math
from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.compiler.def_use import def_use
from autoshard.compiler.fusion import COSTLY
from autoshard.cost.collectives import COMBINED_BYTES
from autoshard.graph.layout import Layout, shard_bytes
from autoshard.planner.build import Formulation, is_sent

_MOST_ADDED = 32
"""How many elements each of two reductions may sum on a device to be made by the kernel that adds them. XLA:GPU's
programs do so with up to 32, and not with 64.
"""


class NeededWhole:
    """Shortens the usages of a problem to what a solution needs.

    Where heavy kernels read slices of a value, XLA takes these as soon as nothing else needs the whole one, since its
    schedule for least memory does first what frees most. A pointwise result that nothing needs whole is computed inside
    its slices (`PriorityFusion`). Where a value is gathered for a reader, what is computed from the copy later needs
    the pieces no more. And what only products read whose sums are waited for (`alone_sums.py`) is made for them, not
    with what is made of values behind these sums.
    """

    def __init__(
        self, f: Formulation, layouts: Mapping[int, Layout], targets: Sequence[Layout], sizes_bytes: np.ndarray
    ):
        """Prepares the look-up.

        Args:
          f: The formulation. layouts: The layout of each value. targets: The layout in which each flow is read.
          sizes_bytes: Of each usage, then of each usage of an edge; 0 where there is none.
        """
        self.f, self.layouts, self.targets = f, layouts, targets
        self.chains, live = def_use(f.program.graph), f.program.live
        self.named_until, self.fused_until = dict(live.alias_stop), dict(live.fused_stop)
        self.starts = {life.value: life.start for life in live.ranges}
        self.spans, self.sizes_bytes = f.spans.copy(), sizes_bytes.copy()
        self.copies: dict[int, list[int]] = collections.defaultdict(list)  # for each flow, its usages
        for k, usage in enumerate(f.problem.edge_usages, len(f.problem.usages)):
            self.copies[usage.edge].append(k)
        self.moved = self._moved()

    def shortened(self) -> tuple[np.ndarray, np.ndarray]:
        """(spans, bytes) of all usages, as far as the solution needs them."""
        num = collections.Counter(self.f.usage_values)
        usages = {v: k for k, v in enumerate(self.f.usage_values) if num[v] == 1}
        for value in self.moved:
            is_made = value in usages and self.chains.producer[value] is not None
            if is_made and value not in self.chains.outputs:
                self._shorten(value, usages[value])
        self._make_for_sums(usages)
        if all(map(self._is_apart, self.f.program.live.added)):
            for value, stop in self.f.program.live.apart_stops:
                if value in usages:
                    self.spans[usages[value], 1] = min(stop, self.spans[usages[value], 1])
        return self.spans, self.sizes_bytes

    def _make_for_sums(self, usages: Mapping[int, int]) -> None:
        """Makes products whose sums are reduced alone where the program does, with all that nothing else reads.

        Where that is made of a costly function, the kernel behind the sum needs this as well, and as long: it is stored
        instead. `usages`: Of each value.
        """
        f, first = self.f, len(self.f.program.graph.arguments)
        own: dict[int, list[int]] = collections.defaultdict(list)  # for each such product, what it needs beside values
        for k, (usage, value) in enumerate(zip(f.problem.usages, f.usage_values, strict=True)):
            if value is None and usage.node >= first:
                own[f.program.groups[usage.node - first].operations[0]].append(k)
        is_sum = lambda k: k not in f.workspaces and self.sizes_bytes[k] > COMBINED_BYTES
        summed = {at for at in f.program.alone if any(map(is_sum, own[at]))}
        for at in summed:
            for k in own[at]:
                self.spans[k] = at, at + 1
        for value, start in self.starts.items():
            made, readers = self.chains.producer[value], [c.index for c, _ in self.chains.consumers[value]]
            if made is not None and made.index < start and readers and summed.issuperset(readers):
                if value in usages and not self._is_costly(value):
                    self.spans[usages[value]] = made.index, max(readers) + 1

    def _is_costly(self, value: int) -> bool:
        """Whether the kernel that makes a value computes a costly function."""
        made = self.chains.producer[value]
        inside = [o for o in made.operands if o is not None and self.chains.producer[o] is not None]
        stored = self.f.program.live.stored
        return made.name in COSTLY or any([self._is_costly(o) for o in inside if o not in stored])

    def _is_apart(self, operation: int) -> bool:
        """Whether a reduction sums too many elements on a device to be part of the kernel that adds two of them."""
        reduction = self.chains.graph.operations[operation]
        value, rule = reduction.operands[0], reduction.rule
        summed = [d for d, dim in enumerate(rule.operands[0]) if any(rule.factors[k].reduction for k in dim)]
        whole = math.prod(self.chains.graph.values[value].shape[d] for d in summed)
        ways = math.prod(n for d, n in zip(self.layouts[value], self.f.mesh.shape, strict=True) if d in summed)
        return whole == 1 or whole // ways > _MOST_ADDED

    def _moved(self) -> dict[int, dict[int, list[int]]]:
        """For each value, the operations that read it in another layout than it has, each with the flows."""
        found = collections.defaultdict(lambda: collections.defaultdict(list))
        first = len(self.f.program.graph.arguments)
        for n, (flow, target) in enumerate(zip(self.f.flows, self.targets, strict=True)):
            if flow.read is not None and self.layouts[flow.value] != target:
                for o in self.f.program.groups[flow.target - first].reads[flow.read].operations:
                    found[flow.value][o].append(n)
        return found

    def _shorten(self, value: int, usage: int) -> None:
        """Ends the usage of a value when nothing needs the whole one, and begins its slices then."""
        chains = self.chains
        slices: dict[Layout, list[tuple[int, int]]] = collections.defaultdict(list)  # -> (operation, flow)
        whole_until, made = 0, chains.producer[value].index
        for o, num in collections.Counter(o.index for o, _ in chains.consumers[value]).items():
            if chains.loop_nest[o] != chains.scope(value):
                return
            flows, operation, until = self.moved[value].get(o, ()), chains.graph.operations[o], self._until(o)
            sent = [n for n in flows if is_sent(self.layouts[value], self.targets[n])]
            if len(flows) == num and sent and self._kept_until(sent) >= until:
                until = o + 1
            elif len(flows) == num and not sent and operation.rule.is_heavy:
                for n in flows:
                    slices[self.targets[n]].append((o, n))
                continue
            whole_until = max(whole_until, until)
        size_bytes = float(chains.graph.values[value].size_bytes)
        if sum(shard_bytes(size_bytes, s, self.f.mesh.shape) for s in slices) >= self.sizes_bytes[usage]:
            whole_until = max([whole_until, *(o + 1 for reads in slices.values() for o, _ in reads)])
        if whole_until <= made and (value not in self.f.program.live.remade or self._is_stored_whole(value)):
            whole_until = made + 2  # slices are taken of what is there
        start, stop = self.spans[usage].tolist()
        if whole_until < stop:
            self.spans[usage, 1] = max(whole_until, start)
            for reads in slices.values():
                self._hold_slice(reads, max(start, whole_until - 1), whole_until)

    def _hold_slice(self, reads: Sequence[tuple[int, int]], start: int, whole_until: int) -> None:
        """Holds one slice from `start` on, which all `reads`, (operation, flow), share from then on, if any is late."""
        read_at = {o + 1 for o, _ in reads}
        usages = [k for n in {n for _, n in reads} for k in self.copies[n] if self.spans[k, 1] in read_at]
        last = max(usages, key=lambda k: self.spans[k, 1])
        if self.spans[last, 1] > whole_until:
            self.spans[last, 0] = min(start, self.spans[last, 0])
            self.sizes_bytes[[k for k in usages if k != last and self.spans[k, 0] >= start]] = 0.0

    def _kept_until(self, flows: Sequence[int]) -> int:
        """One past the last operation at which a copy of one of `flows` is there."""
        return max([int(self.spans[k, 1]) for n in flows for k in self.copies[n] if self.sizes_bytes[k]], default=0)

    def _is_stored_whole(self, value: int) -> bool:
        """Whether execution has a value stored: it is made of a gathered copy, and a matrix product reads it."""
        made = self.chains.producer[value]
        flows = [n for o in made.operands if o is not None for n in self.moved.get(o, {}).get(made.index, ())]
        is_of_a_copy = any(is_sent(self.layouts[self.f.flows[n].value], self.targets[n]) for n in flows)
        return is_of_a_copy and any(c.name == "dot_general" for c, _ in self.chains.consumers[value])

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
                names = (r for c, _ in self.chains.consumers[value] for r in c.results)
                ahead += [r for r in names if r in self.named_until]
        return until

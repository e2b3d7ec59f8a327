"""Which collectives nobody waits for: those can be joined, and can hide behind computation.

Weights are known before the layer that needs them runs, and a gradient is not needed until the update. Both transfers
are joined with others of their kind by the compiler (`cost/collectives.py`, `joined`), and can run beside the
computation of other layers. One model of the latter, tunable by one number: such a collective is exposed for
`(1 - overlap)` of its time. Everything between activations is waited for, and counts in full.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence, Set

from autoshard.cluster import CollectiveKind
from autoshard.cost.collectives import MOST_JOINED, Collective, joined
from autoshard.graph.graph import Graph, Operation, OperationKind
from autoshard.graph.groups import Group


def weight_values(graph: Graph, pointwise: Sequence[bool]) -> frozenset[int]:
    """State arguments, their slices in loops, and what pointwise operations make of them alone; `pointwise` tells of
    each operation whether it is (`pointwise_operations`).
    """
    weights = {graph.arguments[o.successor_of].value for o in graph.outputs if o.successor_of is not None}
    values = graph.values
    for operation, is_light in zip(graph.operations, pointwise, strict=True):
        if not is_light and operation.kind is not OperationKind.SCAN_SLICE:
            continue
        is_weight = False
        for o in operation.operands:
            if o is not None and values[o].shape:
                is_weight = o in weights
                if not is_weight:
                    break
        if is_weight:
            weights.update(r for r in operation.results if r is not None)
    return frozenset(weights)


def gradient_values(graph: Graph, pointwise: Sequence[bool]) -> frozenset[int]:
    """Values that reach nothing but the successors of state, through pointwise operations (`pointwise`, as above),
    norms and the stacking of loops.
    """
    values = graph.values
    seen = {o.value for o in graph.outputs if o.successor_of is not None}  # successors, and whatever is read
    waited: set[int] = set()  # read by operations that make more than gradients and norms
    gradients: set[int] = set()

    def read(operation: Operation, passes_on: bool) -> None:
        operands = [o for o in operation.operands if o is not None]
        seen.update(operands)
        if not passes_on and any([r is not None and values[r].shape for r in operation.results]):
            waited.update(operands)

    for operation in graph.operations:
        if operation.kind is OperationKind.LOOP_CARRY:  # reads what is made after it
            read(operation, False)
    for operation in reversed(graph.operations):
        passes_on = pointwise[operation.index] or operation.kind is OperationKind.SCAN_STACK
        for r in operation.results:
            if r is None or not values[r].shape:
                continue
            if r in seen and r not in waited:
                gradients.add(r)
            else:
                passes_on = False
        read(operation, passes_on)
    return frozenset(gradients)


@dataclasses.dataclass(frozen=True, slots=True)
class Joining:
    """How many collectives of weights and gradients the compiler joins, and which sums it reduces together.

    A gradient that is all-reduced finds others to be joined with in every plan. One that is scattered, or a weight that
    is gathered, is sure only of those alike, since a plan treats them alike; the first layer's kernel by itself would
    be joined with nothing.

    Attributes:
      num_reductions: How many gradients are reduced.
      num_alike: For each number of elements, how many of them have it.
      scalar_shares: For each group that sums to a scalar, how much of one latency it pays: of those of gradients that
        the compiler joins first, such as all norms, its share of what is summed; see `_joined_scalars` for the rest. 0
        for others, such as losses, which every plan reduces.
    """

    num_reductions: int
    num_alike: Mapping[int, int]
    scalar_shares: Mapping[int, float]


def joining_of(graph: Graph, groups: Sequence[Group], gradients: Set[int]) -> Joining:
    """What the compiler joins of the collectives of `groups`."""
    values = graph.values
    alike: collections.Counter[int] = collections.Counter()
    scalar_bytes: dict[int, float] = {}
    for g in groups:
        if all(f.reduction is None for f in g.factors):
            continue
        if all(a.value in gradients for a in g.writes):
            alike[math.prod(values[g.writes[-1].value].shape)] += 1
        if all(not values[a.value].shape for a in g.writes):
            scalar_bytes[g.index] = sum(values[a.value].size_bytes for a in g.reads if a.value in gradients)
    shares = dict.fromkeys(scalar_bytes, 0.0)
    runs = _joined_scalars(graph, [groups[g] for g, own_bytes in scalar_bytes.items() if own_bytes > 0])
    for n, run in enumerate(runs):
        run_bytes = sum(scalar_bytes[g] for g in run)
        shares.update({run[0]: 1.0} if n else {g: scalar_bytes[g] / run_bytes for g in run})
    return Joining(
        min(max(alike.total(), 1), MOST_JOINED),
        {size: min(number, MOST_JOINED) for size, number in alike.items()},
        shares,
    )


def _joined_scalars(graph: Graph, sums: Sequence[Group]) -> list[list[int]]:
    """Which of the groups `sums` are reduced by one collective each time: lists of their indices, in order.

    XLA joins them in the order in which a walk from the program's results comes past them, until one is made of one
    that it would be joined with (`CombineInstructionsByKey` in OpenXLA, xla/service/collective_combiner_utils.h). An
    optimizer that clips each update by its own norm has such a pair for every parameter, so that each of these begins a
    collective of its own, and those beside it go along.
    """
    number = {o: n for n, group in enumerate(sums) for o in group.operations}
    made_of = [0] * len(sums)  # of each sum, the others that it depends on, as bits
    reached: dict[int, int] = {}
    for operation in graph.operations:
        bits = 0
        for o in operation.operands:
            bits |= reached.get(o, 0)
        own = number.get(operation.index)
        if own is not None:
            made_of[own] |= bits & ~(1 << own)
            bits |= 1 << own
        if bits:
            reached.update((r, bits) for r in operation.results if r is not None)
    runs: list[list[int]] = []
    joined_bits = 0
    for n in dict.fromkeys(number[o] for o in _post_order(graph) if o in number):
        if not runs or made_of[n] & joined_bits:
            runs.append([])
            joined_bits = 0
        runs[-1].append(sums[n].index)
        joined_bits |= 1 << n
    return runs


def _post_order(graph: Graph) -> Iterator[int]:
    """The operations that the results need, each after those that it needs; operands and results in their order."""
    maker = {r: operation for operation in graph.operations for r in operation.results if r is not None}
    entered: set[int] = set()
    for output in graph.outputs:
        stack = [(maker[output.value], 0)] if output.value in maker else []
        while stack:
            operation, slot = stack.pop()
            if slot == 0:
                if operation.index in entered:
                    continue
                entered.add(operation.index)
            if slot == len(operation.operands):
                yield operation.index
                continue
            stack.append((operation, slot + 1))
            operand = operation.operands[slot]
            if operand in maker:
                stack.append((maker[operand], 0))


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """What counts of the time of a collective.

    Attributes:
      share: The share that counts.
      num_reductions: How many the compiler joins of all-reduces that a gradient is done with; None if none.
      num_alike: How many of any other.
      scalar_share: Of a sum to a scalar, the share of latencies and launch that it pays; None for anything else.
    """

    share: float = 1.0
    num_reductions: int | None = None
    num_alike: int | None = None
    scalar_share: float | None = None

    def counted(
        self, steps: Sequence[Collective], planned: Sequence[Collective] | None = None
    ) -> tuple[Collective, ...]:
        """The collectives `steps` with the time that counts; `planned` are those of the plan, if the compiler changes
        them.
        """
        if self.scalar_share is not None:
            return tuple([_with_fixed(c, self.scalar_share * c.fixed_s) for c in steps])
        is_reduced = all(c.kind is CollectiveKind.ALL_REDUCE for c in planned or steps)
        number = self.num_reductions if is_reduced else self.num_alike
        if number is None:
            return tuple(steps)
        parts = [joined(c, number) for c in steps]
        return tuple([dataclasses.replace(c, time_s=self.share * c.time_s) for c in parts])


def _with_fixed(collective: Collective, fixed_s: float) -> Collective:
    """The collective with other latencies and launches."""
    return dataclasses.replace(collective, time_s=collective.time_s - collective.fixed_s + fixed_s, fixed_s=fixed_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Exposure:
    """Which share of a collective's time is waited for, and which collectives are joined.

    Attributes:
      share: The share that counts for collectives that nobody waits for.
      weights, gradients: The values whose collectives nobody waits for.
      joining: How many of those the compiler joins.
    """

    share: float
    weights: frozenset[int]
    gradients: frozenset[int]
    joining: Joining

    def of_flow(self, value: int, shape: Sequence[int]) -> Terms:
        """What counts when `value`, of `shape`, is resharded."""
        if value not in self.weights and value not in self.gradients:
            return Terms()
        return self._free(math.prod(shape))

    def of_group(self, group: Group, shape: Sequence[int]) -> Terms:
        """What counts when the results of `group` are reduced; `shape` is that of the last."""
        scalar_share = self.joining.scalar_shares.get(group.index)
        if scalar_share is not None:
            return Terms(scalar_share=scalar_share)
        if not all(a.value in self.gradients for a in group.writes):
            return Terms()
        return self._free(math.prod(shape))

    def _free(self, num_elements: int) -> Terms:
        return Terms(self.share, self.joining.num_reductions, self.joining.num_alike.get(num_elements, 1))

"""Which collectives nobody waits for: those can be joined, and can hide behind computation.

Weights are known before the layer that needs them runs, and a gradient is not needed until the update. Both transfers
are joined with others of their kind by the compiler (`cost/collectives.py`, `joined`), and can run beside the
computation of other layers. One model of the latter, tunable by one number: such a collective is exposed for
`(1 - overlap)` of its time. Everything between activations is waited for, and counts in full.
"""

import dataclasses
from collections.abc import Sequence

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


def num_joined(groups: Sequence[Group], gradients: frozenset[int]) -> int:
    """How many gradient reductions the compiler may join: all that the program has, up to `MOST_JOINED`."""
    reducing = sum(
        any(f.reduction is not None for f in g.factors) and all(a.value in gradients for a in g.writes) for g in groups
    )
    return min(max(reducing, 1), MOST_JOINED)


@dataclasses.dataclass(frozen=True, slots=True)
class Exposure:
    """Which share of a collective's time is waited for, and which collectives are joined.

    Attributes:
      share: The share that counts for collectives that nobody waits for.
      weights, gradients: The values whose collectives nobody waits for.
      num_joined: How many of those the compiler joins at most.
    """

    share: float
    weights: frozenset[int]
    gradients: frozenset[int]
    num_joined: int

    def is_flow_free(self, value: int) -> bool:
        """Whether nobody waits when `value` is resharded."""
        return value in self.weights or value in self.gradients

    def is_group_free(self, group: Group) -> bool:
        """Whether nobody waits when the results of `group` are reduced."""
        return all(a.value in self.gradients for a in group.writes)

    def exposed(self, collective: Collective, is_free: bool) -> Collective:
        """The collective with the time that counts."""
        if not is_free:
            return collective
        part = joined(collective, self.num_joined)
        return dataclasses.replace(part, time_s=self.share * part.time_s)

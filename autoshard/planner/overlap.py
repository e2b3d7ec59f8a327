"""Which collectives can hide behind computation.

Weights are known before the layer that needs them runs, and a gradient is not needed until the update: both transfers
can run beside the computation of other layers. One model, tunable by one number: such a collective is exposed for
`(1 - overlap)` of its time. Everything between activations is waited for, and counts in full.
"""

import collections
import dataclasses

from autoshard.graph.graph import Graph
from autoshard.graph.groups import Group, is_pointwise


def weight_values(graph: Graph) -> frozenset[int]:
    """State arguments, and what pointwise operations make of them alone."""
    weights = {graph.arguments[o.successor_of].value for o in graph.outputs if o.successor_of is not None}
    for operation in graph.operations:
        operands = [o for o in operation.operands if o is not None and graph.values[o].shape]
        if is_pointwise(operation) and operands and all(o in weights for o in operands):
            weights.update(r for r in operation.results if r is not None)
    return frozenset(weights)


def gradient_values(graph: Graph) -> frozenset[int]:
    """Values that reach nothing but the successors of state, through pointwise operations and norms."""
    consumers = collections.defaultdict(list)
    for operation in graph.operations:
        for o in operation.operands:
            if o is not None:
                consumers[o].append(operation)
    successors = {o.value for o in graph.outputs if o.successor_of is not None}
    gradients: set[int] = set()
    for operation in reversed(graph.operations):
        for r in operation.results:
            if r is None or not graph.values[r].shape:
                continue
            if (r in successors or consumers[r]) and all(
                (is_pointwise(c) and all(x is None or x in gradients or not graph.values[x].shape for x in c.results))
                or all(x is None or not graph.values[x].shape for x in c.results)
                for c in consumers[r]
            ):
                gradients.add(r)
    return frozenset(gradients)


@dataclasses.dataclass(frozen=True, slots=True)
class Exposure:
    """Which share of a collective's time is waited for.

    Attributes:
      share: The share that counts for collectives that can hide.
      weights, gradients: The values whose collectives can hide; empty where nothing is to be hidden.
    """

    share: float
    weights: frozenset[int]
    gradients: frozenset[int]

    def of_flow(self, value: int) -> float:
        """The share that counts when `value` is resharded."""
        return self.share if value in self.weights or value in self.gradients else 1.0

    def of_group(self, group: Group) -> float:
        """The share that counts when the results of `group` are reduced."""
        return self.share if all(a.value in self.gradients for a in group.writes) else 1.0


def exposure_of(graph: Graph, overlap: float) -> Exposure:
    """The exposure of `graph`'s collectives when a share `overlap` of those that can hide does."""
    if not overlap:
        return Exposure(1.0, frozenset(), frozenset())
    return Exposure(1.0 - overlap, weight_values(graph), gradient_values(graph))

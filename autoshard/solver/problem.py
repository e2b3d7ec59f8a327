"""The solver's input and output: a choice problem with pairwise costs and a capacity at every instant.

    minimise    sum_i cost_i(x_i)  +  sum_(i,j) cost_ij(class_i(x_i), class_j(x_j))
    subject to  for every instant t:
                sum_{usages live at t} amount(x)  +  sum_{edge usages live at t} amount(x_i, x_j)  <=  capacity

Each node i takes one choice x_i. An edge sees a choice only through its *class* (the layout that the choice gives to
the tensor on that edge), which keeps edge tables small. Costs are finite, or +inf for forbidden. This room knows
nothing of JAX, tensors or meshes.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One decision.

    Attributes:
      name: For messages.
      costs: float64 [K]; cost of each choice, +inf if forbidden.
    """

    name: str
    costs: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """A pairwise cost between two nodes.

    Attributes:
      source, target: Node indices, different. Several edges may join the same two nodes.
      source_class: intp [K_source] in 0..C_source-1. target_class: intp [K_target] in 0..C_target-1.
      costs: float64 [C_source, C_target]; +inf if forbidden. Arrays may be shared between edges (same object).
    """

    source: int
    target: int
    source_class: np.ndarray
    target_class: np.ndarray
    costs: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Capacity taken by a node during `start <= t < stop`: `amounts` float64 [K], non-negative."""

    node: int
    start: int
    stop: int
    amounts: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class EdgeUsage:
    """Capacity taken by an edge during `start <= t < stop`: `amounts` float64 [C_source, C_target], non-negative."""

    edge: int
    start: int
    stop: int
    amounts: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """The whole problem. `capacity` is None where nothing limits usage."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    usages: tuple[Usage, ...] = ()
    edge_usages: tuple[EdgeUsage, ...] = ()
    capacity: float | None = None


class Status(enum.Enum):
    """What the solver can vouch for."""

    OPTIMAL = "optimal"  # the objective is within the requested gap of the proven bound
    FEASIBLE = "feasible"  # a solution, stopped at a limit before the gap was closed
    INFEASIBLE = "infeasible"  # proven that no solution exists
    UNKNOWN = "unknown"  # nothing found before the limit


@dataclasses.dataclass(frozen=True, slots=True)
class CapacityPrice:
    """What more capacity could gain: with d more units at every instant, no solution costs less than `bound_with(d)`.

    Prices p_t >= 0 on the capacity prove the Lagrangian bound min over x of (cost + sum_t p_t usage_t) - sum_t p_t C.
    The minimum does not depend on the capacity C, so d more units lower the bound by d times the sum of the prices.
    (Everett, Generalized Lagrange multiplier method, Operations Research 11, 1963.)

    Attributes:
      bound: The bound that the prices prove at the capacity as it is.
      per_unit: Sum of the prices: cost per unit of capacity. To first order, what one more unit gains.
    """

    bound: float
    per_unit: float

    def bound_with(self, extra: float) -> float:
        """Lower bound on the cost of every solution with `extra` >= 0 more capacity."""
        return self.bound - self.per_unit * extra


@dataclasses.dataclass(frozen=True, slots=True)
class Certificate:
    """How good a solution is known to be.

    Attributes:
      status: See `Status`.
      objective: Cost of the solution; +inf if there is none.
      bound: Proven lower bound on the cost of every solution of the problem without ties.
      gap: (objective - bound) / |objective|; 0 when both are 0; +inf without a solution.
      solve_s: Wall-clock time.
      capacity_price: What more capacity could gain; None where no prices were found.
    """

    status: Status
    objective: float
    bound: float
    gap: float
    solve_s: float
    capacity_price: CapacityPrice | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Relaxed:
    """What a bound leaves behind.

    Attributes:
      choices: Some vectors of choices that are best, or nearly, at the prices; they may exceed the capacity. Where the
        best do, one that fits may be among them, which is best where capacity is dearer.
      prices: Of instants that bind, per unit of capacity.
    """

    choices: tuple[tuple[int, ...], ...]
    prices: Mapping[int, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Solution:
    """What was found.

    Attributes:
      choices: One per node; None without a solution.
      certificate: See `Certificate`.
      relaxed: What came with the bound, where that was all that was asked for.
    """

    choices: tuple[int, ...] | None
    certificate: Certificate
    relaxed: Relaxed | None = None

    @property
    def chosen(self) -> tuple[int, ...]:
        """The choices, of which there must be some."""
        assert self.choices is not None, self.certificate.status
        return self.choices


def relative_gap(objective: float, bound: float) -> float:
    """(objective - bound) / |objective|; 0 where the bound reaches the objective; +inf without either."""
    if math.isinf(objective) or math.isinf(bound):
        return math.inf
    if bound >= objective:
        return 0.0
    return math.inf if objective == 0 else (objective - bound) / abs(objective)

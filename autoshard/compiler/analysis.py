"""What XLA makes of a program whatever the mesh: found once, for all meshes, choices and estimates."""

import dataclasses
from collections.abc import Mapping

from autoshard.compiler.collective_combiner import CombinedCollectives, combined_collectives
from autoshard.compiler.collective_dtypes import moved_itemsizes, rounding_operations
from autoshard.compiler.def_use import DefUse, def_use
from autoshard.compiler.early_products import EarlyProduct, awaited_sums, early_products
from autoshard.compiler.live_ranges import LiveRanges, live_ranges
from autoshard.compiler.read_in_turn import summed_in_turn
from autoshard.compiler.reduce_scatter_combiner import reduce_scatter_order
from autoshard.graph.computations import Computation, all_computations, entry_computation
from autoshard.graph.graph import Graph
from autoshard.graph.groups import Group, group_operations
from autoshard.graph.pointwise import pointwise_operations
from autoshard.graph.state import accumulated_gradients, awaited_scalar, gradient_values, weight_values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAnalysis:
    """A program as its compiler sees it before anything is split.

    Attributes:
      graph: The graph. entry: Its entry computation. groups: Its groups.
      kernel_of: For each group, the operation in whose place its kernels run: its first heavy one, or its last.
      chains: Its def-use chains. live: When its values are alive.
      weights, gradients: The values whose collectives nobody waits for (`graph/state.py`).
      accumulated: The gradients, and those that loops add up; where latency is hidden, nobody waits for these either.
      gradients_until: The operation before which all gradients are reduced that are made before it.
      combined: How many collectives of those are combined into one.
      reduce_scatter_order: The groups that sum to gradients, in the order in which they are combined.
      moved_itemsizes: For each value, the bytes of an element as it is moved.
      rounding: The operations that need what they read no more precisely than products do.
      early_products: Those that could be made before the next product that reads one of their operands, by operation.
      awaited_sums: The products whose sums are waited for; see `early_products.py`.
      adds_apart: Whether all of `live.added_reductions` are kernels of their own where collectives run behind kernels,
        since products wait for them (`read_in_turn.py`).
    """

    graph: Graph
    entry: Computation
    groups: tuple[Group, ...]
    kernel_of: tuple[int, ...]
    chains: DefUse
    live: LiveRanges
    weights: frozenset[int]
    gradients: frozenset[int]
    accumulated: frozenset[int]
    gradients_until: int
    combined: CombinedCollectives
    reduce_scatter_order: tuple[int, ...]
    moved_itemsizes: tuple[int, ...]
    rounding: frozenset[int]
    early_products: Mapping[int, EarlyProduct]
    awaited_sums: Mapping[int, int]
    adds_apart: bool


def analyse(graph: Graph) -> ProgramAnalysis:
    """Groups the operations of `graph`, and finds what XLA makes of them on any mesh."""
    entry = entry_computation(graph)
    early = [product for computation in all_computations(entry) for product in early_products(computation)]
    groups, pointwise, chains = group_operations(graph), pointwise_operations(graph), def_use(graph)
    weights, gradients = weight_values(graph, pointwise), gradient_values(graph, pointwise)
    live = live_ranges(chains, pointwise, weights, gradients)
    return ProgramAnalysis(
        graph=graph,
        entry=entry,
        groups=groups,
        kernel_of=tuple(_kernel(graph, group) for group in groups),
        chains=chains,
        live=live,
        weights=weights,
        gradients=gradients,
        accumulated=accumulated_gradients(graph, pointwise),
        gradients_until=awaited_scalar(graph, gradients),
        combined=combined_collectives(chains, groups, gradients, weights),
        reduce_scatter_order=reduce_scatter_order(chains, groups, gradients),
        moved_itemsizes=moved_itemsizes(graph),
        rounding=rounding_operations(graph),
        early_products={product.instruction.leaf.index: product for product in early},
        awaited_sums=awaited_sums(graph, early),
        adds_apart=_adds_apart(graph, entry, live),
    )


def _adds_apart(graph: Graph, entry: Computation, live: LiveRanges) -> bool:
    """See `ProgramAnalysis`."""
    factors = {o: graph.operations[o].rule.factors for o in live.added_reductions}
    sums = [o for o, own in factors.items() if any(f.reduction and f.size > 1 for f in own)]  # others only give a shape
    return bool(sums) and summed_in_turn(graph, entry).issuperset(sums)


def _kernel(graph: Graph, group: Group) -> int:
    return next((o for o in group.operations if graph.operations[o].rule.is_heavy), group.operations[-1])

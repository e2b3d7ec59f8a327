"""Which gathered copies execution ties to what is read with them, so that they are not made before (`Evaluator`)."""

import collections
from collections.abc import Iterable, Mapping, Sequence

from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.graph.layout import Layout, shard_bytes


def tied_copies(
    analysis: ProgramAnalysis,
    mesh_shape: Sequence[int],
    layouts: Mapping[int, Layout],
    gathers: Iterable[tuple[int, int, Layout]],
) -> list[tuple[int, int]]:
    """(operation, slot) of each operand whose copy is tied to the other operands.

    Those are weights that are read once in a region, and everything that is gathered a second time for a later region
    (the compiler would else make one copy and keep it). But the compiler fuses nothing across the barrier that ties
    them: other operands that it would compute inside their reader are then stored, such as all activations of a layer
    in float32 for the sake of a layer norm's scale. A copy is not tied where they would take more memory than it.

    Args:
      analysis: The program. mesh_shape: The size of each mesh axis.
      layouts: The layout of each value where it is defined.
      gathers: (operation, slot, layout) of each operand that is gathered for its reader.
    """
    graph, regions, unstored = analysis.graph, analysis.live.region, _unstored(analysis)
    uses = collections.Counter((v, regions[o.index]) for o in graph.operations for v in o.operands)
    bytes_in = lambda value, layout: shard_bytes(float(graph.values[value].size_bytes), layout, mesh_shape)
    made: dict[tuple[int, Layout], int] = {}  # copy -> region of its latest making
    tied = []
    for index, slot, layout in sorted(gathers):
        operation, region = graph.operations[index], regions[index]
        value = operation.operand(slot)
        before = made.get((value, layout))
        is_early = before is None and value in analysis.weights and uses[value, region] == 1
        if is_early or before not in (None, region):
            others = [v for k, v in enumerate(operation.operands) if k != slot and v in unstored and v in layouts]
            if sum([bytes_in(v, layouts[v]) for v in others]) <= bytes_in(value, layout):
                tied.append((index, slot))
        made[value, layout] = region
    return tied


def _unstored(analysis: ProgramAnalysis) -> frozenset[int]:
    """The values that the compiler computes inside their readers."""
    stored, names = analysis.live.stored, analysis.live.alias_stop
    found: set[int] = set()
    for operation in analysis.graph.operations:
        for value in operation.results:
            is_name = value in names and not any([o in found for o in operation.operands])
            if value is not None and value not in stored and not is_name:
                found.add(value)
    return frozenset(found)

"""Parts of a value that execution stores, so that the whole one is gone."""

from collections.abc import Sequence

from autoshard.compiler.aliasing import is_alias
from autoshard.compiler.def_use import DefUse
from autoshard.compiler.live_range import LARGE_BYTES
from autoshard.graph.graph import Operation, OperationKind

_NEAR = 4
"""How many heavy kernels apart two readers may be for which nothing is stored: a choice."""


def stored_parts(chains: DefUse, can_fuse: Sequence[int]) -> frozenset[int]:
    """The results of splits that are stored, all of a split behind one barrier.

    XLA:GPU computes a slice inside its readers, whatever else that keeps (`PriorityFusion` counts the bytes that a
    kernel moves, and a slice moves no more than its own): the gradient of what was concatenated is there whole until
    the part that a U-Net skipped has been added, behind the gradients of all that lies between. Of queries, keys and
    values from one product it keeps the whole product for the backward pass, beside the keys, which it turns. Stored
    are the parts of a large value if one is needed long after another, or long after the split and a product reads one;
    and if what they are made of, which is at least as large, is then gone. All together, since a part that is read late
    would be taken late, and have the whole value wait.

    Args:
      chains: The graph. can_fuse: For each value, whether its readers can compute it.
    """
    splits = [o for o in chains.graph.operations if _is_large_split(chains, o)]
    if not splits:
        return frozenset()
    last = _last_regions(chains, can_fuse)
    until: dict[int, int] = {}  # of each split whose parts may be stored, the last region in which one is needed
    apart = bytearray(can_fuse)
    for operation in splits:
        parts = _parts(operation)
        is_read_by_product = not all([can_fuse[r] for r in parts])
        first = chains.region[operation.index] if is_read_by_product else min(last[r] for r in parts)
        latest = max(last[r] for r in parts)
        if latest - first > _NEAR:
            until[operation.index] = latest
            for r in parts:
                apart[r] = False
    last, found = _last_regions(chains, apart), set[int]()
    for index, latest in until.items():
        operation = chains.graph.operations[index]
        gone = [v for v in _made_of(chains, operation.operand(0), can_fuse) if last[v] < latest - _NEAR]
        size_bytes = chains.graph.values[operation.operand(0)].size_bytes
        if sum(chains.graph.values[v].size_bytes for v in gone) >= size_bytes:
            found.update(_parts(operation))
    return frozenset(found)


def _is_large_split(chains: DefUse, operation: Operation) -> bool:
    """Whether a large value is split into parts, two of which are read at least."""
    return len(_parts(operation)) > 1 and chains.graph.values[operation.operand(0)].size_bytes >= LARGE_BYTES


def _parts(operation: Operation) -> list[int]:
    """The results of a split that anything reads; none of any other operation."""
    is_split = operation.name == "split" and operation.kind is OperationKind.EQUATION
    return [r for r in operation.results if r is not None] if is_split else []


def _last_regions(chains: DefUse, can_fuse: Sequence[int]) -> list[int]:
    """For each value, the last region in which it is needed, also under another name, if all that can be computed by
    its readers is."""
    last = [0] * len(chains.graph.values)
    for operation in reversed(chains.graph.operations):
        for value in operation.results:
            if value is None:
                continue
            for c, _ in chains.consumers[value]:
                inner = [r for r in c.results if r is not None and c.index > operation.index]
                needed = [last[r] for r in inner if can_fuse[r] or is_alias(c)]
                last[value] = max(last[value], *(needed or [chains.region[c.index]]))
    return last


def _made_of(chains: DefUse, value: int, can_fuse: Sequence[int]) -> set[int]:
    """What an operation stores that a value is made of or another name of, and the program does not return."""
    found: set[int] = set()
    ahead, seen = [value], set[int]()
    while ahead:
        value = ahead.pop()
        made = chains.producer[value]
        if value in seen or made is None:
            continue
        seen.add(value)
        if can_fuse[value] or is_alias(made):
            ahead += [o for o in made.operands if o is not None]
        elif value not in chains.outputs:
            found.add(value)
    return found

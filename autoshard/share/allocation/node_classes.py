"""Nodes that are alike for the decision: of one group and size, with the same jobs on them."""

import collections
import dataclasses
from collections.abc import Sequence

from autoshard.share.allocation.problem import AllocationProblem


@dataclasses.dataclass(frozen=True, slots=True)
class NodeClass:
    """Nodes that are alike.

    Attributes:
        group: of the nodes.
        num_devices: of each node.
        nodes: their numbers.
        occupants: jobs that have devices on each of these nodes, with how many; jobs by their number in the problem.
    """

    group: str
    num_devices: int
    nodes: tuple[int, ...]
    occupants: tuple[tuple[int, int], ...]


def node_classes(problem: AllocationProblem) -> tuple[NodeClass, ...]:
    """The nodes of a problem in classes.

    Occupied nodes of one class are all free together, or all kept: so a class of several nodes has at most one
    occupant, which fills them. All other occupied nodes are classes of their own.
    """
    occupants: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    for number, job in enumerate(problem.jobs):
        if job.placement is not None and any(choice.is_kept for choice in job.choices):
            for taken in job.placement.taken:
                occupants[taken.node].append((number, taken.num_devices))
    members: dict[tuple[str, int, tuple[tuple[int, int], ...], int], list[int]] = collections.defaultdict(list)
    for node in problem.nodes:
        own = tuple(occupants[node.number])
        is_whole = not own or (len(own) == 1 and own[0][1] == node.num_devices)
        members[node.group, node.num_devices, own, -1 if is_whole else node.number].append(node.number)
    return tuple(NodeClass(group, size, tuple(n), own) for (group, size, own, _), n in members.items())


def packs_by_sum(num_devices: int, sizes: Sequence[int]) -> bool:
    """Whether parts fit on several nodes whenever their sum does: each size divides the next, the last one the node.

    Largest first, every part then falls on a multiple of its own size, and none crosses a node.
    """
    chain = [*sorted(set(sizes)), num_devices]
    return all(larger % smaller == 0 for smaller, larger in zip(chain, chain[1:], strict=False))


def patterns(num_devices: int, sizes: Sequence[int]) -> tuple[dict[int, int], ...]:
    """All ways to fill a node with parts of these sizes to which no further part can be added."""
    found: list[dict[int, int]] = []

    def extend(left: int, at: int, pattern: dict[int, int]) -> None:
        if at == len(order):
            if left < order[-1]:
                found.append(pattern)
            return
        size = order[at]
        for count in range(left // size, -1, -1):
            extend(left - count * size, at + 1, {**pattern, size: count} if count else pattern)

    order = sorted(set(sizes), reverse=True)
    if order:
        extend(num_devices, 0, {})
    return tuple(found)

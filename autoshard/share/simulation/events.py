"""What happens to a simulated cluster from outside."""

import dataclasses
import random
from collections.abc import Sequence

from autoshard.share.pool import Node


@dataclasses.dataclass(frozen=True, slots=True)
class NodeFailure:
    """A node that is gone for a while."""

    node: int
    fails_s: float
    repaired_s: float


def random_failures(
    nodes: Sequence[Node], mean_between_s: float, repair_s: float, until_s: float, seed: int
) -> tuple[NodeFailure, ...]:
    """Failures at exponential times, the same for every policy.

    Args:
        nodes: each fails on its own.
        mean_between_s: mean time from a repair of a node to its next failure.
        repair_s: time until it is there again.
        until_s: none later than this.
        seed: of the times.
    """
    draw, found = random.Random(seed), []
    for node in nodes:
        time_s = draw.expovariate(1.0 / mean_between_s)
        while time_s < until_s:
            found.append(NodeFailure(node.number, time_s, time_s + repair_s))
            time_s += repair_s + draw.expovariate(1.0 / mean_between_s)
    return tuple(sorted(found, key=lambda one: one.fails_s))

"""Collectives that run inside fusions: XLA:TPU puts one that is asynchronous into every fusion that it runs beside.

A fusion of its own begins it, each fusion that follows carries it on beside what it computes, and another fusion ends
it; all are told by one channel. A collective in a single fusion, such as a sum that is sliced at once, runs beside
nothing.
"""

import dataclasses
from collections.abc import Container, Mapping

from autoshard.hlo.collectives import channel_of
from autoshard.hlo.module import Computation, HloModule


@dataclasses.dataclass(frozen=True, slots=True)
class Carried:
    """A collective in a fusion.

    Attributes:
      name: Of the collective, as in `compiled_collectives`: that of its first appearance.
      begins: Whether the fusion is the first that has it. ends: Whether it is the last.
    """

    name: str
    begins: bool
    ends: bool


def carried_collectives(
    module: HloModule, computation: Computation, known: Container[str]
) -> Mapping[str, tuple[Carried, ...]]:
    """What the fusions of a computation carry, by the name of the fusion; those that carry nothing are left out.

    `known`: Names of the collectives, as in `compiled_collectives`.
    """
    first: dict[str, tuple[str, str]] = {}  # by channel: the collective, and the fusion that begins it
    last: dict[str, str] = {}
    found: dict[str, list[str]] = {}
    for fusion in computation.instructions.values():
        if fusion.opcode != "fusion":
            continue
        for inner in module.computations[fusion.called[0]].instructions.values():
            channel = channel_of(inner)
            if not channel or channel not in first and inner.name not in known:
                continue
            first.setdefault(channel, (inner.name, fusion.name))
            last[channel] = fusion.name
            found.setdefault(fusion.name, []).append(channel)
    return {
        fusion: tuple(Carried(first[c][0], first[c][1] == fusion, last[c] == fusion) for c in channels)
        for fusion, channels in found.items()
    }

"""What a plan's collectives are where they run on CPUs.

XLA:CPU turns a reduce-scatter whose dimension is not the first into a slow one, so that execution writes an all-reduce
and a slice there (`execution/by_shards.py`), and XLA:CPU has no pass that makes a reduce-scatter of the two again.
"""

import dataclasses
from collections.abc import Iterable

from autoshard.cost.collectives import CollectiveKind
from autoshard.planner.estimate import CommunicationItem


def on_cpus(items: Iterable[CommunicationItem]) -> tuple[CommunicationItem, ...]:
    """`items` with each reduce-scatter as an all-reduce, which sends twice as much: the ring gathers what it sums."""
    return tuple(
        dataclasses.replace(item, kind=CollectiveKind.ALL_REDUCE.value, wire_bytes=2 * item.wire_bytes)
        if item.kind == CollectiveKind.REDUCE_SCATTER.value
        else item
        for item in items
    )

"""How many of its layers a submesh computes again, at least, so that it fits its memory; whatever the cut.

Let a submesh have v stages, each of 1 to w layers, and n layers of the main kind, y of them in stages that are computed
again. Before its first backward task it holds h[c] micro-batches of its stage c, which follows from the order of the
tasks alone (`schedule/orders.py`): min(M, P - p) under 1F1B and ZB-H1, M under GPipe, and of interleaved stages as many
as its first (v - 1) G + 2 (P - p - 1) + 1 forward tasks have passed, in groups of G. Then it needs at least

    n fixed + working + sum over stages c of h[c] max(least[c], residual[c] x[c])

with x[c] main layers as they are, y = n - sum over c of x[c]. Here `fixed` is what a layer keeps (weights, gradients,
its part of the optimizer's state), residual[c] the least of any main layer that could be on the stage, and least[c] the
least of what any of its layers has as inputs or residuals: a stage that is computed again holds the inputs of its first
layer. So of two layers on a stage, the second costs h[c] residual[c] more, and the first h[c] (residual[c] - least[c]);
a stage that is computed again has no x[c]. With q stages computed again, y is at most q w, and v - q stages are left
for the others: taking the cheapest places first gives the most layers that stay as they are, and so the least y for
each n.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from autoshard.pipelines.cost.table import LayerCost
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.candidate import Candidate
from autoshard.pipelines.search.replica_group import SearchContext
from autoshard.pipelines.search.stage_memory import TOLERANCE


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _LayerBytes:
    """What each layer needs on one mesh option: arrays [layers].

    Attributes:
      kept_bytes: Weights and gradients that it shares with no layer. state_bytes: Optimizer state, of one replica.
      residual_bytes, working_bytes: As in `LayerCost`. held_bytes: The less of its inputs and its residuals.
    """

    kept_bytes: np.ndarray
    state_bytes: np.ndarray
    residual_bytes: np.ndarray
    working_bytes: np.ndarray
    held_bytes: np.ndarray


class MemoryBounds:
    """The bounds of a search, which keeps the bytes of its layers."""

    def __init__(self, context: SearchContext):
        self.context = context
        self._bytes = functools.cache(self._layer_bytes)

    def least_again(self, candidate: Candidate, main: np.ndarray, num_owners: int, number: int) -> np.ndarray:
        """[submeshes, n]: layers computed again, at least, where a submesh has n of the main ones; inf if none fit.

        Args:
          candidate: What runs where; every option has all layers.
          main: The layers that are counted. num_owners: Replicas that share the optimizer's state, at most.
          number: Micro-batches of a pipeline.
        """
        context, size, chunks = self.context, candidate.micro_batch_size, candidate.chunks
        parts = [self._bytes(o, size) for o in candidate.options]
        part = np.repeat(np.arange(len(parts)), candidate.counts)
        num_layers, num_submeshes = context.intervals.layers.num_layers, len(part)
        width = num_layers - candidate.num_stages + 1  # layers of a stage, at most
        ns = np.arange(min(len(main), chunks * width) + 1)
        slices = [context.topology.table.options[o].slice for o in candidate.options]
        room = np.array([context.limits_bytes[s] for s in slices])[part] * (1 + TOLERANCE)
        each = np.array([(b.kept_bytes + b.state_bytes / num_owners)[main].min() for b in parts])[part]
        stages = np.arange(candidate.num_stages)

        def of_stages(rows: list[np.ndarray]) -> np.ndarray:
            """[submeshes, stages of each]: the least of what the layers have that could be on a stage."""
            least = np.lib.stride_tricks.sliding_window_view(np.array(rows), width, axis=1).min(axis=2)
            return least[np.tile(part, chunks), stages].reshape(chunks, num_submeshes).T

        is_main = np.isin(np.arange(num_layers), main)
        residual = of_stages([np.where(is_main, b.residual_bytes, np.inf) for b in parts])
        least = of_stages([b.held_bytes for b in parts])
        least[0, 0] = parts[0].held_bytes[0]
        room -= of_stages([b.working_bytes for b in parts])[:, -1]
        for submesh, layer in {(0, 0), (num_submeshes - 1, num_layers - 1)}:
            if layer not in main:
                own = parts[part[submesh]]
                room[submesh] -= own.kept_bytes[layer] + own.state_bytes[layer] / num_owners
        held = held_micro_batches(candidate.schedule, num_submeshes, chunks, number)
        room = (room - (held * least).sum(axis=1))[:, None] - each[:, None] * ns
        firsts, others = np.sort(held * np.maximum(0.0, residual - least), axis=1), np.sort(held * residual, axis=1)
        found = np.full((num_submeshes, len(ns)), np.inf)
        for again in range(chunks + 1):
            is_open = np.isinf(found) & (room >= 0)
            if not is_open.any():
                break
            left = chunks - again
            places = np.concatenate([firsts[:, :left], np.repeat(others[:, :left], width - 1, axis=1)], axis=1)
            needed = np.cumsum(np.sort(places, axis=1)[:, : ns[-1]], axis=1)
            as_they_are = np.stack([np.searchsorted(n, r, side="right") for n, r in zip(needed, room, strict=True)])
            more = np.maximum(0, ns - as_they_are)
            found = np.where(is_open & (more <= again * width), more, found)
        return np.maximum.accumulate(found, axis=1)

    def kept_bytes(self, option: int, size: int) -> np.ndarray:
        """[layers]: weights and gradients on one device that a layer shares with no other."""
        return self._bytes(option, size).kept_bytes

    def _layer_bytes(self, option: int, size: int) -> _LayerBytes:
        intervals = self.context.intervals
        costs = [c for c in intervals.layer_costs(option, size) if c is not None]
        runs = intervals.costs(option, size)
        at = np.arange(len(costs)), np.arange(1, len(costs) + 1)
        kept = np.array([_unshared(c, self._tied_bytes(l)) for l, c in enumerate(costs)])
        return _LayerBytes(
            kept_bytes=kept,
            state_bytes=runs.optimizer_bytes[at],
            residual_bytes=np.array([c.residual_bytes for c in costs]),
            working_bytes=np.array([c.working_bytes for c in costs]),
            held_bytes=np.array([min(c.input_bytes, c.residual_bytes) for c in costs]),
        )

    def _tied_bytes(self, layer: int) -> float:
        """Bytes of a layer's weights that an earlier one reads too, which may be in the same stage."""
        return sum(s.size_bytes for s in self.context.intervals.layers.shared_weights if layer in s.readers[1:])


def replicas_with_room(context: SearchContext, index: int, sizes: Sequence[int]) -> int:
    """How many replicas of the model a slice has room for at most, each with its weights and gradients alone."""
    bounds, table, part = MemoryBounds(context), context.topology.table, context.topology.slices[index]
    needed = [
        x.num_devices * bounds.kept_bytes(option, size)
        for option, x in enumerate(table.options)
        for size in sizes
        if x.slice == index and None not in context.intervals.layer_costs(option, size)
    ]
    least_bytes = float(np.min(needed, axis=0).sum()) if needed else math.inf
    most_bytes = part.num_devices * context.limits_bytes[index] * (1 + TOLERANCE)
    return part.num_devices if least_bytes <= 0 else min(part.num_devices, int(most_bytes / least_bytes))


def _unshared(cost: LayerCost, tied_bytes: float) -> float:
    total = cost.weight_total_bytes
    return (cost.weight_bytes + cost.gradient_bytes) * (max(0.0, 1 - tied_bytes / total) if total else 1.0)


def held_micro_batches(kind: ScheduleKind, num_submeshes: int, chunks: int, number: int) -> np.ndarray:
    """[submeshes, stages of each]: micro-batches held when a submesh begins its first backward task."""
    place = np.arange(num_submeshes)
    if kind is ScheduleKind.GPIPE:
        return np.full((num_submeshes, 1), number)
    if chunks == 1:
        return np.minimum(number, num_submeshes - place)[:, None]
    num_groups = max(1, number // num_submeshes)
    size, rest = divmod(number, num_groups)
    left = 2 * (num_submeshes - place - 1) + (chunks - 1) * (size + (rest > 0)) + 1
    found = np.zeros((num_submeshes, chunks), dtype=int)
    for group in range(num_groups):
        here = size + (group < rest)
        found += np.clip(left[:, None] - np.arange(chunks) * here, 0, here)
        left = left - chunks * here
        if (left <= 0).all():
            break
    return found

"""Why no arrangement was found, and what would help."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autoshard.pipelines.search.alternative import Alternative
from autoshard.pipelines.search.options import StageOptions
from autoshard.pipelines.search.replica_group import SearchContext
from autoshard.pipelines.search.slice_sequences import search_sequence, slice_sequences
from autoshard.pipelines.search.stage_memory import InFlight, run_peak_bytes

MOST_MEMORY = 1e4
"""Times as much memory as there is; if that does not suffice, something else is wrong."""


def why_infeasible(
    context: SearchContext,
    batch_size: int,
    options: StageOptions,
    sizes: Sequence[int],
    considered: Sequence[Alternative],
) -> str:
    """What stands in the way of any arrangement, in a sentence that ends with what to do."""
    step = math.gcd(*sizes)
    if batch_size % step:
        return (
            f"The shares of all pipelines must add up to the batch, in whole micro-batches; a batch of {batch_size} "
            f"examples cannot be made of micro-batches of {', '.join(map(str, sizes))}. Choose a multiple of {step}, "
            "or allow other sizes of micro-batches."
        )
    small = [(i, least_peak_bytes(context, i, sizes)) for i in range(len(context.topology.slices))]
    reasons = [_too_small(context, i, least) for i, least in small if least > context.limits_bytes[i]]
    if reasons:
        return (
            f"Each stage must fit the memory of its devices: {'; '.join(reasons)}. Take devices with more memory, "
            "smaller micro-batches, or meshes of more devices."
        )
    tried = "; ".join(f"{c.description}: {c.reason}" for c in considered)
    factor = _enough(context, batch_size, options, sizes)
    if factor is None:
        return (
            f"No arrangement of {batch_size} examples is possible with what is fixed ({_fixed(options, sizes)}), "
            "however much memory there is: the micro-batches of all pipelines must make up the batch, and every "
            "pipeline needs submeshes for its stages. Leave something out."
        )
    needed = ", ".join(
        f"{limit * factor / 1e9:.3g} GB instead of {limit / 1e9:.3g} GB on {part.name!r}"
        for part, limit in zip(context.topology.slices, context.limits_bytes, strict=True)
    )
    return (
        f"The stages of a pipeline must fit the memory of their devices, and no arrangement does: {tried}. If each "
        f"device could hold {factor:.3g} times as much, {needed}, one would. Take more devices, smaller micro-batches, "
        "or meshes of more devices."
    )


def memory_reason(context: SearchContext, sequence: Sequence[int], sizes: Sequence[int]) -> str:
    """Why no candidate of a sequence fits: the slice that is too small for any stage, if one is."""
    for index in sequence:
        least = least_peak_bytes(context, index, sizes)
        if least > context.limits_bytes[index]:
            return _too_small(context, index, least)
    return "no candidate fits the devices, the batch, and the memory"


def least_peak_bytes(context: SearchContext, slice_index: int, micro_batch_sizes: Sequence[int]) -> float:
    """Least memory of a device of a slice that suffices for some stage of one layer."""
    best = math.inf
    for index, option in enumerate(context.topology.table.options):
        if option.slice != slice_index:
            continue
        for size in micro_batch_sizes:
            costs = context.intervals.costs(index, size)
            for again in (False, True):
                peaks = run_peak_bytes(costs, (InFlight(1),), 1, rematerialise=again)
                best = min(best, float(np.where(costs.is_possible, peaks, np.inf).min()))
    return best


def _too_small(context: SearchContext, index: int, least: float) -> str:
    chosen = context.topology.slices[index]
    if not math.isfinite(least):
        return f"the cost table has nothing that runs on slice {chosen.name!r}"
    return (
        f"slice {chosen.name!r} ({chosen.device_type.name}) is too small for any stage: a device may hold "
        f"{context.limits_bytes[index] / 1e9:.3g} GB, and the smallest stage needs {least / 1e9:.3g} GB"
    )


def _fixed(options: StageOptions, sizes: Sequence[int]) -> str:
    """What the caller fixes, in the words of the options."""
    fixed = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name in _FIXABLE}
    told = [f"{name}={value}" for name, value in fixed.items() if value is not None]
    return ", ".join([*told, f"micro-batches of {', '.join(map(str, sizes))}"])


_FIXABLE = ("num_stages", "num_micro_batches", "num_pipelines", "most_devices_per_stage")
"""Options that leave no choice if they are given."""


def _enough(context: SearchContext, batch_size: int, options: StageOptions, sizes: Sequence[int]) -> float | None:
    """By how much more memory, to a few percent, there would be an arrangement; None if no memory suffices."""
    few = dataclasses.replace(options, most_candidates=4)

    def suffices(factor: float) -> bool:
        wider = dataclasses.replace(context, limits_bytes=tuple(limit * factor for limit in context.limits_bytes))
        longest_first = sorted(slice_sequences(len(context.topology.slices)), key=len, reverse=True)
        return any(search_sequence(wider, f, batch_size, sizes, few, math.inf).cut is not None for f in longest_first)

    low, high = 1.0, 2.0
    while not suffices(high):
        low, high = high, 2 * high
        if high > MOST_MEMORY:
            return None
    while high / low > 1.05:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high

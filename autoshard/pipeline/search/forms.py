"""The forms of a step, and the search of one: shapes in the order of what they promise, each cut."""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.pipeline.search.cut import Cut, bounded_cut
from autoshard.pipeline.search.cut_bounds import CLOSE
from autoshard.pipeline.search.improve import improved_cut
from autoshard.pipeline.search.options import StageOptions
from autoshard.pipeline.search.shapes import Family, Shape, ShapeLimits
from autoshard.pipeline.search.team import Scene, Team
from autoshard.pipeline.search.whale import cut_by_shares, even_cut, whale_shares

MOST_ORDERED = 3
"""Slices that pipelines run across, at most, in all orders; of more slices, pipelines run across all in their order."""
MOST_FAMILIES = 400
"""Choices of mesh options, one for each slice, for each size of micro-batches and form of the step; of more, those with
the options that make best use of their devices are looked at, and the bound is one for these."""
MOST_OPENED = 600
"""Families, with a number of replicas, whose shapes are looked at, at most, in each form of the step."""
MOST_OPENED_OF_MANY = 100
"""The same across three slices and more, where each has many more shapes."""
MOST_IMPROVED = 4
"""Cuts of each form of the step, the best ones, of different shapes, that are improved layer by layer."""
MOST_OF_FAMILY = 40
"""Shapes of one of them, and of one schedule, that are kept; what is left out is in the bound."""


@dataclasses.dataclass(frozen=True, slots=True)
class BestOfForm:
    """The best of one form, None if there is none; a bound for all of it; the best shape's name."""

    cut: Cut | None
    bound_s: float
    description: str = ""


def forms(num_slices: int) -> Iterator[tuple[int, ...]]:
    """Each slice alone, then pipelines across slices, as orders of slices."""
    for length in range(1, num_slices + 1):
        if length == 1 or num_slices <= MOST_ORDERED:
            yield from itertools.permutations(range(num_slices), length)
        elif length == num_slices:
            yield tuple(range(num_slices))


def search_form(
    scene: Scene, form: Sequence[int], batch_size: int, sizes: Sequence[int], options: StageOptions, cutoff_s: float
) -> BestOfForm:
    """Shapes in the order of what they promise.

    Before them are families with a bound for all their shapes. A family is opened when no shape promises more than its
    bound. Nothing is cut whose bound is not below the best time.
    """
    limits = shape_limits(options)
    opened: list[tuple[float, int, Family | Shape, int, int]] = []
    count = itertools.count()
    for family in _families(scene, form, [s for s in sizes if batch_size % s == 0], options):
        replicas, numbers = _replicas(batch_size // family.micro_batch_size, int(family.slots.min()), limits)
        if len(replicas):
            bounds_s = family.least_s(replicas, numbers)
            for k in np.flatnonzero(bounds_s < cutoff_s):
                opened.append((float(bounds_s[k]), next(count), family, int(replicas[k]), int(numbers[k])))
    heapq.heapify(opened)
    best, num_cut, num_opened = BestOfForm(None, math.inf), 0, 0
    limit_s, dropped_s = cutoff_s, math.inf
    cuts: list[tuple[Cut, Team, Shape]] = []
    while opened and num_cut < options.most_shapes:
        bound_s, _, item, num_pipelines, number = heapq.heappop(opened)
        if isinstance(item, Family):
            if num_opened == (MOST_OPENED if len(form) <= 2 else MOST_OPENED_OF_MANY):
                dropped_s = min(dropped_s, bound_s)
            elif bound_s < limit_s * (1 - CLOSE):
                num_opened += 1
                shapes, rest_s = item.shapes(num_pipelines, number, limits, limit_s, MOST_OF_FAMILY)
                dropped_s = min(dropped_s, rest_s)
                for shape in shapes:
                    heapq.heappush(opened, (shape.guess_s, next(count), shape, num_pipelines, number))
        elif item.bound_s < limit_s * (1 - CLOSE):
            num_cut += 1
            team = item.team(scene, _spread(batch_size // item.micro_batch_size, num_pipelines))
            found, least_s = bounded_cut(scene, team, options.cut_effort, _suggestions(scene, item), limit_s)
            dropped_s = min(dropped_s, max(least_s, item.bound_s))
            if found is not None:
                limit_s = min(limit_s, found.step_s)
                cuts.append((found, team, item))
    for found, team, shape in sorted(cuts, key=lambda entry: entry[0].step_s)[:MOST_IMPROVED]:
        improved = improved_cut(scene, team, found, _suggestions(scene, shape))
        if improved.step_s < (cutoff_s if best.cut is None else best.cut.step_s):
            best = BestOfForm(improved, 0.0, team.description)
    left_s = min((x.bound_s if isinstance(x, Shape) else b for b, _, x, _, _ in opened), default=math.inf)
    step_s = best.cut.step_s if best.cut is not None else math.inf
    return dataclasses.replace(best, bound_s=min(left_s, dropped_s, step_s))


def _families(scene: Scene, form: Sequence[int], sizes: Sequence[int], options: StageOptions) -> Iterator[Family]:
    table = scene.ground.table
    most = options.most_devices_per_stage or math.inf
    each = [[o for o, x in enumerate(table.options) if x.slice == s and x.num_devices <= most] for s in form]
    for size in sizes:
        kept = max(1, int(MOST_FAMILIES ** (1 / len(form))))
        choices = [sorted(of_slice, key=lambda o: _device_s(scene, o, size))[:kept] for of_slice in each]
        for chosen in itertools.product(*choices):
            family = Family(scene, chosen, size)
            if family.is_possible:
                yield family


def _device_s(scene: Scene, option: int, size: int) -> float:
    """Time of all layers for one micro-batch, over all devices of a place."""
    costs = scene.runs.layer_costs(option, size)
    known = [c.forward_s + c.backward_s + c.weight_s for c in costs if c is not None]
    num_devices = scene.ground.table.options[option].num_devices
    return sum(known) * len(costs) / len(known) * num_devices if known else math.inf


def _replicas(num_micro_batches: int, most: int, limits: ShapeLimits) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of replicas, and micro-batches of the busiest: of equally busy ones, the fewest replicas."""
    replicas = np.arange(1, min(most, num_micro_batches) + 1)
    numbers = -(-num_micro_batches // replicas) if len(replicas) else replicas
    numbers, first = np.unique(numbers, return_index=True)
    replicas = replicas[first]
    if limits.num_micro_batches is not None:
        chosen = numbers == limits.num_micro_batches
        return replicas[chosen], numbers[chosen]
    return replicas, numbers


def _spread(total: int, parts: int) -> tuple[int, ...]:
    """As evenly as can be, the greater parts first."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def shape_limits(options: StageOptions) -> ShapeLimits:
    """What the caller fixes of shapes."""
    return ShapeLimits(options.num_stages, options.num_micro_batches, options.schedules, options.most_chunks)


def _suggestions(scene: Scene, shape: Shape) -> list[tuple[int, ...]]:
    """An even cut, and one by Whale's shares."""
    layers, table = scene.runs.layers, scene.ground.table
    cuts = [even_cut(layers.num_layers, shape.num_stages)]
    each = [scene.runs.layer_costs(o, shape.micro_batch_size) for o in shape.options]
    if all(c is not None for row in each for c in row):
        stages = [k for k, n in enumerate(shape.counts) for _ in range(n)] * shape.chunks
        options = [table.options[shape.options[k]] for k in stages]
        flops = [o.num_devices * o.mesh.device_type.flops_per_s("float32") for o in options]
        rooms = [o.num_devices * scene.limits_bytes[o.slice] for o in options]
        fixed = sum(c.weight_bytes + c.gradient_bytes + c.optimizer_bytes for c in each[0]) * options[0].num_devices
        work = [c.forward_s + c.backward_s + c.weight_s for c in each[0]]
        cuts.append(cut_by_shares(work, whale_shares(flops, rooms, sum(work), fixed)))
    return cuts

"""The stage search: which slices, how many replicas and stages, which schedule and shares, and where to cut.

Three forms of a step are compared: all replicas on one slice, the others left out; pipelines that run across slices, in
any order of them; and teams of replicas, one team on each slice, with shares of the batch that suit their speeds. In
each form the shapes (`shapes`) are looked at in the order of their bounds, cut (`cut`), and dropped when their bound is
not below the best time; what a form has left when its effort is used up bounds what could have been missed.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from autoshard.cluster import Cluster
from autoshard.errors import StageError
from autoshard.plans.options import PlanOptions
from autoshard.schedule.tasks import ScheduleKind
from autoshard.stages.arrangement import Arrangement
from autoshard.stages.costs import CostTable
from autoshard.stages.cut import CLOSE, Cut, CutEffort, bounded_cut, improved_cut
from autoshard.stages.layers import Layers
from autoshard.stages.memory import limits_bytes
from autoshard.stages.places import Ground
from autoshard.stages.runs import Runs
from autoshard.stages.shapes import Family, Shape, ShapeLimits, least_peak_bytes
from autoshard.stages.team import Scene, Team, arrangement_step_s
from autoshard.stages.uneven import teams_of_slices
from autoshard.stages.whale import cut_by_shares, even_cut, whale_shares

Progress = Callable[[str, int, int], None]
"""Told what is being looked at, how much is done, and how much there is at most."""

TEAMS = "a team on each slice"
MOST_ORDERED = 3
"""Slices that pipelines run across, at most, in all orders; of more slices, pipelines run across all in their order."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageOptions:
    """What the caller fixes, and how long to look.

    Attributes:
      num_stages: Stages of each pipeline; None: any number.
      num_micro_batches: Micro-batches of the pipeline that has most; None: any number.
      micro_batch_sizes: Sizes to try; None: all that the table has.
      schedules: Orders to try.
      most_devices_per_stage: None: as many as an option of the table has.
      most_chunks: Stages on one place, at most, where they are interleaved.
      limits_bytes: For each slice, what one device may hold; None: its memory less `PlanOptions.memory_reserve`.
      most_shapes: Shapes to cut, at most, in each form of the step.
      cut_effort: How long to look at each.
    """

    num_stages: int | None = None
    num_micro_batches: int | None = None
    micro_batch_sizes: tuple[int, ...] | None = None
    schedules: tuple[ScheduleKind, ...] = (
        ScheduleKind.ONE_F_ONE_B,
        ScheduleKind.ZERO_BUBBLE,
        ScheduleKind.INTERLEAVED,
        ScheduleKind.GPIPE,
    )
    most_devices_per_stage: int | None = None
    most_chunks: int = 4
    limits_bytes: tuple[float, ...] | None = None
    most_shapes: int = 60
    cut_effort: CutEffort = CutEffort(most_enumerated=300, most_simulated=3)


@dataclasses.dataclass(frozen=True, slots=True)
class Considered:
    """A form of the step that was looked at: its best time, or None and why there is none."""

    description: str
    step_s: float | None
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search.

    Attributes:
      arrangement: The best one. step_s: Its time by the simulator.
      bound_s: No arrangement of the forms that were searched is faster.
      considered: All forms that were looked at.
    """

    arrangement: Arrangement
    step_s: float
    bound_s: float
    considered: tuple[Considered, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Best:
    """The best of one form, None if there is none; a bound for all of it; the best shape's name."""

    cut: Cut | None
    bound_s: float
    description: str = ""


def search(
    layers: Layers,
    table: CostTable,
    cluster: Cluster,
    batch_size: int,
    options: StageOptions | None = None,
    progress: Progress | None = None,
) -> Found:
    """Finds the arrangement with the least step time.

    Args:
      layers: The model. table: What its layers cost. cluster: The devices.
      batch_size: Examples of one step.
      options: What is fixed.
      progress: Told how far the search is.

    Raises:
      StageError: If there is none: more stages than layers, a batch that cannot be shared out, too little memory.
    """
    options = options or StageOptions()
    tell = progress or (lambda text, done, total: None)
    limits = options.limits_bytes or limits_bytes(cluster, PlanOptions().memory_reserve)
    ground = Ground(cluster, table)
    if len(limits) != len(ground.slices):
        raise StageError(
            f"limits_bytes has one entry for each of the {len(ground.slices)} slices; received {len(limits)}. "
            "Give them in the order of Cluster.slices()."
        )
    scene = Scene(Runs(layers, table), ground, limits)
    sizes = _sizes(table, batch_size, options)
    _check(scene, batch_size, options, sizes)
    considered: list[Considered] = []
    best: Cut | None = None
    bound_s = math.inf
    forms = list(_forms(len(ground.slices)))
    alone, across = [f for f in forms if len(f) == 1], [f for f in forms if len(f) > 1]
    num_forms = len(forms) + bool(across)

    def look(number: int, form: tuple[int, ...]) -> None:
        nonlocal best, bound_s
        name = _name(scene, form)
        tell(name, number, num_forms)
        cutoff_s = math.inf if len(form) == 1 or best is None else best.step_s
        outcome = _search_form(scene, form, batch_size, sizes, options, cutoff_s)
        bound_s = min(bound_s, outcome.bound_s)
        considered.append(_considered(scene, name, form, outcome, cutoff_s, sizes))
        if outcome.cut is not None and (best is None or outcome.cut.step_s < best.step_s):
            best = outcome.cut

    for number, form in enumerate(alone):
        look(number, form)
    if across:  # before pipelines across slices, of which there are most, so that its time drops many of them
        tell(TEAMS, len(alone), num_forms)
        uneven = teams_of_slices(scene, batch_size, sizes, _shape_limits(options), options.most_devices_per_stage)
        bound_s = min(bound_s, uneven.bound_s)
        for description, arrangement, step_s in uneven.found:
            considered.append(Considered(f"{TEAMS}: {description}", step_s))
            if best is None or step_s < best.step_s:
                best = Cut(arrangement, (), step_s, 0.0)
        if not uneven.found:
            considered.append(Considered(TEAMS, None, uneven.reason))
    for number, form in enumerate(across, len(alone) + 1):
        look(number, form)
    tell("done", num_forms, num_forms)
    if best is None:
        raise StageError(_nothing(scene, batch_size, options, sizes, considered))
    step_s = arrangement_step_s(scene, best.arrangement)
    return Found(best.arrangement, step_s, min(bound_s, step_s), tuple(considered))


def _sizes(table: CostTable, batch_size: int, options: StageOptions) -> tuple[int, ...]:
    known = sorted({key.micro_batch_size for key in table.costs})
    wanted = known if options.micro_batch_sizes is None else [s for s in options.micro_batch_sizes if s in known]
    return tuple(s for s in wanted if s <= batch_size)


def _shape_limits(options: StageOptions) -> ShapeLimits:
    return ShapeLimits(options.num_stages, options.num_micro_batches, options.schedules, options.most_chunks)


def _forms(num_slices: int) -> Iterator[tuple[int, ...]]:
    """Each slice alone, then pipelines across slices, as orders of slices."""
    for length in range(1, num_slices + 1):
        if length == 1 or num_slices <= MOST_ORDERED:
            yield from itertools.permutations(range(num_slices), length)
        elif length == num_slices:
            yield tuple(range(num_slices))


def _name(scene: Scene, form: Sequence[int]) -> str:
    names = [scene.ground.slices[s].name for s in form]
    return f"{names[0]} alone" if len(names) == 1 else f"pipelines across {', then '.join(names)}"


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


def _search_form(
    scene: Scene, form: Sequence[int], batch_size: int, sizes: Sequence[int], options: StageOptions, cutoff_s: float
) -> _Best:
    """Shapes in the order of what they promise.

    Before them are families with a bound for all their shapes. A family is opened when no shape promises more than its
    bound. Nothing is cut whose bound is not below the best time.
    """
    limits = _shape_limits(options)
    opened: list[tuple[float, int, Family | Shape, int, int]] = []
    count = itertools.count()
    for family in _families(scene, form, [s for s in sizes if batch_size % s == 0], options):
        replicas, numbers = _replicas(batch_size // family.micro_batch_size, int(family.slots.min()), limits)
        if len(replicas):
            bounds_s = family.least_s(replicas, numbers)
            for k in np.flatnonzero(bounds_s < cutoff_s):
                opened.append((float(bounds_s[k]), next(count), family, int(replicas[k]), int(numbers[k])))
    heapq.heapify(opened)
    best, num_cut, num_opened = _Best(None, math.inf), 0, 0
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
            best = _Best(improved, 0.0, team.description)
    left_s = min((x.bound_s if isinstance(x, Shape) else b for b, _, x, _, _ in opened), default=math.inf)
    step_s = best.cut.step_s if best.cut is not None else math.inf
    return dataclasses.replace(best, bound_s=min(left_s, dropped_s, step_s))


MOST_FAMILIES = 400
"""Choices of mesh options, one for each slice, for each size of micro-batches and form of the step; of more, those with
the options that make best use of their devices are looked at, and the bound is one for these."""
MOST_MEMORY = 1e4
"""Times as much memory as there is; if that does not suffice, something else is wrong."""
MOST_OPENED = 600
"""Families, with a number of replicas, whose shapes are looked at, at most, in each form of the step."""
MOST_OPENED_OF_MANY = 100
"""The same across three slices and more, where each has many more shapes."""
MOST_IMPROVED = 4
"""Cuts of each form of the step, the best ones, of different shapes, that are improved layer by layer."""
MOST_OF_FAMILY = 40
"""Shapes of one of them, and of one schedule, that are kept; what is left out is in the bound."""


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


def _considered(
    scene: Scene, name: str, form: Sequence[int], outcome: _Best, cutoff_s: float, sizes: Sequence[int]
) -> Considered:
    if outcome.cut is not None:
        return Considered(f"{name}: {outcome.description}", outcome.cut.step_s)
    if math.isfinite(outcome.bound_s) and outcome.bound_s >= cutoff_s * (1 - CLOSE):
        return Considered(name, None, f"takes at least {outcome.bound_s:.3g} s, more than what was found")
    if math.isfinite(cutoff_s):
        return Considered(
            name, None, "of the shapes that promise most, none fits or none is faster than what was found"
        )
    return Considered(name, None, _memory_reason(scene, form, sizes))


def _fixed(options: StageOptions, sizes: Sequence[int]) -> str:
    """What the caller fixes, in the words of the options."""
    fixed = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name in _FIXABLE}
    told = [f"{name}={value}" for name, value in fixed.items() if value is not None]
    return ", ".join([*told, f"micro-batches of {', '.join(map(str, sizes))}"])


_FIXABLE = ("num_stages", "num_micro_batches", "most_devices_per_stage")
"""Options that leave no choice if they are given."""


def _memory_reason(scene: Scene, form: Sequence[int], sizes: Sequence[int]) -> str:
    for index in form:
        least = least_peak_bytes(scene, index, sizes)
        if least > scene.limits_bytes[index]:
            return _too_small(scene, index, least)
    return "no shape fits the devices, the batch, and the memory"


def _too_small(scene: Scene, index: int, least: float) -> str:
    chosen = scene.ground.slices[index]
    if not math.isfinite(least):
        return f"the cost table has nothing that runs on slice {chosen.name!r}"
    return (
        f"slice {chosen.name!r} ({chosen.device_type.name}) is too small for any stage: a device may hold "
        f"{scene.limits_bytes[index] / 1e9:.3g} GB, and the smallest stage needs {least / 1e9:.3g} GB"
    )


def _check(scene: Scene, batch_size: int, options: StageOptions, sizes: Sequence[int]) -> None:
    num_layers = scene.runs.layers.num_layers
    if options.num_stages is not None and not 1 <= options.num_stages <= num_layers:
        raise StageError(
            f"A stage has at least one layer; received num_stages={options.num_stages} for a model of {num_layers} "
            "layers. Ask for fewer stages."
        )
    if batch_size < 1:
        raise StageError(f"A batch has at least one example; received {batch_size!r}.")
    if not sizes:
        known = sorted({key.micro_batch_size for key in scene.ground.table.costs})
        raise StageError(
            f"A batch of {batch_size} examples cannot be shared out: the cost table has micro-batches of "
            f"{', '.join(map(str, known)) or 'no size'}, and micro_batch_sizes allows {options.micro_batch_sizes}. "
            "Make the batch larger, or allow smaller micro-batches."
        )


def _nothing(
    scene: Scene, batch_size: int, options: StageOptions, sizes: Sequence[int], considered: Sequence[Considered]
) -> str:
    step = math.gcd(*sizes)
    if batch_size % step:
        return (
            f"The shares of all pipelines must add up to the batch, in whole micro-batches; a batch of {batch_size} "
            f"examples cannot be made of micro-batches of {', '.join(map(str, sizes))}. Choose a multiple of {step}, "
            "or "
            "allow other sizes of micro-batches."
        )
    small = [(i, least_peak_bytes(scene, i, sizes)) for i in range(len(scene.ground.slices))]
    reasons = [_too_small(scene, i, least) for i, least in small if least > scene.limits_bytes[i]]
    if reasons:
        return (
            f"Each stage must fit the memory of its devices: {'; '.join(reasons)}. Take devices with more memory, "
            "smaller micro-batches, or meshes of more devices."
        )
    tried = "; ".join(f"{c.description}: {c.reason}" for c in considered)
    factor = _enough(scene, batch_size, options, sizes)
    if factor is None:
        return (
            f"No arrangement of {batch_size} examples is possible with what is fixed ({_fixed(options, sizes)}), "
            "however much memory there is: the micro-batches of all pipelines must make up the batch, and every "
            "pipeline needs places for its stages. Leave something out."
        )
    needed = ", ".join(
        f"{limit * factor / 1e9:.3g} GB instead of {limit / 1e9:.3g} GB on {part.name!r}"
        for part, limit in zip(scene.ground.slices, scene.limits_bytes, strict=True)
    )
    return (
        f"The stages of a pipeline must fit the memory of their devices, and no arrangement does: {tried}. If each "
        f"device could hold {factor:.3g} times as much, {needed}, one would. Take more devices, smaller micro-batches, "
        "or meshes of more devices."
    )


def _enough(scene: Scene, batch_size: int, options: StageOptions, sizes: Sequence[int]) -> float | None:
    """By how much more memory, to a few percent, there would be an arrangement; None if no memory suffices."""
    few = dataclasses.replace(options, most_shapes=4)

    def suffices(factor: float) -> bool:
        wider = dataclasses.replace(scene, limits_bytes=tuple(limit * factor for limit in scene.limits_bytes))
        forms = sorted(_forms(len(scene.ground.slices)), key=len, reverse=True)
        return any(_search_form(wider, f, batch_size, sizes, few, math.inf).cut is not None for f in forms)

    low, high = 1.0, 2.0
    while not suffices(high):
        low, high = high, 2 * high
        if high > MOST_MEMORY:
            return None
    while high / low > 1.05:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high

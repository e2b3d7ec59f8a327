"""The stage search: which slices, how many replicas and stages, which schedule and shares, and where to cut.

Three forms of a step are compared: all replicas on one slice, the others left out; pipelines that run across slices, in
any order of them; and teams of replicas, one team on each slice, with shares of the batch that suit their speeds. In
each form the shapes (`shapes`) are looked at in the order of their bounds, cut (`cut`), and dropped when their bound is
not below the best time; what a form has left when its effort is used up bounds what could have been missed.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from autoshard.cluster import Cluster
from autoshard.errors import StageError
from autoshard.pipeline.cost.layers import Layers
from autoshard.pipeline.cost.runs import Runs
from autoshard.pipeline.cost.table import CostTable
from autoshard.pipeline.search.arrangement import Arrangement
from autoshard.pipeline.search.considered import Considered
from autoshard.pipeline.search.cut import Cut
from autoshard.pipeline.search.cut_bounds import CLOSE
from autoshard.pipeline.search.forms import BestOfForm, forms, search_form, shape_limits
from autoshard.pipeline.search.options import StageOptions
from autoshard.pipeline.search.reasons import memory_reason, why_nothing
from autoshard.pipeline.search.stage_memory import limits_bytes
from autoshard.pipeline.search.team import Scene, arrangement_step_s
from autoshard.pipeline.search.topology import Ground
from autoshard.pipeline.search.uneven import teams_of_slices
from autoshard.plans.options import PlanOptions

Progress = Callable[[str, int, int], None]
"""Told what is being looked at, how much is done, and how much there is at most."""
TEAMS = "a team on each slice"


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
    every = list(forms(len(ground.slices)))
    alone, across = [f for f in every if len(f) == 1], [f for f in every if len(f) > 1]
    num_forms = len(every) + bool(across)

    def look(number: int, form: tuple[int, ...]) -> None:
        nonlocal best, bound_s
        name = _name(scene, form)
        tell(name, number, num_forms)
        cutoff_s = math.inf if len(form) == 1 or best is None else best.step_s
        outcome = search_form(scene, form, batch_size, sizes, options, cutoff_s)
        bound_s = min(bound_s, outcome.bound_s)
        considered.append(_considered(scene, name, form, outcome, cutoff_s, sizes))
        if outcome.cut is not None and (best is None or outcome.cut.step_s < best.step_s):
            best = outcome.cut

    for number, form in enumerate(alone):
        look(number, form)
    if across:  # before pipelines across slices, of which there are most, so that its time drops many of them
        tell(TEAMS, len(alone), num_forms)
        uneven = teams_of_slices(scene, batch_size, sizes, shape_limits(options), options.most_devices_per_stage)
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
        raise StageError(why_nothing(scene, batch_size, options, sizes, considered))
    step_s = arrangement_step_s(scene, best.arrangement)
    return Found(best.arrangement, step_s, min(bound_s, step_s), tuple(considered))


def _sizes(table: CostTable, batch_size: int, options: StageOptions) -> tuple[int, ...]:
    known = sorted({key.micro_batch_size for key in table.costs})
    wanted = known if options.micro_batch_sizes is None else [s for s in options.micro_batch_sizes if s in known]
    return tuple(s for s in wanted if s <= batch_size)


def _name(scene: Scene, form: Sequence[int]) -> str:
    names = [scene.ground.slices[s].name for s in form]
    return f"{names[0]} alone" if len(names) == 1 else f"pipelines across {', then '.join(names)}"


def _considered(
    scene: Scene, name: str, form: Sequence[int], outcome: BestOfForm, cutoff_s: float, sizes: Sequence[int]
) -> Considered:
    if outcome.cut is not None:
        return Considered(f"{name}: {outcome.description}", outcome.cut.step_s)
    if math.isfinite(outcome.bound_s) and outcome.bound_s >= cutoff_s * (1 - CLOSE):
        return Considered(name, None, f"takes at least {outcome.bound_s:.3g} s, more than what was found")
    if math.isfinite(cutoff_s):
        return Considered(
            name, None, "of the shapes that promise most, none fits or none is faster than what was found"
        )
    return Considered(name, None, memory_reason(scene, form, sizes))


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

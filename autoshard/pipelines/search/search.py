"""The stage search: which slices, how many replicas and stages, which schedule and shares, and where to cut.

Three kinds of arrangements are compared: all replicas on one slice, the others left out; pipelines that run across
slices, in any order of them; and groups of replicas, one group on each slice, with shares of the batch that suit their
speeds. In each sequence the candidates (`candidates`) are looked at in the order of their bounds, cut (`cut`), and
dropped when their bound is not below the best time; what a sequence has left when its effort is used up bounds what
could have been missed.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from autoshard.cluster import Cluster
from autoshard.errors import StageError
from autoshard.pipelines.cost.interval_costs import IntervalCostTable
from autoshard.pipelines.cost.layers import Layers
from autoshard.pipelines.cost.table import CostTable
from autoshard.pipelines.search.alternative import Alternative
from autoshard.pipelines.search.arrangement import Arrangement
from autoshard.pipelines.search.asked_stages import AskedStages
from autoshard.pipelines.search.group_per_slice import group_per_slice
from autoshard.pipelines.search.infeasible import memory_reason, why_infeasible
from autoshard.pipelines.search.options import StageOptions
from autoshard.pipelines.search.partition import StagePartition
from autoshard.pipelines.search.partition_bounds import CLOSE
from autoshard.pipelines.search.place_submeshes import placed_submeshes
from autoshard.pipelines.search.replica_group import SearchContext, arrangement_step_s
from autoshard.pipelines.search.slice_sequences import BestOfSequence, search_sequence, slice_sequences
from autoshard.pipelines.search.stage_memory import limits_bytes
from autoshard.pipelines.search.topology import Topology
from autoshard.plans.options import PlanOptions
from autoshard.printing import seconds

Progress = Callable[[str, int, int], None]
"""Told what is being looked at, how much is done, and how much there is at most."""
GROUPS = "a replica group on each slice"


@dataclasses.dataclass(frozen=True, slots=True)
class SearchResult:
    """The outcome of a search.

    Attributes:
      arrangement: The best one. step_s: Its time by the simulator.
      bound_s: No arrangement of the sequences that were searched is faster.
      considered: All sequences that were looked at.
    """

    arrangement: Arrangement
    step_s: float
    bound_s: float
    considered: tuple[Alternative, ...]


def search(
    layers: Layers,
    table: CostTable,
    cluster: Cluster,
    batch_size: int,
    options: StageOptions | None = None,
    progress: Progress | None = None,
    asked: AskedStages | None = None,
    to_beat_s: float = math.inf,
) -> SearchResult:
    """Finds the arrangement with the least step time.

    Args:
      layers: The model. table: What its layers cost. cluster: The devices.
      batch_size: Examples of one step.
      options: What is fixed.
      progress: Told how far the search is.
      asked: What annotations ask of the stages, as many as `options.num_stages`; None for nothing.
      to_beat_s: A step that takes no less is of no interest: the search ends where no arrangement can beat it, with the
        best that it has seen, and its bound is no higher.

    Raises:
      StageError: If there is none: more stages than layers, a batch that cannot be shared out, too little memory.
    """
    options = options or StageOptions()
    tell = progress or (lambda text, done, total: None)
    limits = options.limits_bytes or limits_bytes(cluster, PlanOptions().memory_reserve)
    topology = Topology(cluster, table)
    if len(limits) != len(topology.slices):
        raise StageError(
            f"limits_bytes has one entry for each of the {len(topology.slices)} slices; received {len(limits)}. "
            "Give them in the order of Cluster.slices()."
        )
    context = SearchContext(IntervalCostTable(layers, table), topology, limits, asked)
    sizes = _sizes(table, batch_size, options)
    _check(context, batch_size, options, sizes)
    considered: list[Alternative] = []
    best: StagePartition | None = None
    bound_s = math.inf
    every = list(slice_sequences(len(topology.slices)))
    alone, across = [f for f in every if len(f) == 1], [f for f in every if len(f) > 1]
    num_forms = len(every) + bool(across)

    def look(number: int, sequence: tuple[int, ...]) -> None:
        nonlocal best, bound_s
        name = _name(context, sequence)
        tell(name, number, num_forms)
        cutoff_s = math.inf if len(sequence) == 1 or best is None else best.step_s
        outcome = search_sequence(context, sequence, batch_size, sizes, options, cutoff_s, to_beat_s)
        bound_s = min(bound_s, outcome.bound_s)
        considered.append(_considered(context, name, sequence, outcome, cutoff_s, sizes))
        if outcome.cut is not None and (best is None or outcome.cut.step_s < best.step_s):
            best = outcome.cut

    for number, sequence in enumerate(alone):
        look(number, sequence)
    if across:  # before pipelines across slices, of which there are most, so that its time drops many of them
        tell(GROUPS, len(alone), num_forms)
        uneven = group_per_slice(context, batch_size, sizes, options)
        bound_s = min(bound_s, uneven.bound_s)
        for description, arrangement, step_s in uneven.found:
            considered.append(Alternative(f"{GROUPS}: {description}", step_s))
            if best is None or step_s < best.step_s:
                best = StagePartition(arrangement, (), step_s, 0.0)
        if not uneven.found:
            considered.append(Alternative(GROUPS, None, uneven.reason))
    for number, sequence in enumerate(across, len(alone) + 1):
        look(number, sequence)
    tell("done", num_forms, num_forms)
    if best is None:
        raise StageError(why_infeasible(context, batch_size, options, sizes, considered))
    arrangement = placed_submeshes(context, best.arrangement)
    step_s = arrangement_step_s(context, arrangement)
    return SearchResult(arrangement, step_s, min(bound_s, step_s), tuple(considered))


def _sizes(table: CostTable, batch_size: int, options: StageOptions) -> tuple[int, ...]:
    known = sorted({key.micro_batch_size for key in table.costs})
    wanted = known if options.micro_batch_sizes is None else [s for s in options.micro_batch_sizes if s in known]
    return tuple(s for s in wanted if s <= batch_size)


def _name(context: SearchContext, sequence: Sequence[int]) -> str:
    names = [context.topology.slices[s].name for s in sequence]
    return f"{names[0]} alone" if len(names) == 1 else f"pipelines across {', then '.join(names)}"


def _considered(
    context: SearchContext,
    name: str,
    sequence: Sequence[int],
    outcome: BestOfSequence,
    cutoff_s: float,
    sizes: Sequence[int],
) -> Alternative:
    if outcome.cut is not None:
        return Alternative(f"{name}: {outcome.description}", outcome.cut.step_s)
    if math.isfinite(outcome.bound_s) and outcome.bound_s >= cutoff_s * (1 - CLOSE):
        return Alternative(name, None, f"takes at least {seconds(outcome.bound_s)}, more than what was found")
    if math.isfinite(cutoff_s):
        return Alternative(
            name, None, "of the candidates that promise most, none fits or none is faster than what was found"
        )
    return Alternative(name, None, memory_reason(context, sequence, sizes))


def _check(context: SearchContext, batch_size: int, options: StageOptions, sizes: Sequence[int]) -> None:
    num_layers = context.intervals.layers.num_layers
    if options.num_stages is not None and not 1 <= options.num_stages <= num_layers:
        raise StageError(
            f"A stage has at least one layer; received num_stages={options.num_stages} for a model of {num_layers} "
            "layers. Ask for fewer stages."
        )
    if batch_size < 1:
        raise StageError(f"A batch has at least one example; received {batch_size!r}.")
    if not sizes:
        known = sorted({key.micro_batch_size for key in context.topology.table.costs})
        raise StageError(
            f"A batch of {batch_size} examples cannot be shared out: the cost table has micro-batches of "
            f"{', '.join(map(str, known)) or 'no size'}, and micro_batch_sizes allows {options.micro_batch_sizes}. "
            "Make the batch larger, or allow smaller micro-batches."
        )

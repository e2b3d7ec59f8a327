"""What runs where, of a training step in stages: its layers are priced, and the best arrangement is searched for.

That is all that is known before the stages of the arrangement are planned as a whole (`make.py`): enough to see whether
they are worth it.
"""

import dataclasses
import math
import time
from typing import Any

from autoshard.cluster import Cluster
from autoshard.pipelines.cost.interval_costs import IntervalCostTable
from autoshard.pipelines.cost.pricing import PricedLayers, price_layers
from autoshard.pipelines.plan.asked import with_asked, with_parts
from autoshard.pipelines.schedule.durations import StepDurations
from autoshard.pipelines.schedule.simulate import step_time
from autoshard.pipelines.search.arrangement import Arrangement
from autoshard.pipelines.search.asked_stages import asked_stages
from autoshard.pipelines.search.options import StageOptions
from autoshard.pipelines.search.search import SearchResult, search
from autoshard.pipelines.search.step_durations import step_durations
from autoshard.pipelines.search.topology import Topology
from autoshard.pipelines.split.forward import trace_forward
from autoshard.plans.make import budget_of
from autoshard.plans.options import PlanOptions
from autoshard.plans.question import report
from autoshard.train_step import TrainStep, batch_size

LEAST_SHARE, MOST_SHARE = 0.25, 8.0
"""Micro-batch sizes that are tried if the caller names none: between these multiples of an equal share of the batch for
each device. Fewer examples keep the devices idle; more leave no micro-batches to fill a pipeline with.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class StagedTask:
    """What is to be planned in stages.

    Attributes:
      step, state, batch, cluster: As for `autoshard.plan`.
      options: Of each solve. stages: What is fixed of the search, and how long to look.
      memory_budget_bytes: Limit for each device of every slice; None for what the devices have, less the reserve of
        `options`. `stages.limits_bytes`, if given, takes its place.
      donates_state, configuration: What the plan tells besides; see `PipelinePlan`.
    """

    step: TrainStep
    state: Any
    batch: Any
    cluster: Cluster
    options: PlanOptions
    stages: StageOptions
    memory_budget_bytes: float | None = None
    donates_state: bool = False
    configuration: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Arranged:
    """What runs where, by the costs of single layers; no stage of it is planned as a whole yet.

    Attributes:
      task: What was asked. priced: The layers, and what they cost.
      arrangement: What runs where. durations: What takes how long, by these costs.
      found: How it was found; None where it was given.
      limits_bytes: For each slice, what one device may hold.
      started: When planning began, by `time.perf_counter`.
    """

    task: StagedTask
    priced: PricedLayers
    arrangement: Arrangement
    durations: StepDurations
    found: SearchResult | None
    limits_bytes: tuple[float, ...]
    started: float

    @property
    def step_s(self) -> float:
        """Step time, as the search counts it."""
        return step_time(self.durations) if self.found is None else self.found.step_s

    @property
    def bound_s(self) -> float:
        """No arrangement that was searched takes less; 0 where none was."""
        return 0.0 if self.found is None else self.found.bound_s


def arrange(task: StagedTask, arrangement: Arrangement | None = None, to_beat_s: float = math.inf) -> Arranged:
    """Prices the layers of a training step, and searches for the arrangement with the least step time.

    Args:
      task: What is planned. arrangement: What to run where, if it is not to be searched.
      to_beat_s: A step that takes no less is of no interest; see `search`.

    Raises:
      StageError: Nothing fits; names the slice or the layer, and what would help. Or the step says micro-batches that
        no plan in stages has.
      MemoryBudgetError: The limit is not positive.
    """
    started = time.perf_counter()
    cluster, options, stages = task.cluster, task.options, task.stages
    examples = batch_size(task.batch)
    budgets = tuple(budget_of(s.device_type, task.memory_budget_bytes, options) for s in cluster.slices())
    limits = stages.limits_bytes or budgets
    task.step.check_parts(examples)
    stages = with_parts(stages, task.step.parts)
    forward = trace_forward(task.step, task.state, task.batch, 1)
    stages = with_asked(stages, forward.asked)
    sizes = stages.micro_batch_sizes or default_sizes(examples, cluster, stages)
    if arrangement is not None:
        sizes = tuple(sorted({p.micro_batch_size for p in arrangement.pipelines}))
    priced = price_layers(task.step, task.state, task.batch, cluster, sizes, options, stages.most_devices_per_stage)
    stages = dataclasses.replace(stages, limits_bytes=limits)
    model = next(iter(priced.models.values()))
    asked = asked_stages(model.forward.asked, model.stages.cuts, cluster)
    found = None
    if arrangement is None:
        tell = lambda text, done, total: report(options, started, "stages", f"{text} ({done} of {total})")
        found = search(priced.layers, priced.table, cluster, examples, stages, tell, asked, to_beat_s)
        arrangement = found.arrangement
    topology, intervals = Topology(cluster, priced.table), IntervalCostTable(priced.layers, priced.table)
    durations = step_durations(intervals, topology, arrangement)
    return Arranged(task, priced, arrangement, durations, found, limits, started)


def default_sizes(examples: int, cluster: Cluster, stages: StageOptions) -> tuple[int, ...]:
    """Micro-batch sizes to try: powers of two, between `LEAST_SHARE` and `MOST_SHARE` times an equal share.

    Where the number of micro-batches is fixed, those with which pipelines have that many, and equal shares.
    """
    if stages.num_micro_batches is not None:
        most = max(1, cluster.num_devices // (stages.num_stages or 1))
        counts = range(1, most + 1) if stages.num_pipelines is None else [stages.num_pipelines]
        shares = [stages.num_micro_batches * count for count in counts]
        exact = tuple(sorted({examples // share for share in shares if examples % share == 0}))
        if exact:
            return exact
    share = examples / cluster.num_devices
    powers = [2**k for k in range(examples.bit_length())]
    most = max(1.0, min(MOST_SHARE * share, examples / len(cluster.slices())))
    return tuple(n for n in powers if LEAST_SHARE * share <= n <= most) or (1,)

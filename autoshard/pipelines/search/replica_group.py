"""Equal pipelines side by side: what the stage search costs once and lays out many times."""

import dataclasses
import functools
from collections.abc import Sequence

from autoshard.pipelines.cost.interval_costs import IntervalCostTable
from autoshard.pipelines.schedule.durations import StepDurations
from autoshard.pipelines.schedule.simulate import step_time
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.arrangement import Arrangement, Pipeline, Stage, Submesh
from autoshard.pipelines.search.asked_stages import AskedStages
from autoshard.pipelines.search.step_durations import step_durations
from autoshard.pipelines.search.topology import Topology
from autoshard.printing import counted


@dataclasses.dataclass(frozen=True, slots=True)
class SearchContext:
    """What does not change while stages are searched.

    Attributes:
      intervals: Costs of the layers. topology: Where submeshes lie.
      limits_bytes: For each slice, what one device may hold.
      asked: What annotations ask of the stages; None for nothing.
    """

    intervals: IntervalCostTable
    topology: Topology
    limits_bytes: tuple[float, ...]
    asked: AskedStages | None = None

    def may_hold(self, stage: int, slice_index: int) -> bool:
        """Whether a stage may be on a slice."""
        return self.asked is None or slice_index in self.asked.slices[stage]


@dataclasses.dataclass(frozen=True)
class ReplicaGroup:
    """Replicas that are cut alike and run on like submeshes.

    Attributes:
      submeshes: For each pipeline, its submeshes.
      micro_batch_size: Of all of them.
      num_micro_batches: For each pipeline, the greatest number first.
      schedule: Of all of them.
      num_stages: Of each.
    """

    submeshes: tuple[tuple[Submesh, ...], ...]
    micro_batch_size: int
    num_micro_batches: tuple[int, ...]
    schedule: ScheduleKind
    num_stages: int

    @property
    def num_pipelines(self) -> int:
        """Number of replicas."""
        return len(self.submeshes)

    @property
    def num_examples(self) -> int:
        """Its share of the batch."""
        return self.micro_batch_size * sum(self.num_micro_batches)

    @functools.cached_property
    def description(self) -> str:
        """For people."""
        stages = counted(self.num_stages, "stage")
        rounds = counted(self.num_micro_batches[0], "micro-batch", "micro-batches")
        return f"{self.num_pipelines} x {stages}, {self.schedule.value}, {rounds} of {self.micro_batch_size}"

    def pipelines(self, stages: Sequence[Stage]) -> tuple[Pipeline, ...]:
        """The replicas, with the layers that each of their stages takes."""
        return tuple(
            Pipeline(submeshes, tuple(stages), self.micro_batch_size, number, self.schedule)
            for submeshes, number in zip(self.submeshes, self.num_micro_batches, strict=True)
        )


def arrangement_step_s(context: SearchContext, arrangement: Arrangement, most_pipelines: int | None = None) -> float:
    """Step time of an arrangement by the simulator.

    Args:
      context: Costs and cluster.
      arrangement: What runs where.
      most_pipelines: Of pipelines that differ in their submeshes only, look at the first and the last where there are
        more than this; without it, at all.
    """
    only = None if most_pipelines is None else _representatives(arrangement, most_pipelines)
    step = step_durations(context.intervals, context.topology, arrangement, only)
    return step_time(StepDurations(tuple(dict.fromkeys(step.pipelines))))


def _representatives(arrangement: Arrangement, most: int) -> list[int] | None:
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, p in enumerate(arrangement.pipelines):
        options = tuple(submesh.option for submesh in p.submeshes)
        key = (options, p.stages, p.micro_batch_size, p.schedule, p.num_micro_batches)
        alike.setdefault(key, []).append(i)
    chosen = [i for group in alike.values() for i in (group if len(group) <= most else (group[0], group[-1]))]
    return sorted(chosen)

"""Equal pipelines side by side: what the stage search costs once and lays out many times."""

import dataclasses
import functools
from collections.abc import Sequence

from autoshard.pipeline.cost.runs import Runs
from autoshard.pipeline.schedule.durations import StepDurations
from autoshard.pipeline.schedule.simulate import step_time
from autoshard.pipeline.schedule.tasks import ScheduleKind
from autoshard.pipeline.search.arrangement import Arrangement, Pipeline, Place, Stage
from autoshard.pipeline.search.step_durations import step_durations
from autoshard.pipeline.search.topology import Ground


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """What does not change while stages are searched.

    Attributes:
      runs: Costs of the layers. ground: Where places lie.
      limits_bytes: For each slice, what one device may hold.
    """

    runs: Runs
    ground: Ground
    limits_bytes: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Team:
    """Replicas that are cut alike and run on like places.

    Attributes:
      places: For each pipeline, its places.
      micro_batch_size: Of all of them.
      num_micro_batches: For each pipeline, the greatest number first.
      schedule: Of all of them.
      num_stages: Of each.
    """

    places: tuple[tuple[Place, ...], ...]
    micro_batch_size: int
    num_micro_batches: tuple[int, ...]
    schedule: ScheduleKind
    num_stages: int

    @property
    def num_pipelines(self) -> int:
        """Number of replicas."""
        return len(self.places)

    @property
    def num_examples(self) -> int:
        """Its share of the batch."""
        return self.micro_batch_size * sum(self.num_micro_batches)

    @functools.cached_property
    def description(self) -> str:
        """For people."""
        stages = f"{self.num_stages} stages" if self.num_stages > 1 else "1 stage"
        return (
            f"{self.num_pipelines} x {stages}, {self.schedule.value}, {self.num_micro_batches[0]} micro-batches of "
            f"{self.micro_batch_size}"
        )

    def pipelines(self, stages: Sequence[Stage]) -> tuple[Pipeline, ...]:
        """The replicas, with the layers that each of their stages takes."""
        return tuple(
            Pipeline(places, tuple(stages), self.micro_batch_size, number, self.schedule)
            for places, number in zip(self.places, self.num_micro_batches, strict=True)
        )


def arrangement_step_s(scene: Scene, arrangement: Arrangement, most_pipelines: int | None = None) -> float:
    """Step time of an arrangement by the simulator.

    Args:
      scene: Costs and cluster.
      arrangement: What runs where.
      most_pipelines: Of pipelines that differ in their places only, look at the first and the last where there are more
        than this; without it, at all.
    """
    only = None if most_pipelines is None else _representatives(arrangement, most_pipelines)
    step = step_durations(scene.runs, scene.ground, arrangement, only)
    return step_time(StepDurations(tuple(dict.fromkeys(step.pipelines))))


def _representatives(arrangement: Arrangement, most: int) -> list[int] | None:
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, p in enumerate(arrangement.pipelines):
        options = tuple(place.option for place in p.places)
        key = (options, p.stages, p.micro_batch_size, p.schedule, p.num_micro_batches)
        alike.setdefault(key, []).append(i)
    chosen = [i for group in alike.values() for i in (group if len(group) <= most else (group[0], group[-1]))]
    return sorted(chosen)

"""The outcome of the stage search: which layers run where, with which share of the batch, in which order."""

import dataclasses

from autoshard.pipelines.schedule.tasks import ScheduleKind


@dataclasses.dataclass(frozen=True, slots=True)
class Submesh:
    """A mesh of devices that holds stages of one pipeline.

    Attributes:
      slice: Index into `Cluster.slices()`. first_device: Its first device, counted within the slice; it has as many as
        the mesh option says, without gaps.
      option: Index into `CostTable.options`.
    """

    slice: int
    first_device: int
    option: int


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Layers `start <= layer < stop`; `rematerialise`: computed again in the backward pass from the stage's inputs."""

    start: int
    stop: int
    rematerialise: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Pipeline:
    """One replica of the model with its share of the batch.

    Attributes:
      submeshes: In the order of the stages that they hold: stage s is on submesh s mod len(submeshes).
      stages: They cover all layers, in order.
      micro_batch_size: Examples of one micro-batch. num_micro_batches: In one step.
      schedule: The order of its tasks.
    """

    submeshes: tuple[Submesh, ...]
    stages: tuple[Stage, ...]
    micro_batch_size: int
    num_micro_batches: int
    schedule: ScheduleKind

    @property
    def num_examples(self) -> int:
        """Its share of the batch."""
        return self.micro_batch_size * self.num_micro_batches


@dataclasses.dataclass(frozen=True, slots=True)
class Arrangement:
    """Pipelines side by side, each on devices of its own; together they take the whole batch."""

    pipelines: tuple[Pipeline, ...]

    @property
    def batch_size(self) -> int:
        """Examples of one step."""
        return sum(p.num_examples for p in self.pipelines)

"""What runs when in a pipeline: tasks, and their order on each submesh.

This room is pure data: it knows neither JAX nor what a stage computes, only how long that takes.

A *stage* is a run of consecutive layers, stage 0 first. A *submesh* is a mesh of devices that holds one or more stages
of a pipeline: with P submeshes, stage s lives on submesh s mod P (more stages than submeshes: the interleaved
schedule).
"""

import dataclasses
import enum


class Phase(enum.Enum):
    """What a task does for one micro-batch on one stage."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Gradients of the stage's inputs, and of its weights too unless these are a task of their own."""
    WEIGHT = "weight"
    """Gradients of the stage's weights, where the schedule splits the backward pass (zero-bubble)."""


class ScheduleKind(enum.Enum):
    """The order in which a pipeline runs its tasks."""

    GPIPE = "gpipe"  # Huang et al. 2019, arXiv:1811.06965
    ONE_F_ONE_B = "1f1b"  # Narayanan et al. 2021, arXiv:2006.09503
    INTERLEAVED = "interleaved"  # Narayanan et al. 2021, arXiv:2104.04473
    ZERO_BUBBLE = "zb-h1"  # Qi et al. 2023, arXiv:2401.10241


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One phase of one micro-batch on one stage."""

    stage: int
    phase: Phase
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.phase.name[0]}{self.micro_batch}@{self.stage}"


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """The tasks of one pipeline in one step, in order, for each submesh.

    Attributes:
      kind: See `ScheduleKind`.
      num_stages, num_micro_batches: Of the pipeline.
      order: For each submesh, its tasks in the order in which it runs them.
    """

    kind: ScheduleKind
    num_stages: int
    num_micro_batches: int
    order: tuple[tuple[Task, ...], ...]

    def __hash__(self) -> int:
        """Of its sizes only: to hash every task would take longer than to simulate them."""
        return hash((self.kind, self.num_stages, self.num_micro_batches, len(self.order)))

    def __str__(self) -> str:
        return (
            f"{self.kind.value}: {self.num_stages} stages on {self.num_submeshes} submeshes, "
            f"{self.num_micro_batches} micro-batches"
        )

    @property
    def num_submeshes(self) -> int:
        """Number of submeshes."""
        return len(self.order)

    def submesh_of(self, stage: int) -> int:
        """The submesh that holds a stage."""
        return stage % self.num_submeshes

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of the weights are tasks of their own."""
        return self.kind is ScheduleKind.ZERO_BUBBLE

    @property
    def last_phase(self) -> Phase:
        """The phase after which a stage is done with a micro-batch."""
        return Phase.WEIGHT if self.splits_backward else Phase.BACKWARD

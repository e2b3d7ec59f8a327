"""How long everything in a step takes: the input of the simulator, and of the planner's objective."""

import dataclasses

from autoshard.pipelines.schedule.tasks import Schedule


@dataclasses.dataclass(frozen=True, slots=True)
class StageDurations:
    """One stage of one pipeline, for one micro-batch.

    Attributes:
      forward_s, backward_s, weight_s: Of each phase; if the schedule does not split the backward pass, `weight_s` is
        added to `backward_s`.
      residual_bytes: What each device holds of one micro-batch from its forward to the end of its backward pass.
      weight_residual_bytes: The part of it (or what is held in place of it) from the backward to the weight phase.
      fixed_bytes: What each device holds all the time: weights, gradient sums, optimizer state.
      working_bytes: Most that one running task needs besides.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    residual_bytes: float = 0.0
    weight_residual_bytes: float = 0.0
    fixed_bytes: float = 0.0
    working_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class TransferDurations:
    """What stage `source` sends to a later stage `target` for each micro-batch, and the gradients that come back.

    A transfer occupies the link between two submeshes in its direction: transfers of one direction between the same two
    submeshes follow each other; compute goes on meanwhile.
    """

    source: int
    target: int
    forward_s: float
    backward_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineDurations:
    """One pipeline (one replica of the model).

    Attributes:
      schedule: What it runs.
      stages: One entry a stage.
      transfers: Between stages on different submeshes.
      weights_s: For each stage, the time from the beginning of the step until the copies of weights that it does not
        own have arrived; 0 where it owns all.
      gradients_s: For each stage, the time to send its gradients to where they are owned, and to receive and add those
        that it owns; begins when the last backward task of the stage is done.
      update_s: For each stage, the time of the optimizer's update of what it owns. Begins when all gradients of all
        pipelines are there, since a global norm needs them all.
    """

    schedule: Schedule
    stages: tuple[StageDurations, ...]
    transfers: tuple[TransferDurations, ...] = ()
    weights_s: tuple[float, ...] = ()
    gradients_s: tuple[float, ...] = ()
    update_s: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class StepDurations:
    """A whole step: pipelines that run side by side on different devices."""

    pipelines: tuple[PipelineDurations, ...]

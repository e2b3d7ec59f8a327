"""What the caller fixes of the stage search."""

import dataclasses

from autoshard.pipelines.schedule.tasks import ScheduleKind


@dataclasses.dataclass(frozen=True, slots=True)
class PartitionEffort:
    """How long to look.

    Attributes:
      most_enumerated: Look at all cuts if there are no more than this.
      most_simulated: Cuts to run through the simulator at most.
    """

    most_enumerated: int = 20_000
    most_simulated: int = 1_000


@dataclasses.dataclass(frozen=True, slots=True)
class StageOptions:
    """What the caller fixes, and how long to look.

    Attributes:
      num_stages: Stages of each pipeline; None: any number.
      num_micro_batches: Micro-batches of the pipeline that has most; None: any number.
      micro_batch_sizes: Sizes to try; None: all that the table has.
      schedules: Orders to try.
      most_devices_per_stage: None: as many as an option of the table has.
      most_chunks: Stages on one submesh, at most, where they are interleaved.
      limits_bytes: For each slice, what one device may hold; None: its memory less `PlanOptions.memory_reserve`.
      most_candidates: Candidates to cut, at most, in each kind of arrangement.
      partition_effort: How long to look at each.
      num_pipelines: Pipelines side by side, each with its share of the batch; None: any number.
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
    most_chunks: int = 16
    limits_bytes: tuple[float, ...] | None = None
    most_candidates: int = 60
    partition_effort: PartitionEffort = PartitionEffort(most_enumerated=300, most_simulated=3)
    num_pipelines: int | None = None

"""What the caller fixes of the stage search."""

import dataclasses
import numbers
from typing import Any

from autoshard.errors import ConfigError
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
      schedules: Orders to try, or their names: "gpipe", "1f1b", "interleaved", "zb-h1".
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
    schedules: tuple[ScheduleKind | str, ...] = (
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

    def __post_init__(self) -> None:
        """Refuses values that no arrangement can have.

        Raises:
          ConfigError: An option has a value that it does not take.
        """
        for name in ("num_stages", "num_micro_batches", "num_pipelines", "most_devices_per_stage"):
            value = getattr(self, name)
            if not (value is None or _is_count(value)):
                raise ConfigError(
                    f"StageOptions.{name} is a whole number from 1 on, or None for any; received {value!r:.60}. Give "
                    "one, or leave it out."
                )
        for name in ("most_chunks", "most_candidates"):
            if not _is_count(value := getattr(self, name)):
                raise ConfigError(
                    f"StageOptions.{name} is a whole number from 1 on; received {value!r:.60}. Give one, or leave it "
                    "out."
                )
        sizes = self.micro_batch_sizes
        if sizes is not None and not (isinstance(sizes, tuple | list) and sizes and all(map(_is_count, sizes))):
            raise ConfigError(
                f"StageOptions.micro_batch_sizes are numbers of examples; received {sizes!r:.60}. Write (4,) for "
                "micro-batches of 4 examples, or (2, 4) to have both tried."
            )
        names = [kind.value for kind in ScheduleKind]
        given = self.schedules if isinstance(self.schedules, tuple | list) else ()
        if not given or any(not isinstance(kind, ScheduleKind) and kind not in names for kind in given):
            raise ConfigError(
                f"StageOptions.schedules are some of {', '.join(map(repr, names))}; received {self.schedules!r:.60}. "
                "Write ('1f1b',) to have that one tried alone."
            )

    @property
    def schedule_kinds(self) -> tuple[ScheduleKind, ...]:
        """The orders to try."""
        return tuple(map(ScheduleKind, self.schedules))


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1

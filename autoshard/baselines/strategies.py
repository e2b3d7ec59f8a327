"""The strategies that people write by hand, as data: how the data axes and the tensor axes of a mesh are used."""

import dataclasses
import enum


class DataRule(enum.Enum):
    """What the data axes shard, besides the batch.

    Source of the stages: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    2020, section 5. Stage 3 is what PyTorch calls fully sharded data parallelism (FSDP). Stages 1 and 2 differ in how
    gradients travel; where the update begins by casting them, stage 1 too keeps only each device's part afterwards.
    """

    DDP = "ddp"  # nothing: parameters and optimizer state on every device, gradients all-reduced
    ZERO1 = "zero1"  # optimizer state
    ZERO2 = "zero2"  # and gradients, which are reduce-scattered
    ZERO3 = "zero3"  # and parameters, which are gathered where they are used

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are reduce-scattered."""
        return self in (DataRule.ZERO2, DataRule.ZERO3)


@dataclasses.dataclass(frozen=True, slots=True)
class Strategy:
    """A hand-written way to train on several devices.

    Attributes:
      data: The rule of the data axes; None if there are none.
      uses_tensor: Whether there are axes that split the weights inside layers, as in Shoeybi et al., "Megatron-LM",
        2019, section 3: products by columns and by rows, look-up tables by rows or columns, attention by heads.
    """

    data: DataRule | None
    uses_tensor: bool = False

    @property
    def name(self) -> str:
        """Such as `zero3` or `ddp+megatron`."""
        parts = [self.data.value] if self.data else []
        return "+".join(parts + ["megatron"] * self.uses_tensor)


ALL = (
    *(Strategy(rule) for rule in DataRule),
    Strategy(None, uses_tensor=True),
    *(Strategy(rule, uses_tensor=True) for rule in DataRule),
)
"""Every baseline: four of data parallelism, tensor parallelism, and their four mixes."""

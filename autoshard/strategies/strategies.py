"""The strategies that people write by hand, as data: how the data axes and the tensor axes of a mesh are used."""

import dataclasses
import enum

from autoshard.errors import LayoutError


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


class Spread(enum.Enum):
    """Weights of which each device along the data axes holds its own part, so that examples travel to the weights."""

    # Each device has some of the experts: tokens go to their experts and back by all-to-all. Lepikhin et al., "GShard",
    # 2020, section 3; with ZeRO and Megatron: Kim et al., "Scalable and Efficient MoE Training", 2021.
    EXPERTS = "experts"
    # Each device has some rows or columns of every look-up table: what it finds goes to the example.
    # Naumov et al., "Deep Learning Recommendation Model", 2019, section 3, where the rest is `ddp`; by rows and columns
    # as in Mudigere et al., 2021, arXiv:2104.05158. (Whole tables on single devices are no even split of each tensor.)
    TABLES = "tables"
    # The same, but every table alike, as TorchRec's sharding types `ROW_WISE` and `COLUMN_WISE` have it
    # (docs.pytorch.org/torchrec/concepts.html): by rows, of which ids are sent to the owners and rows come back, or by
    # columns. Only where some look-up has fewer ids than its table has rows: tables that training touches sparsely.
    ROWS = "rows"
    COLUMNS = "columns"


class TensorRule(enum.Enum):
    """How the tensor axes split the layers."""

    # Products by columns and by rows, look-up tables by rows or columns, attention by heads. Shoeybi et al.,
    # "Megatron-LM", 2019, section 3. Convolutions are split by channels in the same way.
    MEGATRON = "megatron"
    # And the sequence between them: activations are gathered before a product and reduce-scattered behind it.
    # Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2.
    SEQUENCE = "megatron-sp"


@dataclasses.dataclass(frozen=True, slots=True)
class Strategy:
    """A hand-written way to train on several devices.

    Attributes:
      data: The rule of the data axes; None if there are none.
      tensor: The rule of the axes that split the weights inside layers; None if there are none.
      spread: Weights that the data axes split whatever `data` says; None for none.

    Raises:
      LayoutError: There are no axes at all, or weights are spread over data axes that there are not.
    """

    data: DataRule | None
    tensor: TensorRule | None = None
    spread: Spread | None = None

    def __post_init__(self) -> None:
        if self.data is None and (self.tensor is None or self.spread is not None):
            raise LayoutError(
                "A strategy has a rule for data axes, for tensor axes or for both, and spreads weights over data axes "
                f"alone; received data=None, tensor={self.tensor}, spread={self.spread}."
            )

    @property
    def name(self) -> str:
        """Such as `zero3`, `ddp+experts` or `zero1+megatron-sp`."""
        return "+".join(part.value for part in (self.data, self.spread, self.tensor) if part is not None)


ALL = (
    *(Strategy(rule) for rule in DataRule),
    Strategy(None, TensorRule.MEGATRON),
    *(Strategy(rule, TensorRule.MEGATRON) for rule in DataRule),
    Strategy(None, TensorRule.SEQUENCE),
    *(Strategy(rule, TensorRule.SEQUENCE) for rule in (DataRule.ZERO1, DataRule.ZERO3)),
    *(Strategy(rule, spread=Spread.EXPERTS) for rule in (DataRule.DDP, DataRule.ZERO3)),
    *(Strategy(rule, TensorRule.MEGATRON, Spread.EXPERTS) for rule in (DataRule.DDP, DataRule.ZERO3)),
    *(Strategy(DataRule.DDP, spread=spread) for spread in (Spread.TABLES, Spread.ROWS, Spread.COLUMNS)),
)
"""Every baseline: data parallelism and its three stages of ZeRO, tensor parallelism, and their mixes, for any program;
tensor parallelism that also splits sequences; expert parallelism; split look-up tables."""

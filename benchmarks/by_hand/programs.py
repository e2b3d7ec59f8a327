"""The programs that plans and hand-written strategies are compared on."""

import dataclasses
import pathlib

from autoshard.train.config import TrainConfig, load_config
from by_hand import gpt, strategies
from by_hand.strategies import Strategy

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"
WHOLE_GB = 72.0
"""What a program may use of an H100's 80 GB (`PlanOptions.memory_reserve`)."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, the hand-written strategies that suit it, and the budgets in GB under which it is planned.

    Attributes:
      config: Of a model of the zoo, with what replaces its entries (fewer layers, since layers repeat); None for the
        GPT of `by_hand/gpt.py`. batch: Examples on up to 16 devices; on more, as many more.
      fused_attention: Whether cuDNN computes the attention of that GPT.
    """

    strategies: tuple[Strategy, ...]
    batch: int
    config: str | None = None
    overrides: tuple[str, ...] = ()
    budgets_gb: tuple[float, ...] = (WHOLE_GB,)
    fused_attention: bool = False

    def batch_on(self, num_devices: int) -> int:
        """Examples of a step."""
        return self.batch * max(1, num_devices // 16)

    def loaded(self, num_devices: int, *more: str) -> TrainConfig:
        """The configuration of a model of the zoo, with what replaces more of its entries."""
        overrides = (*self.overrides, f"data.batch_size={self.batch_on(num_devices)}", *more)
        return load_config(CONFIGS / f"{self.config}.yaml", overrides)

    def sizes(self, num_devices: int) -> gpt.Sizes:
        """Of the GPT."""
        return gpt.Sizes(batch=self.batch_on(num_devices), fused_attention=self.fused_attention)


_TRANSFORMER = strategies.OF_TRANSFORMERS
PROGRAMS = {
    "gpt": Program(strategies.OF_GPT, 16, budgets_gb=(WHOLE_GB, 12.5, 8.0, 6.0)),
    "gpt_fused": Program(strategies.OF_GPT, 16, fused_attention=True),
    "llama": Program(_TRANSFORMER, 16, "llama_8b", ("model.overrides.num_layers=4", "data.sequence_length=2048")),
    "moe": Program(
        (*_TRANSFORMER, strategies.EXPERTS),
        64,
        "moe_10b",
        ("model.overrides.num_layers=2", "model.overrides.num_experts=32"),
    ),
    "vit": Program(_TRANSFORMER, 256, "vit_h14", ("model.overrides.num_layers=4",)),
    "encoder_decoder": Program(_TRANSFORMER, 64, "encoder_decoder_3b", ("model.overrides.num_layers=2",)),
    "dlrm": Program((strategies.TABLES, strategies.DDP, strategies.FSDP), 8192, "dlrm_criteo"),
    "wide_resnet": Program(
        (strategies.DDP, strategies.FSDP, strategies.FSDP_REGATHERED),
        256,
        "wide_resnet_250m",
        ("model.overrides.blocks_per_stage=[1,1,1,1]",),
    ),
}

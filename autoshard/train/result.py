"""How a training run ended."""

import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended.

    Attributes:
        step: the last step taken, counted from the first run of this output folder.
        loss: the loss of that step; None if this call took no step.
        interrupted: the run was stopped by Ctrl-C or by SIGTERM before its last step.
        output_dir: folder of `config.yaml`, `plan.json`, `metrics.jsonl`, `checkpoints/` and what else was asked for.
    """

    step: int
    loss: float | None
    interrupted: bool
    output_dir: pathlib.Path

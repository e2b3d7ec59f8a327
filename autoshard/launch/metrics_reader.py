"""Reads the training steps that a run reported in `metrics.jsonl`."""

import json
import pathlib

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt

METRICS = "metrics.jsonl"
"""Name of the file in the output folder."""

_TAIL_BYTES = 1 << 16
"""More than a line of training and all lines of evaluations after it."""


class StepMetrics(BaseModel):
    """What a run reported of a training step; other entries of the line are left out.

    Attributes:
        step: counted from 1.
        generation: that took it; 0 for a run without a supervisor.
        loss: None if it was not finite.
        items_per_s: tokens, images, ... that all devices took in each second, over the steps since the last report.
        item: what they are, in the plural.
        step_time_s: mean time of a step.
        compiled: the time includes compiling the step.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: PositiveInt
    generation: NonNegativeInt = 0
    loss: float | None = None
    items_per_s: NonNegativeFloat | None = None
    item: str = "items"
    step_time_s: NonNegativeFloat | None = None
    compiled: bool = False


def read_metrics(run_dir: pathlib.Path) -> tuple[StepMetrics, ...]:
    """All training steps that a run reported and did not take back, oldest first.

    Lines that are no report of a training step, or were cut short, are left out.
    """
    path = run_dir / METRICS
    return _steps(path.read_bytes()) if path.exists() else ()


def last_metrics(run_dir: pathlib.Path) -> StepMetrics | None:
    """The last training step that a run reported; None before the first."""
    path = run_dir / METRICS
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
        found = _steps(file.read())
    return found[-1] if found else None


def _steps(content: bytes) -> tuple[StepMetrics, ...]:
    found = []
    for line in content.splitlines():
        try:
            entry = json.loads(line)
            if entry["kind"] == "train":
                found.append(StepMetrics.model_validate(entry))
        except (ValueError, KeyError, TypeError):  # ValueError: also pydantic.ValidationError
            continue
    return tuple(found)

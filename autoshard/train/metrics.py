"""What a run reports: figures of a training step or of an evaluation, as a line for people and as a line of JSON.

The line for people has the form and the names of MaxText's log, so that what reads that log reads this one.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from autoshard.files import LineFile, write_text_atomically
from autoshard.launch.messages import SlowDevices, Straggler


@dataclasses.dataclass(frozen=True, slots=True)
class StepWork:
    """What one training step does; fixed over a run.

    Attributes:
        num_devices: devices that share the step.
        items: what throughput counts (tokens, images, ...) in the batch of all devices.
        item: its name in the plural.
        model_flops: floating-point operations of the model's matrix products, forward and backward, over all devices.
            What MaxText counts: no optimizer, and nothing that is computed again.
        planned_flops: operations that one device carries out by the plan's count: everything, optimizer and
            recomputation included.
    """

    num_devices: int
    items: int
    item: str
    model_flops: float
    planned_flops: float


@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """Measurements over the training steps since the last report.

    Attributes:
        step: the last step measured, counted from 1.
        metrics: its metrics by name; always has `loss`.
        step_time_s: mean wall-clock time per step, evaluations and the start of checkpoints left out.
        data_wait_s: the part of it in which the step waited for its batch.
        compiled: the time includes compiling the step.
        work: what each step does.
    """

    step: int
    metrics: Mapping[str, float]
    step_time_s: float
    data_wait_s: float
    compiled: bool
    work: StepWork

    @property
    def items_per_s_per_device(self) -> float:
        """Throughput of one device."""
        return self.work.items / self.work.num_devices / self.step_time_s

    @property
    def model_tflops_per_s_per_device(self) -> float:
        """1e12 operations of the model per second and device."""
        return self.work.model_flops / self.work.num_devices / self.step_time_s / 1e12

    def line(self) -> str:
        """One line for people, in MaxText's form."""
        figures = [
            f"completed step: {self.step}",
            f"seconds: {self.step_time_s:.3f}",
            f"TFLOP/s/device: {self.model_tflops_per_s_per_device:.3f}",
            f"{self.work.item.capitalize()}/s/device: {self.items_per_s_per_device:.3f}",
            f"total_weights: {self.work.items}",
            f"loss: {self.metrics['loss']:.3f}",
        ]
        return ", ".join(figures + [f"{name}: {value:.4g}" for name, value in _others(self.metrics)])

    def record(self) -> dict[str, Any]:
        """All figures by name, for a line of JSON."""
        return {
            "kind": "train",
            "step": self.step,
            **self.metrics,
            "step_time_s": self.step_time_s,
            "data_wait_s": self.data_wait_s,
            "model_tflops_per_s_per_device": self.model_tflops_per_s_per_device,
            "planned_tflops_per_s_per_device": self.work.planned_flops / self.step_time_s / 1e12,
            "items_per_s": self.work.items / self.step_time_s,
            "items_per_s_per_device": self.items_per_s_per_device,
            "items": self.work.items,
            "item": self.work.item,
            "compiled": self.compiled,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class EvalReport:
    """An evaluation on held-out data.

    Attributes:
        step: training steps taken before it.
        metrics: means over the batches, by name; always has `loss`.
        items: tokens, images, ... evaluated.
        eval_time_s: wall-clock time.
    """

    step: int
    metrics: Mapping[str, float]
    items: int
    eval_time_s: float

    def line(self) -> str:
        """One line for people, in MaxText's form."""
        figures = [f"eval metrics after step: {self.step}", f"loss={self.metrics['loss']:.3f}"]
        figures += [f"{name}={value:.4g}" for name, value in _others(self.metrics)]
        return ", ".join([*figures, f"total_weights={self.items}"])

    def record(self) -> dict[str, Any]:
        """All figures by name, for a line of JSON."""
        figures = {"items": self.items, "eval_time_s": self.eval_time_s, "items_per_s": self.items / self.eval_time_s}
        return {"kind": "eval", "step": self.step, **self.metrics, **figures}


class StragglerReport(SlowDevices):
    """Slow devices, as lines."""

    def line(self) -> str:
        """One line for people."""
        names = ", ".join(f"rank {rank} of `{self.axis}` is {w:.1f} times slower" for rank, w in self.slow)
        gain = f"{self.before_s * 1e3:.1f} -> {self.after_s * 1e3:.1f} ms a step, {self.before_s / self.after_s:.2f}x"
        shares = " ".join(f"{share:.0%}" for share in self.shares)
        text = f"stragglers after step {self.step}: {names or 'no rank is slow'}; {self.done}: {gain}; shares {shares}"
        if self.wants_plan:
            text += "; this has lasted long and shares do not even it out: plan again with the measured speeds"
        return text

    def record(self) -> dict[str, Any]:
        """All figures by name, for a line of JSON."""
        return {"kind": "straggler", **self.model_dump()}

    @property
    def message(self) -> Straggler:
        """What a supervisor is told."""
        return Straggler(**self.model_dump())


Report = StepReport | EvalReport | StragglerReport


def _others(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(name, value) for name, value in metrics.items() if name != "loss"]


class MetricsFile:
    """Appends reports to a file of JSON lines."""

    def __init__(self, path: pathlib.Path, after_step: int, generation: int = 0):
        """Opens `path`, dropping lines of steps after `after_step`, which the run is about to take again.

        Args:
            path: the file.
            after_step: the step that the run continues from, or 0.
            generation: that of a supervised run, told in each line.
        """
        kept = []
        if after_step and path.exists():
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= after_step]
        write_text_atomically(path, "".join(f"{line}\n" for line in kept))
        self._lines = LineFile(path)
        self._generation = generation

    def write(self, report: Report) -> None:
        """Adds one line, complete on disk when this returns to readers of the file; null for what is not finite.

        Raises:
            OSError: it cannot be written, as on a full disk; it will be added with the next one.
        """
        plain = lambda value: None if isinstance(value, float) and not math.isfinite(value) else value
        record = {name: plain(value) for name, value in {**report.record(), "generation": self._generation}.items()}
        self._lines.add(json.dumps(record, allow_nan=False))


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # a line cut short when a run was killed
        return float("inf")

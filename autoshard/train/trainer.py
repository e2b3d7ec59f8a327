"""The training loop: plan the step, make the state sharded, take steps, keep metrics and checkpoints."""

import dataclasses
import pathlib
import time
from typing import Any

import jax
import rich.console

from autoshard.errors import ConfigError
from autoshard.files import write_text_atomically, yaml_text
from autoshard.interrupts import stop_on_signals
from autoshard.train.checkpoints import Checkpoints
from autoshard.train.config import TrainConfig
from autoshard.train.data import TrainData
from autoshard.train.metrics import Display, MetricsFile, StepMetrics
from autoshard.train.planning import make_plan_visibly
from autoshard.train.registry import load_data, output_folder, train_functions


@dataclasses.dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended.

    Attributes:
        step: the last step taken, counted from the first run of this output folder.
        loss: the loss of that step in nats per token; None if this call took no step.
        interrupted: the run was stopped by Ctrl-C before its last step.
        output_dir: folder of `config.yaml`, `plan.json`, `metrics.jsonl` and `checkpoints/`.
    """

    step: int
    loss: float | None
    interrupted: bool
    output_dir: pathlib.Path


def train(config: TrainConfig, console: rich.console.Console | None = None) -> TrainResult:
    """Carries out the run that `config` describes, on the live devices.

    The state is saved at the end, and on Ctrl-C after the current step. With `train.resume` the run continues from the
    latest checkpoint, with the batches that an uninterrupted run would have seen.

    Args:
        config: the run.
        console: where progress is shown; standard output by default.

    Returns:
        How it ended.

    Raises:
        ConfigError: settings that contradict each other, or an output folder that holds another run.
        AutoshardError: no plan, or one that does not fit the live devices.
    """
    console = console or rich.console.Console()
    functions = train_functions(config)
    data = load_data(config)
    folder = output_folder(config)
    with _open_checkpoints(config, folder) as checkpoints:
        first_step = checkpoints.latest_step() or 0
        if first_step >= config.train.steps:
            console.print(f"Nothing to do: {folder} holds a checkpoint of step {first_step}, the last one wanted.")
            return TrainResult(first_step, None, False, folder)

        started_s = time.perf_counter()
        plan = make_plan_visibly(config, functions, console)
        plan.save(folder / "plan.json")
        write_text_atomically(folder / "config.yaml", yaml_text(config.model_dump(mode="json", exclude_unset=True)))
        summary = str(plan).partition("\n\n")[0]
        console.print(summary, markup=False, highlight=False, soft_wrap=True)
        console.print(
            f"Planned in {time.perf_counter() - started_s:.1f} s; for the whole plan: "
            f"autoshard explain {folder / 'plan.json'}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

        state = plan.init(functions.init, config.train.seed)
        if first_step:
            state = checkpoints.restore(first_step, state)
            console.print(f"Resumed from the checkpoint of step {first_step}.", highlight=False)
        step = plan.jit(functions.step)
        metrics_file = MetricsFile(folder / "metrics.jsonl", first_step)
        with Display(console, config.train.steps, first_step) as display:
            state, result = _run_steps(config, step, state, data, first_step, metrics_file, display, folder)
        checkpoints.save(result.step, state)
        return result


def _open_checkpoints(config: TrainConfig, folder: pathlib.Path) -> Checkpoints:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"train.output_dir: {folder} cannot be made: {error.strerror}. Choose another.") from error
    checkpoints = Checkpoints(folder / "checkpoints")
    latest = checkpoints.latest_step()
    if latest is not None and not config.train.resume:
        checkpoints.__exit__()
        raise ConfigError(
            f"train.output_dir: {folder} already holds a run, saved at step {latest}, and train.resume is false. "
            "Set train.resume=true to continue it, or choose another train.output_dir."
        )
    return checkpoints


def _run_steps(
    config: TrainConfig,
    step: Any,
    state: Any,
    data: TrainData,
    first_step: int,
    metrics_file: MetricsFile,
    display: Display,
    folder: pathlib.Path,
) -> tuple[Any, TrainResult]:
    """Takes the steps after `first_step`, until the last one or Ctrl-C."""
    tokens_per_step = config.data.batch_size * data.items_per_example
    loss, done, reported, since_s = 0.0, first_step, first_step, time.perf_counter()
    with stop_on_signals() as stop:
        while done < config.train.steps and not stop.requested:
            state, metrics = step(state, data.batches[done])
            # Waiting for each step costs a dispatch of well under a millisecond, and keeps XLA:CPU from queueing
            # collectives of two steps on the same threads, where they can wait for each other for ever.
            loss = float(jax.block_until_ready(metrics)["loss"])
            done += 1
            display.advance()
            compiled = done == first_step + 1
            if compiled or done % config.train.log_every == 0 or done == config.train.steps or stop.requested:
                step_time_s = (time.perf_counter() - since_s) / (done - reported)
                report = StepMetrics(done, loss, step_time_s, tokens_per_step / step_time_s, compiled)
                metrics_file.write(report)
                display.report(report)
                reported, since_s = done, time.perf_counter()
    return state, TrainResult(done, loss, done < config.train.steps, folder)

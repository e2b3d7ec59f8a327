"""Training with embedding tables in host memory: `execution.mode` of a configuration.

Steps follow each other in spans between which nothing is on its way: a span ends where the run is evaluated, saved, or
over, and all rows are with the workers then.
"""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
import rich.console
from autoshard_models.train_step import TrainFunctions

from autoshard.api import BasePlan, Plan
from autoshard.checkpoints.agreement import from_first
from autoshard.elastic.decisions import is_first
from autoshard.elastic.worker import Worker
from autoshard.errors import ConfigError, TrainingError
from autoshard.files import write_text_atomically, yaml_text
from autoshard.host_tables.checkpoint_folder import saved_step
from autoshard.host_tables.hosted import HostTables
from autoshard.host_tables.pipeline import Stepped
from autoshard.interrupts import StopRequest, stop_on_signals
from autoshard.offloading.host_part import HostPart
from autoshard.offloading.hosted_plan import HostTablesPlan
from autoshard.train.config import TrainConfig
from autoshard.train.data import TrainData
from autoshard.train.evaluation import evaluation_of
from autoshard.train.feed import feed
from autoshard.train.metrics import StepReport, StepWork
from autoshard.train.nonfinite import is_bad
from autoshard.train.planning import arguments, options_of, shown_progress
from autoshard.train.profiling import Profile
from autoshard.train.registry import runs_in_stages
from autoshard.train.reports import Reports
from autoshard.train.result import TrainResult
from autoshard.train.table_places import host_part
from autoshard.train.work import step_work
from autoshard.train_step import TrainStep


def train_on_host(
    config: TrainConfig,
    functions: TrainFunctions,
    data: TrainData,
    folder: pathlib.Path,
    console: rich.console.Console,
    worker: Worker,
) -> TrainResult | None:
    """Carries out the run that `config` describes with tables in host memory.

    Args:
        config: the run. functions: those of a step whose loss is open. data: what it trains on.
        folder: its output folder, which is there.
        console: where progress is shown. worker: by which several processes agree when to stop.

    Returns:
        How it ended; None where `execution.mode` is `auto` and all tables are better on the devices.

    Raises:
        ConfigError: settings that contradict each other, or an output folder that holds another run.
        TrainingError: a worker was lost; the last checkpoint is untouched.
        TraceError: the loss has no tables, or the optimizer does not fit.
    """
    _refuse(config)
    say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
    part = host_part(config, functions.step, *arguments(config, functions)[:2])
    if part is None:
        return None
    if part.placed is not None:
        say(str(part))
    section = config.train
    first_step = _first_step(config, folder)
    if first_step >= section.steps:
        say(f"Nothing to do: {folder} holds a checkpoint of step {first_step}, and train.steps is {section.steps}.")
        return TrainResult(first_step, None, False, folder)
    with _host_tables(config, functions, data, part, console) as held:
        say(str(held))
        assert isinstance(held.plan, Plan)
        say(str(held.plan).partition("\n\n")[0])
        if first_step:
            say(f"Resumed from the checkpoint of step {held.restore(folder / 'checkpoints')}.")
        if is_first():
            _kept(config, part, held).save(folder / "plan.json")
            write_text_atomically(folder / "config.yaml", yaml_text(config.model_dump(mode="json", exclude_unset=True)))
        work = step_work(functions, data, held.plan, config.data.batch_size)
        with Reports(section, folder if is_first() else None, console, first_step) as reports:
            return _Loop(config, functions, data, held, reports, work, folder, worker).take_steps(first_step)


def _kept(config: TrainConfig, part: HostPart, held: HostTables) -> BasePlan:
    """The plan as it is kept: with the configuration, and with the decision about tables where there was one."""
    assert isinstance(held.plan, Plan)
    over_rows = dataclasses.replace(held.plan, configuration=config.model_dump_json())
    if part.placed is None:
        return over_rows
    return HostTablesPlan(part.placed, over_rows, str(held.sparse.update), config.execution.lazy)


def _refuse(config: TrainConfig) -> None:
    """Raises ConfigError for settings that are not for tables in host memory."""
    plan = config.plan
    for name, is_set, instead in (
        ("plan.stages, or a plan.cluster of several kinds of devices,", runs_in_stages(config), "Leave them out"),
        ("plan.pipelines `search`", plan.pipelines == "search", "Leave it out"),
        ("plan.pins", bool(plan.pins), "Leave them out"),
        ("plan.start", plan.start is not None, "Leave it out"),
        ("plan.memory_budget_bytes", plan.memory_budget_bytes is not None, "Leave it out"),
        ("stragglers.mode", config.stragglers.mode != "off" or config.stragglers.shares_batch, "Set it to `off`"),
    ):
        if is_set:
            raise ConfigError(
                f"{name}: is not for tables in host memory (execution.mode is `{config.execution.mode}`), whose step "
                f"over the rows of a batch is one program on one mesh. {instead}, or execution.mode."
            )


def _first_step(config: TrainConfig, folder: pathlib.Path) -> int:
    """The step of the newest checkpoint of the run's folder; 0 if there is none."""
    step, place = saved_step(folder / "checkpoints"), folder / "checkpoints"
    is_of_devices = lambda: place.exists() and any(path.name.isdecimal() for path in place.iterdir())
    if step is None and from_first(is_of_devices):
        raise ConfigError(
            f"train.output_dir: {folder} holds a run whose tables are on devices; this one has them in host memory "
            f"(execution.mode is `{config.execution.mode}`). Choose another folder, or leave execution.mode out."
        )
    if step is not None and not config.train.resume:
        raise ConfigError(
            f"train.output_dir: {folder} already holds a run, saved at step {step}, and train.resume is false. "
            "Set train.resume=true to continue it, or choose another train.output_dir."
        )
    return step or 0


def _host_tables(
    config: TrainConfig,
    functions: TrainFunctions,
    data: TrainData,
    part: HostPart,
    console: rich.console.Console,
) -> HostTables:
    assert isinstance(functions.step, TrainStep)
    state = jax.eval_shape(functions.init, config.train.seed)
    sample = (data.batches[n] for n in range(config.execution.sample_batches))
    with shown_progress(console) as show:
        return HostTables(
            functions.step,
            functools.partial(functions.init, config.train.seed),
            data.batches.shapes(),
            tables=part.tables,
            hot_rows=part.hot_rows_of(functions.step, state, sample, config.plan.lookups.is_ranked),
            pooled=part.pooled,
            host_layers=part.host_layers,
            lazy=config.execution.lazy,
            execution=part.execution,
            cluster=config.plan.cluster,
            mesh=config.plan.mesh,
            options=options_of(config, show),
        )


class _Loop:
    """The steps of a run, and what happens between them."""

    def __init__(
        self,
        config: TrainConfig,
        functions: TrainFunctions,
        data: TrainData,
        tables: HostTables,
        reports: Reports,
        work: StepWork,
        folder: pathlib.Path,
        worker: Worker,
    ):
        self._config, self._section, self._data = config, config.train, data
        self._tables, self._reports, self._work, self._folder, self._worker = tables, reports, work, folder, worker
        self._evaluate = None
        if self._section.eval_every is not None:
            one = tables.evaluation(functions.evaluate, data.eval_batches.shapes())
            take = lambda _: lambda number: one(data.eval_batches[number])
            self._evaluate = evaluation_of(take, self._section.eval_batches, work.items)
        self._metrics = {"loss": float("nan")}

    def take_steps(self, first_step: int) -> TrainResult:
        """Takes the steps after `first_step`, until the last one or until it is asked to stop."""
        section, last, done = self._section, self._section.steps, first_step
        coming = feed(self._data.batches, first_step, None, self._config.data.read_ahead)
        profile, worker = Profile(section, self._folder / "profile"), self._worker
        with stop_on_signals((signal.SIGINT, signal.SIGTERM)) as asked, coming as batches, profile:
            worker.listen(asked)
            worker.begin_steps()
            log = _Log(self._reports, self._work, section.log_every, first_step, last)
            while done < last and not worker.should_stop():
                stop = min(
                    _next_multiple(done, every) for every in (section.eval_every, section.checkpoint_every, last)
                )
                done = self._span(
                    itertools.islice((fed.batch for fed in batches), stop - done), done, asked, log, profile
                )
                if (
                    self._evaluate is not None
                    and section.eval_every
                    and (done == last or not done % section.eval_every)
                ):
                    self._reports.report(self._evaluate(done, None))
                if section.checkpoint_every is not None and not done % section.checkpoint_every:
                    self._save()
                log.restart()
            if done < last:
                self._reports.say(f"Stopping after step {done}, and saving. Another signal ends the run unsaved.")
            self._save()
        loss = self._metrics["loss"] if done > first_step else None
        return TrainResult(done, loss, done < last, self._folder)

    def _span(self, batches: Iterator[Any], done: int, asked: StopRequest, log: "_Log", profile: Profile) -> int:
        """Takes a step for each batch, unless it is asked to stop; returns the number of the last step."""
        with contextlib.closing(self._tables.steps(batches)) as steps:
            while not self._worker.should_stop():
                with profile.begin(done + 1):
                    stepped = next(steps, None)
                    if stepped is None:
                        break
                    # Each step is waited for, as in `trainer.py`.
                    measured = jax.block_until_ready(stepped.metrics)
                self._metrics = {name: float(x) for name, x in measured.items()}
                done += 1
                if profile.end(done):
                    self._reports.say(
                        f"The trace of the last {self._section.profile_steps} steps is in {self._folder}/profile."
                    )
                if is_bad(self._metrics):
                    self._not_finite(done)
                log.stepped(done, self._metrics, stepped, asked.requested)
                self._worker.stepped(done)
        return done

    def _not_finite(self, done: int) -> None:
        fault = f"The loss of step {done} is {self._metrics['loss']}."
        if self._section.on_nonfinite == "stop":
            raise TrainingError(
                f"{fault} Where that began is not sought with tables in host memory; the last checkpoint is untouched. "
                "Lower the learning rate or clip gradients, then resume; or leave execution.mode out to have it sought."
            )
        self._reports.say(f"warning: {fault} The run goes on, since train.on_nonfinite is `continue`.")

    def _save(self) -> None:
        if saved_step(self._folder / "checkpoints") != self._tables.num_steps:
            self._tables.save(self._folder / "checkpoints", self._section.keep_checkpoints)


class _Log:
    """Lines of metrics: means over the steps since the last one."""

    def __init__(self, reports: Reports, work: StepWork, every: int, first_step: int, last: int):
        self._reports, self._work, self._every, self._first, self._last = reports, work, every, first_step, last
        self._reported, self._spent_s, self._waited_s, self._staleness = first_step, 0.0, 0.0, 0
        self.restart()

    def restart(self) -> None:
        """What was done since the last step does not count."""
        self._began_s = time.perf_counter()

    def stepped(self, done: int, metrics: dict[str, float], stepped: Stepped, is_asked: bool) -> None:
        """One more step is done."""
        now_s = time.perf_counter()
        self._spent_s, self._began_s = self._spent_s + now_s - self._began_s, now_s
        self._waited_s += stepped.wait_s
        self._staleness = max(self._staleness, stepped.staleness)
        self._reports.advance()
        is_compiled = done == self._first + 1
        if is_compiled or done % self._every == 0 or done == self._last or is_asked:
            steps = done - self._reported
            told = metrics | {"rows": float(stepped.num_rows), "staleness": float(self._staleness)}
            spent_s, waited_s = self._spent_s / steps, self._waited_s / steps
            self._reports.report(StepReport(done, told, spent_s, waited_s, is_compiled, self._work))
            self._reported, self._spent_s, self._waited_s, self._staleness = done, 0.0, 0.0, 0


def _next_multiple(done: int, every: int | None) -> int:
    """The next multiple of a number of steps; none if there is no such number."""
    return (done // every + 1) * every if every else 1 << 62

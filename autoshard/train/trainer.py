"""The training loop: plan the step, make the state sharded, take steps, evaluate, keep metrics and checkpoints."""

import contextlib
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import rich.console
from autoshard_models.train_step import TrainFunctions

from autoshard.api import Plan, StagedPlan, load
from autoshard.api.balanced_call import BalancedCall
from autoshard.checkpoints.agreement import from_all, from_first
from autoshard.checkpoints.checkpoints import Checkpoints
from autoshard.elastic.decisions import decided_by_the_first, is_first
from autoshard.elastic.worker import Cadence, Worker, run_identity
from autoshard.errors import ConfigError, TrainingError
from autoshard.files import write_text_atomically, yaml_text
from autoshard.host_tables.checkpoint_folder import saved_step
from autoshard.interrupts import stop_on_signals
from autoshard.launch.messages import Committed, NotSaved, Phase, Rejected, Tier
from autoshard.plans.make import load_cluster
from autoshard.train.cluster_devices import check_devices
from autoshard.train.config import ExecutionSection, TrainConfig
from autoshard.train.data import TrainData
from autoshard.train.evaluation import evaluator
from autoshard.train.feed import feed
from autoshard.train.held_folder import held_folder
from autoshard.train.metrics import EvalReport, StepReport, StepWork, StragglerReport
from autoshard.train.micro_batches import as_planned, plan_in_micro_batches
from autoshard.train.nonfinite import bad_leaves, is_bad, stop
from autoshard.train.on_host import train_on_host
from autoshard.train.plan_reuse import kept_plan, why_unfit
from autoshard.train.planning import make_plan_visibly
from autoshard.train.profiling import Profile
from autoshard.train.registry import load_data, output_folder, train_functions, whole_functions
from autoshard.train.reports import Reports
from autoshard.train.result import TrainResult
from autoshard.train.run import Run, planned_run
from autoshard.train.shared_batch import SharedBatchCall
from autoshard.train.slow_replicas import SlowReplicas
from autoshard.train.stragglers import Stragglers
from autoshard.train.tensorboard import check_tensorboard
from autoshard.train.work import step_work


def train(
    config: TrainConfig, console: rich.console.Console | None = None, worker: Worker | None = None
) -> TrainResult:
    """Carries out the run that `config` describes, on the live devices; see `carry_out`."""
    return carry_out(config, train_functions(config), load_data(config), console, worker)


def carry_out(
    config: TrainConfig,
    functions: TrainFunctions,
    data: TrainData,
    console: rich.console.Console | None = None,
    worker: Worker | None = None,
) -> TrainResult:
    """Trains `functions` on `data` as `config` says, on the live devices.

    The state is saved every `train.checkpoint_every` steps, at the end, and on Ctrl-C or SIGTERM after the current
    step (of several processes: one step later at most). With `train.resume` the run continues
    from the latest checkpoint, with the batches that an uninterrupted run would have seen, and with the plan it had.

    Args:
        config: the run.
        functions, data: what `train_functions` and `load_data` make of it, or others of the same kind.
        console: where progress is shown; standard output by default. Only the first process shows any.
        worker: the line to a supervisor; None without one.

    Returns:
        How it ended.

    Raises:
        ConfigError: settings that contradict each other, or an output folder that holds another run.
        ElasticError: another run is going on in the output folder.
        TrainingError: the run cannot go on; the message tells what it left.
        AutoshardError: no plan, or one that does not fit the live devices.
    """
    worker = worker or Worker.alone()
    console = console or rich.console.Console()
    if not is_first():
        console = rich.console.Console(quiet=True)
    if config.train.tensorboard:
        check_tensorboard()
    if worker.is_dry_run:
        return _dry_run(config, functions, data, output_folder(config), console, worker)
    with held_folder(config, worker) as folder:
        return _carry_out(config, functions, data, folder, console, worker)


def _carry_out(
    config: TrainConfig,
    functions: TrainFunctions,
    data: TrainData,
    folder: pathlib.Path,
    console: rich.console.Console,
    worker: Worker,
) -> TrainResult:
    """See `carry_out`; in `folder`, which is this run's."""
    say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
    if config.execution.mode is not None:
        if worker.is_supervised:
            raise ConfigError(
                "execution.mode: tables in host memory belong to one process, which its supervisor would not move; "
                f"received `{config.execution.mode}` under `autoshard launch`. Use `autoshard train`, or leave it out."
            )
        done = train_on_host(config, functions, data, folder, console, worker)
        if done is not None:
            return done
        say("All tables are better on the devices; the run goes on as without execution.mode.")
        config = config.model_copy(update={"execution": ExecutionSection()})
    check_devices(config.plan.cluster, jax.device_count(), jax.device_count(), "JAX sees")
    with _checkpoints(config, folder, say, worker) as checkpoints:
        last_step = checkpoints.latest_step() or 0
        on_disk = checkpoints.latest_step(Tier.DISK) or 0  # what is in memory only is still to be saved
        if on_disk >= (wanted := config.train.steps):
            say(f"Nothing to do: {folder} holds a checkpoint of step {on_disk}, and train.steps is {wanted}.")
            return TrainResult(on_disk, None, False, folder)
        if last_step:
            checkpoints.check_fit(jax.eval_shape(functions.init, config.train.seed))
        if worker.is_supervised:
            run = _run_of_generation(config, functions, data, folder, console, worker)
        else:
            plan = _plan(config, functions, folder, last_step, console)
            run = planned_run(config, functions, data, plan, folder)
        restored = worker.restored(lambda: run.saved_state(checkpoints), run.initial_state)
        state, first_step = restored.state, restored.step
        if restored.source is not None:
            say(f"Resumed from the checkpoint of step {first_step}, from {restored.source}.")
        elif last_step:
            say("warning: no checkpoint of this run is undamaged; it begins anew, with step 1.")
        work = step_work(run.functions, data, run.plan, config.data.batch_size)
        with Reports(
            config.train, folder if is_first() else None, console, first_step, generation=worker.generation
        ) as reports:
            return _Loop(run, checkpoints, reports, work, worker).take_steps(state, first_step)


def _dry_run(
    config: TrainConfig,
    functions: TrainFunctions,
    data: TrainData,
    folder: pathlib.Path,
    console: rich.console.Console,
    worker: Worker,
) -> TrainResult:
    """Plans, compiles and takes one step from the initial state, for what that leaves to later generations.

    All that a generation compiles is compiled here too, so that it finds it.
    """
    from_first(lambda: None)  # as the memory tier does when it is opened
    from_all(None)
    run = _run_of_generation(config, functions, data, folder, console, worker)
    state = worker.restored(lambda: None, run.initial_state).state
    worker.begin_steps()
    state, _ = jax.block_until_ready(run.step(state, run.batch(0)))
    bad_leaves(state)
    if config.train.eval_every is not None:
        evaluator(run, num_batches=1, items=1)(1, state)
    return TrainResult(0, None, False, folder)


@contextlib.contextmanager
def _checkpoints(
    config: TrainConfig, folder: pathlib.Path, say: Callable[[str], None], worker: Worker
) -> Iterator[Checkpoints]:
    """The checkpoints of the run, in its folder."""
    if (on_host := saved_step(folder / "checkpoints")) is not None:
        raise ConfigError(
            f"train.output_dir: {folder} holds a run with tables in host memory, saved at step {on_host}; this one "
            "has them on the devices. Choose another folder, or give execution.mode, as that run did."
        )
    section = config.train
    cadence = Cadence(section.checkpoint_every, section.memory_every, section.keep_checkpoints)
    identity = lambda: {"config": config.model_dump(mode="json"), **run_identity(folder)}
    with worker.checkpoints(folder / "checkpoints", cadence, identity, lambda what: _warn(what, say)) as checkpoints:
        latest = checkpoints.latest_step()
        if latest is not None and not section.resume:
            raise ConfigError(
                f"train.output_dir: {folder} already holds a run, saved at step {latest}, and train.resume is false. "
                "Set train.resume=true to continue it, or choose another train.output_dir."
            )
        yield checkpoints


def _warn(what: Committed | Rejected | NotSaved, say: Callable[[str], None]) -> None:
    """Shows what becomes of checkpoints, where it is not as it should be."""
    if isinstance(what, Rejected):
        say(f"warning: a checkpoint is damaged and was set aside as {what.path}: {what.file}: {what.why}.")
    elif isinstance(what, NotSaved):
        say(f"warning: the checkpoint of step {what.step} is not saved: {what.why}. The run goes on.")


def _plan(
    config: TrainConfig, functions: TrainFunctions, folder: pathlib.Path, first_step: int, console: rich.console.Console
) -> Plan | StagedPlan:
    """The plan of the run, written to its folder; one for all processes, since two searches may end differently."""
    say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
    path = folder / "plan.json"

    def decide() -> str:
        started_s = time.perf_counter()
        kept = kept_plan(config, functions, folder) if first_step else None
        if kept is not None and kept.plan is not None:
            say(f"Continuing with the plan of this run, {path}.")
        else:
            if kept is not None:
                say(f"Planning again: {kept.reason}.")
            plan = make_plan_visibly(config, functions, console)
            plan.save(path)
            say(str(plan).partition("\n\n")[0])
            say(f"Planned in {time.perf_counter() - started_s:.1f} s; for the whole plan: autoshard explain {path}")
        write_text_atomically(folder / "config.yaml", yaml_text(config.model_dump(mode="json", exclude_unset=True)))
        return path.read_text()

    text = decided_by_the_first(decide)
    if not is_first() and (not path.exists() or path.read_text() != text):
        raise ConfigError(
            f"train.output_dir: all processes need the same folder, for plan and checkpoints; {folder} is not that of "
            "the first process. Choose one on a file system that all of them see."
        )
    return load(path)


def _run_of_generation(
    config: TrainConfig,
    functions: TrainFunctions,
    data: TrainData,
    folder: pathlib.Path,
    console: rich.console.Console,
    worker: Worker,
) -> Run:
    """The run under its plan for these devices, compiled; a run that comes back to a set of devices goes on as before.

    Batch and learning rate are those of `config`, whatever the devices; where these are too few to hold the step, it is
    run in more micro-batches.
    """
    say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
    make = lambda own, its: make_plan_visibly(own, its, console)
    known = {config.optimizer.num_micro_batches: functions}

    def functions_of(plan: Plan | StagedPlan) -> tuple[TrainConfig, TrainFunctions]:
        planned = as_planned(config, plan)
        count = planned.optimizer.num_micro_batches
        if count not in known:
            known[count] = whole_functions(planned)
        return planned, known[count]

    chosen = worker.choose_plan(
        make=lambda: plan_in_micro_batches(config, functions, make, say),
        why_unfit=lambda plan: why_unfit(plan, *functions_of(plan)),
        cluster=None if config.plan.cluster is None else load_cluster(config.plan.cluster),
    )
    if is_first() and not worker.is_dry_run:
        write_text_atomically(folder / "config.yaml", yaml_text(config.model_dump(mode="json", exclude_unset=True)))
    planned, its_functions = functions_of(chosen.plan)
    with worker.during(Phase.PLANNING):
        run = planned_run(planned, its_functions, data, chosen.plan, folder)
    worker.compile(chosen, run.compile)
    return run


class _Loop:
    """The steps of a run, and all that happens between them."""

    def __init__(self, run: Run, checkpoints: Checkpoints, reports: Reports, work: StepWork, worker: Worker):
        section = run.config.train
        self._worker = worker
        self._run, self._checkpoints, self._reports, self._work = run, checkpoints, reports, work
        self._section = section
        self._evaluate: Callable[[int, Any], EvalReport] | None = None
        if section.eval_every is not None:
            self._evaluate = evaluator(run, section.eval_batches, work.items)
        self._stragglers: Stragglers | SlowReplicas | None = None
        if isinstance(run.step, SharedBatchCall):
            self._stragglers = SlowReplicas(run.config.stragglers, run.step, self._report_straggler)
        elif isinstance(run.step, BalancedCall) and isinstance(run.plan, Plan):
            args = jax.eval_shape(run.functions.init, run.config.train.seed), run.data.batches.shapes()
            watched = run.config.stragglers, run.plan, run.step, run.functions.step
            self._stragglers = Stragglers(*watched, args, self._report_straggler)
        self._by_design: frozenset[str] = frozenset()
        """Leaves of the state that are not finite from the start."""

    def _report_straggler(self, report: StragglerReport) -> None:
        self._reports.report(report)
        if is_first():
            self._worker.tell(report.message)

    def take_steps(self, state: Any, first_step: int) -> TrainResult:
        """Takes the steps after `first_step`, until the last one or until it is asked to stop."""
        section, last = self._section, self._section.steps
        self._by_design = bad_leaves(state)
        done, metrics = first_step, {"loss": float("nan")}
        reported, spent_s, waited_s = first_step, 0.0, 0.0
        profile = Profile(section, self._run.folder / "profile")
        ahead = self._run.config.data.read_ahead
        batches = feed(self._run.data.batches, first_step, self._run.shardings[1], ahead)
        worker = self._worker
        with stop_on_signals((signal.SIGINT, signal.SIGTERM)) as asked, profile, batches as coming:
            worker.listen(asked)
            worker.begin_steps()
            while done < last and not worker.should_stop():
                started_s = time.perf_counter()
                try:
                    batch, wait_s = next(coming)
                except TrainingError:
                    self._save(done, state)
                    raise
                if self._stragglers is not None:
                    self._stragglers.before_step(done + 1)
                stepped_s = time.perf_counter()
                with profile.begin(done + 1):
                    state, measured = self._run.step(state, batch)
                    # Waiting for each step costs a dispatch of well under a millisecond, and keeps XLA:CPU from
                    # queueing collectives of two steps on the same threads, where they can wait for each other for
                    # ever.
                    metrics = {name: float(x) for name, x in jax.block_until_ready(measured).items()}
                done += 1
                if self._stragglers is not None:
                    self._stragglers.after_step(done, time.perf_counter() - stepped_s, state)
                spent_s, waited_s = spent_s + time.perf_counter() - started_s, waited_s + wait_s
                if profile.end(done):
                    self._reports.say(
                        f"The trace of the last {section.profile_steps} steps is in {self._run.folder}/profile."
                    )
                saves = section.checkpoint_every is not None and done % section.checkpoint_every == 0
                if fault := self._fault(done, metrics, state if saves or done == last else None):
                    if section.on_nonfinite == "stop":
                        del state  # the search needs its memory
                        raise self._stopped(done, fault)
                    self._reports.say(f"warning: {fault} The run goes on, since train.on_nonfinite is `continue`.")
                self._reports.advance()
                compiled = done == first_step + 1
                if compiled or done % section.log_every == 0 or done == last or asked.requested:
                    steps = done - reported
                    self._reports.report(
                        StepReport(done, metrics, spent_s / steps, waited_s / steps, compiled, self._work)
                    )
                    reported, spent_s, waited_s = done, 0.0, 0.0
                if self._evaluate is not None and (
                    done == last or section.eval_every and done % section.eval_every == 0
                ):
                    with worker.during(Phase.EVALUATION):
                        self._reports.report(self._evaluate(done, self._run.by_units(state)))
                if section.memory_every is not None and done % section.memory_every == 0:
                    worker.keep(done, self._run.by_units(state))
                if saves and done < last:
                    # a state in stages is sent to all processes for that, which compile the first time
                    is_sent = self._run.one_mesh is not None and jax.process_count() > 1
                    with worker.during(Phase.SAVING) if is_sent else contextlib.nullcontext():
                        self._save(done, state)
                worker.stepped(done)
            if done < last:
                self._reports.say(f"Stopping after step {done}, and saving. Another signal ends the run unsaved.")
            self._save(done, state)
            with worker.during(Phase.SAVING):
                if done < last and worker.is_supervised:
                    self._checkpoints.wait()  # the next generation finds it in memory
                else:
                    self._checkpoints.require(done)
        return TrainResult(done, metrics["loss"] if done > first_step else None, done < last, self._run.folder)

    def _fault(self, done: int, metrics: Mapping[str, float], state: Any | None) -> str | None:
        """What is no longer finite after step `done`, as a sentence; the state is looked at before it is saved."""
        if is_bad(metrics):
            return f"The loss of step {done} is {metrics['loss']}."
        bad = sorted(bad_leaves(state) - self._by_design) if state is not None else []
        if not bad:
            return None
        return f"After step {done}, `state.{bad[0]}`{f' and {len(bad) - 1} more' if bad[1:] else ''} is not finite."

    def _save(self, done: int, state: Any) -> None:
        """Saves a state, unless it would push out a better one."""
        if self._section.on_nonfinite == "continue" or not bad_leaves(state) - self._by_design:
            self._worker.save(done, self._run.by_units(state))
        else:
            self._reports.say(f"warning: the state after step {done} is not saved, since it is not finite any more.")

    def _stopped(self, done: int, fault: str) -> TrainingError:
        self._reports.say(f"{fault} Looking for where it began, from the last checkpoint on.")
        return stop(self._run, self._checkpoints, done, fault)

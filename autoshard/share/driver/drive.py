"""Runs real jobs under one decision, which changes as jobs come, end and fail, and as nodes come and go.

The driver starts `autoshard launch` for a job that gets devices for the first time, asks its supervisor for another
size as `autoshard scale` does, and stops it where it has to wait; all of these lose no step. Devices are given away
only after their last owner has left them. If a supervisor dies, it is started again and continues what is saved. If
the driver dies, the jobs go on; the same command takes them over, and tries jobs again that had failed.
"""

import dataclasses
import pathlib
import signal
import time
from collections.abc import Callable, Sequence

from autoshard.errors import ShareError
from autoshard.folders import make_folder
from autoshard.interrupts import stop_on_signals
from autoshard.launch.events import Finished, RunFailed
from autoshard.launch.run_lock import ONE_DRIVER, run_lock
from autoshard.share.allocation.cp_sat import SolveLimits
from autoshard.share.allocation.decide import decide
from autoshard.share.allocation.objective import DecisionRules
from autoshard.share.driver.driver_log import DriverEvent, DriverLog, Kind
from autoshard.share.driver.supervised_job import Launchable, LaunchOptions, SupervisedJob
from autoshard.share.pool import Node, Placement
from autoshard.share.rates import Rates
from autoshard.share.situation import JobState, Situation

LOOK_S = 2.0
"""Time between two looks at nodes and at the jobs file."""

REFRESH_S = 60.0
"""A decision is made at least so often."""


@dataclasses.dataclass(frozen=True, slots=True)
class DriveSettings:
    """How jobs are driven.

    Attributes:
        folder: for the log, and a folder for each job.
        options: how jobs are launched.
        rules, limits: of decisions.
        poll_s: time between two looks at the jobs.
        most_deaths: supervisors of one job that may die without a new step before the job has failed.
    """

    folder: pathlib.Path
    options: LaunchOptions = LaunchOptions()
    rules: DecisionRules = DecisionRules()
    limits: SolveLimits = SolveLimits()
    poll_s: float = 0.2
    most_deaths: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class DriveOutcome:
    """How it ended.

    Attributes:
        finished, failed: names of jobs.
        is_stopped: the user ended it; what ran is saved.
    """

    finished: tuple[str, ...]
    failed: tuple[str, ...]
    is_stopped: bool


@dataclasses.dataclass(slots=True)
class _Driven:
    """A job in hand.

    Attributes:
        process: its supervisor.
        arrival_s: when it came.
        placement: what it is to have; None where it is to wait.
        wanted: workers for that.
        asked: workers that its supervisor was last asked for; 0 for none.
        num_moves: how often `placement` changed.
        deaths: of its supervisor, without a step between them; the last one at `step_at_death`.
        speed: measured steps in a second, by those of its rates.
    """

    process: SupervisedJob
    arrival_s: float
    placement: Placement | None = None
    wanted: int = 0
    asked: int = 0
    num_moves: int = 0
    deaths: int = 0
    step_at_death: int = -1
    speed: float = 1.0

    @property
    def holds(self) -> int:
        """Workers whose devices nobody else may have yet: those that run, or those that may start at any time."""
        return max(self.process.workers, self.asked) if self.process.pid is not None else 0


def drive(
    arrivals: Callable[[], Sequence[Launchable]],
    nodes: Callable[[], tuple[Node, ...]],
    settings: DriveSettings,
    say: Callable[[str], None],
) -> DriveOutcome:
    """Runs jobs until all have ended.

    Args:
        arrivals: all jobs that are known now, in the order of the file; asked again and again, so that more may come.
        nodes: the nodes that are there now.
        settings: how.
        say: shows a line to people.

    Returns:
        How it ended. The first SIGINT or SIGTERM saves and stops all jobs.

    Raises:
        ShareError: jobs cannot be launched, or cannot be decided about; or the folder cannot be made.
        ElasticError: another driver has the folder.
    """
    make_folder(settings.folder, "--output-dir", ShareError)
    with run_lock(settings.folder, ONE_DRIVER):
        return _Driver(arrivals, nodes, settings, say).run()


class _Driver:
    def __init__(
        self,
        arrivals: Callable[[], Sequence[Launchable]],
        nodes: Callable[[], tuple[Node, ...]],
        settings: DriveSettings,
        say: Callable[[str], None],
    ):
        self._arrivals, self._look_at_nodes, self._settings, self._say = arrivals, nodes, settings, say
        self._log = DriverLog(settings.folder)
        self._began_s = time.time()
        self._jobs: dict[str, _Driven] = {}
        self._waiting: dict[str, Launchable] = {}
        self._ended: dict[str, bool] = {}
        self._nodes: tuple[Node, ...] = ()
        self._looked_s = self._decided_s = float("-inf")
        self._is_due = True

    def run(self) -> DriveOutcome:
        """Until all jobs have ended, or the user stops it."""
        self._write("driver_started")
        with stop_on_signals((signal.SIGINT, signal.SIGTERM)) as stop:
            while not stop.requested:
                self._look()
                self._take_news()
                if not self._jobs and not self._waiting:
                    break
                if self._is_due or time.time() - self._decided_s > REFRESH_S:
                    self._decide()
                self._carry_out()
                time.sleep(self._settings.poll_s)
            if stop.requested:
                self._stop_all()
        self._write("driver_ended", detail="stopped by its user" if stop.requested else "")
        finished = tuple(name for name, is_well in self._ended.items() if is_well)
        failed = tuple(name for name, is_well in self._ended.items() if not is_well)
        return DriveOutcome(finished, failed, stop.requested)

    def _look(self) -> None:
        """Nodes and jobs that are new."""
        if time.time() - self._looked_s >= LOOK_S:
            self._looked_s = time.time()
            nodes = self._look_at_nodes()
            if nodes != self._nodes:
                before = sum(node.num_devices for node in self._nodes)
                now = sum(node.num_devices for node in nodes)
                self._write("nodes_changed", workers=len(nodes), detail=f"from {before} to {now} devices")
                self._nodes, self._is_due = nodes, True
            for one in self._arrivals():
                name = one.job.name
                if name not in self._jobs and name not in self._ended:
                    self._waiting[name] = one
        for name, one in list(self._waiting.items()):
            if time.time() - self._began_s >= one.job.arrival_s:
                del self._waiting[name]
                process = SupervisedJob(one, self._settings.folder / name, self._settings.options)
                process.read()
                process.forgive()
                asked = process.workers if process.pid is not None else 0  # an earlier driver left it
                self._jobs[name] = _Driven(process, time.time() - self._began_s, asked=asked)
                self._write("job_arrived", name, step=process.step)
                self._is_due = True

    def _take_news(self) -> None:
        """What became of the processes."""
        for name, own in list(self._jobs.items()):
            is_there = own.process.pid is not None  # before its last events are read, so that none is missed
            own.process.read()
            if is_there:
                self._measure(own)
                continue
            ending = own.process.ending
            if isinstance(ending, Finished):
                self._end(name, own, True, f"loss {ending.loss:.6g}" if ending.loss is not None else "")
            elif isinstance(ending, RunFailed):
                self._end(name, own, False, ending.error)
            elif own.process.is_stopping:
                own.process.is_stopping, own.asked = False, 0
                self._write("job_stopped", name, step=own.process.step)
            elif own.asked:
                self._died(name, own)

    def _measure(self, own: _Driven) -> None:
        """How fast it really is, by what its plans say."""
        measured = own.process.steps_per_s
        if measured is not None and own.placement is not None and own.process.workers == own.wanted:
            own.speed = measured / own.process.job.rates.of(own.placement.footprint)

    def _died(self, name: str, own: _Driven) -> None:
        """Its supervisor is gone, and the job is not done: it is started again by the next decision."""
        step = own.process.step
        own.deaths = own.deaths + 1 if step <= own.step_at_death else 1
        own.step_at_death = step
        own.asked, own.placement = 0, None
        if own.deaths >= self._settings.most_deaths:
            self._end(name, own, False, f"its supervisor died {own.deaths} times at step {step}: {own.process.error}")
            return
        self._write("job_died", name, step=step, detail="its supervisor is gone; it is started again")
        self._is_due = True

    def _end(self, name: str, own: _Driven, is_well: bool, detail: str) -> None:
        del self._jobs[name]
        self._ended[name] = is_well
        self._write("job_finished" if is_well else "job_failed", name, step=own.process.step, detail=detail)
        self._is_due = True

    def _decide(self) -> None:
        """Who is to have which devices."""
        self._is_due, self._decided_s = False, time.time()
        states = tuple(self._state(own) for own in self._jobs.values())
        if not states:
            return
        situation = Situation(time.time() - self._began_s, self._nodes, states)
        decision = decide(situation, self._settings.rules, self._settings.limits)
        told = []
        for name, own in self._jobs.items():
            placement = decision.placements.get(name)
            wanted = 0
            if placement is not None:
                wanted = self._settings.options.workers(placement.footprint) or 0
            if own.placement is not None and placement != own.placement:
                own.num_moves += 1
            own.placement, own.wanted = placement, wanted
            told.append(f"{name} {placement.footprint if placement is not None else 'waits'}")
        gap = "" if decision.gap is None else f" (gap {decision.gap:.2%}, {decision.decided_in_s:.2f} s)"
        self._write("decided", detail="; ".join(told) + gap)

    def _state(self, own: _Driven) -> JobState:
        job = own.process.job
        usable = tuple(
            dataclasses.replace(rate, steps_per_s=rate.steps_per_s * own.speed)
            for rate in job.rates.entries
            if self._settings.options.workers(rate.footprint) is not None
        )
        measured = own.process.move_s
        job = dataclasses.replace(
            job, rates=Rates(usable), arrival_s=own.arrival_s, move_s=job.move_s if measured is None else measured
        )
        left = max(job.steps - own.process.step, 1.0)
        return JobState(job, left, own.placement, own.num_moves, own.process.generations > 0)

    def _carry_out(self) -> None:
        """Takes devices first, and gives them when nobody has them any more."""
        for name, own in self._jobs.items():
            if own.wanted == 0 and own.asked and not own.process.is_stopping:
                own.process.stop()
                self._write("job_stopping", name, step=own.process.step)
            elif 0 < own.wanted < own.asked and own.process.pid is not None:
                self._scale(name, own)
        held = {name: own.holds for name, own in self._jobs.items()}
        capacity = self._capacity()
        for name, own in self._jobs.items():
            if own.wanted <= own.asked or own.process.is_stopping:
                continue
            others = sum(workers for other, workers in held.items() if other != name)
            if others + own.wanted > capacity:
                continue
            if own.process.pid is None:
                own.process.start(own.wanted)
                own.asked = own.wanted
                self._write("job_started", name, own.wanted, own.process.step)
            else:
                self._scale(name, own)
            held[name] = max(held[name], own.wanted)

    def _scale(self, name: str, own: _Driven) -> None:
        own.process.scale(own.wanted)
        own.asked = own.wanted
        self._write("job_scaled", name, own.wanted, own.process.step)

    def _capacity(self) -> int:
        """Workers that all nodes have room for."""
        per_worker = self._settings.options.devices_per_worker
        if per_worker is None:
            return len(self._nodes)
        return sum(node.num_devices for node in self._nodes) // per_worker

    def _stop_all(self) -> None:
        """Saves and ends what runs."""
        for own in self._jobs.values():
            own.process.stop()
        for name, own in self._jobs.items():
            while own.process.pid is not None:
                time.sleep(self._settings.poll_s)
            own.process.read()
            self._write("job_stopped", name, step=own.process.step)

    def _write(self, kind: Kind, job: str = "", workers: int = 0, step: int = 0, detail: str = "") -> None:
        event = DriverEvent(time=time.time(), kind=kind, job=job, workers=workers, step=step, detail=detail)
        self._log.write(event)
        self._say(str(event))


def check_launchable(jobs: Sequence[Launchable], options: LaunchOptions, engine: str, num_groups: int) -> None:
    """Refuses what cannot be run, before anything is started.

    Raises:
        ShareError: a job has no configuration, or the engine cannot choose among kinds of nodes.
    """
    if engine == "ray" and num_groups > 1:
        raise ShareError(
            f"--run --engine ray: Ray chooses the nodes of a job, so that all must be of one kind; the cluster has "
            f"{num_groups} groups. Run a driver for each kind, with a cluster file of its own."
        )
    if nameless := [one.job.name for one in jobs if not one.config]:
        raise ShareError(
            f"--run: a job needs a configuration to be launched; none have {', '.join(nameless)}. Add config to them."
        )
    for one in jobs:
        SupervisedJob(one, pathlib.Path(), options)

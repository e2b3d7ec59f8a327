"""What `autoshard share` does: decide and explain, simulate and compare, emit, or run."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import rich.console

from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError
from autoshard.printing import table
from autoshard.share.allocation.cp_sat import SolveLimits
from autoshard.share.allocation.decide import decide
from autoshard.share.allocation.objective import DecisionRules, Objective
from autoshard.share.driver.drive import DriveOutcome, DriveSettings, check_launchable, drive
from autoshard.share.driver.nodes import nodes_in_file, nodes_of_ray
from autoshard.share.driver.supervised_job import Launchable, LaunchOptions
from autoshard.share.emit.kueue import kueue_text
from autoshard.share.emit.ranking import ranked
from autoshard.share.emit.slurm import slurm_text
from autoshard.share.explain import decide_and_explain
from autoshard.share.jobs_file import JobsFile, read_jobs_file
from autoshard.share.jobs_of_file import jobs_of_file, templates_of
from autoshard.share.picture import write_picture
from autoshard.share.planned_rates import default_rate_cache
from autoshard.share.policies.registry import make_policy
from autoshard.share.pool import nodes_of
from autoshard.share.report import decision_document, decision_line, explained_rows, figure_rows, figures_document
from autoshard.share.simulation.events import random_failures
from autoshard.share.simulation.simulate import SimulationSettings, simulate
from autoshard.share.situation import Job, JobState, Situation
from autoshard.share.traces.likeness import helios_like, philly_like
from autoshard.share.traces.read import read_trace
from autoshard.share.traces.workload import workload

REPAIR_S = 4 * 3600.0
"""A node that fails is there again after so long: an assumption, as in `benchmarks/goodput.py`."""


@dataclasses.dataclass(frozen=True)
class ShareRequest:
    """What all of them need.

    Attributes:
        jobs, cluster: files.
        objective, horizon, payback_s: of decisions.
        time_limit_s, gap: of each search.
        console: for what goes on.
    """

    jobs: pathlib.Path
    cluster: pathlib.Path
    objective: str
    horizon: int
    payback_s: float
    time_limit_s: float
    gap: float
    console: rich.console.Console

    @property
    def rules(self) -> DecisionRules:
        """What decisions are for."""
        return DecisionRules(Objective(self.objective), self.payback_s, num_periods=self.horizon)

    @property
    def limits(self) -> SolveLimits:
        """When a search ends."""
        return SolveLimits(self.time_limit_s, self.gap, num_workers=min(os.cpu_count() or 1, 8))

    @functools.cached_property
    def file(self) -> JobsFile:
        """The jobs file."""
        return read_jobs_file(self.jobs)

    @functools.cached_property
    def devices(self) -> Cluster:
        """The cluster file."""
        return Cluster.from_file(self.cluster)

    def read_jobs(self) -> tuple[Job, ...]:
        """The jobs with their rates; plans what was not planned before."""
        with self.console.status("Planning the jobs on each set of devices") as status:

            def say(text: str) -> None:
                self.console.print(text, markup=False, highlight=False, soft_wrap=True)
                status.update("Planning the next size")

            return jobs_of_file(self.file, self.devices, default_rate_cache(), say)

    def situation(self) -> Situation:
        """All jobs of the file, waiting, on all nodes."""
        jobs = tuple(dataclasses.replace(job, arrival_s=0.0) for job in self.read_jobs())
        return Situation(0.0, nodes_of(self.devices), tuple(JobState(job, job.steps) for job in jobs))


def show_decision(request: ShareRequest, picture: pathlib.Path | None, console: rich.console.Console) -> dict[str, Any]:
    """Prints who gets what, why, and what else was close; the same as plain data."""
    situation = request.situation()
    decision, explained = decide_and_explain(situation, request.rules, request.limits)
    _print(console, f"{request.devices.name}: {situation.num_devices} devices", *explained_rows(explained))
    console.print(decision_line(decision, request.objective), soft_wrap=True, highlight=False)
    if picture is not None:
        jobs = tuple(state.job for state in situation.jobs)
        run = simulate(jobs, situation.nodes, make_policy("autoshard", request.rules, request.limits))
        write_picture(picture, situation.nodes, [run], explained)
    return decision_document(decision, explained)


def show_simulation(
    request: ShareRequest,
    trace: str,
    policies: Sequence[str],
    num_jobs: int,
    hours: float,
    failures_h: float | None,
    seed: int,
    picture: pathlib.Path | None,
    console: rich.console.Console,
) -> dict[str, Any]:
    """Prints the figures of policies on a trace; the same as plain data."""
    nodes = nodes_of(request.devices)
    chosen = [make_policy(name.strip(), request.rules, request.limits) for name in policies]
    jobs = _jobs_of_trace(request, trace, num_jobs, hours, seed)
    settings = SimulationSettings()
    if failures_h is not None:
        until_s = 10 * max(job.arrival_s for job in jobs) + 30 * 86400
        settings = SimulationSettings(random_failures(nodes, failures_h * 3600, REPAIR_S, until_s, seed))
    runs = []
    for policy in chosen:
        with request.console.status(f"Simulating {policy.name}"):
            runs.append(simulate(jobs, nodes, policy, settings))
    figures = [run.figures for run in runs]
    title = f"{len(jobs)} jobs of {trace} on {request.devices.name}, {sum(n.num_devices for n in nodes)} devices"
    _print(console, title, *figure_rows(figures))
    if picture is not None:
        write_picture(picture, nodes, runs)
    return {"trace": trace, "seed": seed, "policies": figures_document(figures)}


def emit_text(request: ShareRequest, kind: str) -> str:
    """The decision in the words of Kueue or Slurm."""
    situation = request.situation()
    decision = decide(situation, request.rules, request.limits)
    order = ranked(situation, decision, request.rules)
    return kueue_text(order, request.devices) if kind == "kueue" else slurm_text(order)


def run_jobs(
    request: ShareRequest,
    folder: pathlib.Path,
    engine: str,
    devices_per_worker: int | None,
    say: Callable[[str], None],
) -> DriveOutcome:
    """Runs the jobs until all have ended; jobs that are added to the file come, too."""
    options = LaunchOptions(engine, devices_per_worker)
    check = lambda jobs: check_launchable(jobs, options, engine, len(request.devices.groups))
    first = launchables(request)
    check(first)
    nodes = nodes_in_file(request.cluster, say)
    if engine == "ray":
        group = request.devices.groups[0]
        resource = "CPU" if devices_per_worker else "GPU"
        nodes = nodes_of_ray(group.name, group.devices_per_node, resource)
    settings = DriveSettings(folder.absolute(), options, request.rules, request.limits)
    outcome = drive(JobsOfFile(request, first, check, say), nodes, settings, say)
    say(f"{len(outcome.finished)} finished, {len(outcome.failed)} failed; results are in {settings.folder}")
    return outcome


class JobsOfFile:
    """The jobs of a file, which is read again when it changes; while that cannot be run, they stay as they were."""

    def __init__(
        self,
        request: ShareRequest,
        first: tuple[Launchable, ...],
        check: Callable[[Sequence[Launchable]], None],
        say: Callable[[str], None],
    ):
        self._request, self._jobs, self._check, self._say = request, first, check, say
        self._read_ns = request.jobs.stat().st_mtime_ns

    def __call__(self) -> tuple[Launchable, ...]:
        """The jobs as the file has them now."""
        try:
            changed_ns = self._request.jobs.stat().st_mtime_ns
            if changed_ns != self._read_ns:
                self._read_ns = changed_ns
                jobs = launchables(dataclasses.replace(self._request))
                self._check(jobs)
                self._jobs = jobs
        except (OSError, AutoshardError) as error:
            self._say(f"warning: the jobs stay as they were: {error}")
        return self._jobs


def launchables(request: ShareRequest) -> tuple[Launchable, ...]:
    """The jobs of the file with what is launched for each."""
    jobs = request.read_jobs()
    return tuple(
        Launchable(job, entry.config or "", tuple(entry.overrides))
        for job, entry in zip(jobs, request.file.jobs, strict=True)
    )


def _jobs_of_trace(request: ShareRequest, trace: str, num_jobs: int, hours: float, seed: int) -> tuple[Job, ...]:
    jobs = request.read_jobs()
    if trace == "jobs":
        return jobs
    if trace == "philly-like":
        records = philly_like(num_jobs, hours * 3600, seed)
    elif trace == "helios-like":
        records = helios_like(num_jobs, hours * 3600, seed)
    else:
        records = read_trace(pathlib.Path(trace))[:num_jobs]
    return workload(records, templates_of(request.file, jobs))


def _print(console: rich.console.Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    made = table(title, [(name, "left") for name in columns])
    for row in rows:
        made.add_row(*row)
    console.print(made)

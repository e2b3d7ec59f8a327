"""From a jobs file and a cluster to jobs with their rates."""

import math
from collections.abc import Callable, Mapping

from autoshard.cluster import Cluster
from autoshard.errors import ShareError
from autoshard.share.footprint import Footprint, cluster_of, read_footprint, usual_footprints
from autoshard.share.jobs_file import JobEntry, JobsFile
from autoshard.share.planned_rates import RateCache, planned_rates, steps_of
from autoshard.share.rates import Rate, Rates, Source, with_interpolated
from autoshard.share.situation import Job
from autoshard.share.traces.workload import Template
from autoshard.solver.cached import solve_cached
from autoshard.solver.io.problem_file import read_problem_file
from autoshard.solver.io.solution_cache import default_cache
from autoshard.solver.options import SolverOptions


def jobs_of_file(file: JobsFile, cluster: Cluster, cache: RateCache, say: Callable[[str], None]) -> tuple[Job, ...]:
    """The jobs of a file on a cluster; plans what has not been planned before.

    Args:
        file: what was read.
        cluster: the devices.
        cache: where rates of plans are kept.
        say: told of each plan that is made.

    Raises:
        ShareError: a job cannot run on the cluster at all, or names what is not there.
        AutoshardError: a configuration cannot be read or planned.
    """
    return tuple(_job(entry, cluster, cache, say) for entry in file.jobs)


def _job(entry: JobEntry, cluster: Cluster, cache: RateCache, say: Callable[[str], None]) -> Job:
    footprints = _footprints(entry, cluster)
    if entry.config is None or entry.rates or entry.problems:
        rates = _given(entry, footprints)
    else:
        rates = planned_rates(entry.config, entry.overrides, cluster, footprints, entry.interpolate, cache, say)
    steps = entry.steps or (0 if entry.config is None else steps_of(entry.config, entry.overrides))
    allowed = tuple(rate for rate in rates.entries if rate.footprint in footprints)
    if not allowed:
        tried = ", ".join(map(str, footprints)) or "nothing within its limits"
        raise ShareError(
            f"Job {entry.name!r} fits on none of the devices that it may have on {cluster.name!r}; tried {tried}. "
            "Allow more devices, or a smaller batch."
        )
    return Job(
        name=entry.name,
        steps=float(steps),
        rates=Rates(allowed),
        arrival_s=float(entry.arrival_s),
        weight=float(entry.weight),
        deadline_s=None if entry.deadline_s is None else float(entry.deadline_s),
        is_elastic=entry.elastic,
        is_preemptible=entry.preemptible,
        move_s=float(entry.move_s),
        request=entry.request or entry.most_devices or max(rate.footprint.num_devices for rate in allowed),
    )


def _footprints(entry: JobEntry, cluster: Cluster) -> tuple[Footprint, ...]:
    known = [group.name for group in cluster.groups]
    if unknown := [name for name in entry.groups or () if name not in known]:
        raise ShareError(
            f"Job {entry.name!r}: groups are those of the cluster, {', '.join(known)}; received {', '.join(unknown)}. "
            "Correct the names."
        )
    most = entry.most_devices or cluster.num_devices
    if entry.footprints is not None:
        named = tuple(map(read_footprint, entry.footprints))
    elif entry.rates or entry.problems:
        named = tuple(map(read_footprint, {**(entry.rates or {}), **(entry.problems or {})}))
        if entry.interpolate:
            usual = usual_footprints(cluster, entry.least_devices, most, entry.groups, entry.cuts_nodes)
            named = tuple(dict.fromkeys((*named, *usual)))
    else:
        return usual_footprints(cluster, entry.least_devices, most, entry.groups, entry.cuts_nodes, entry.mixed)
    for footprint in named:
        cluster_of(footprint, cluster)
    inside = [f for f in named if entry.least_devices <= f.num_devices <= most]
    return tuple(f for f in inside if entry.groups is None or set(f.groups) <= set(entry.groups))


def _given(entry: JobEntry, footprints: tuple[Footprint, ...]) -> Rates:
    """Rates of the file itself and of its problems."""
    given: Mapping[str, float] = {at: float(rate) for at, rate in (entry.rates or {}).items()}
    if slow := [at for at, rate in given.items() if rate <= 0]:
        raise ShareError(
            f"Job {entry.name!r}: rates are steps in a second, above 0; not so for {', '.join(slow)}. Leave out what "
            "the job cannot run on."
        )
    entries = [Rate(read_footprint(at), rate) for at, rate in given.items()]
    entries += [Rate(read_footprint(at), 1.0 / _cost(path), Source.PLAN) for at, path in (entry.problems or {}).items()]
    rates = Rates(tuple(entries))
    return with_interpolated(rates, footprints) if entry.interpolate else rates


def _cost(path: str) -> float:
    """Seconds of a step: the cost of a problem of `autoshard plan --problem-only`, solved or found solved."""
    problem = read_problem_file(path).problem
    solution = solve_cached(problem, SolverOptions(), default_cache())
    if solution.choices is None:
        raise ShareError(f"{path}: no solution was found, so that the time of a step is not known. Leave it out.")
    return solution.certificate.objective


def templates_of(file: JobsFile, jobs: tuple[Job, ...]) -> tuple[Template, ...]:
    """The jobs as what those of a trace are taken for, the smallest first."""
    limits = [math.inf if entry.most_device_hours is None else float(entry.most_device_hours) for entry in file.jobs]
    found = [Template(job, limit) for job, limit in zip(jobs, limits, strict=True)]
    return tuple(sorted(found, key=lambda template: template.most_device_hours))

"""Effective training time of 54 days on 16,384 GPUs, simulated with the failures that Llama 3's training met.

    python benchmarks/goodput.py [--chaos benchmarks/results/chaos.json] [--detection-s 0.3] [--seeds 20]

Failures come at random, with the rates and causes of Dubey et al. 2024 (arXiv:2407.21783, section 3.3.4 and table 5).
Each is noticed, the job starts again, reads its newest usable checkpoint, and takes lost steps again; a failure in
that time starts it anew. What takes how long is a stated model. What does not depend on size is measured: medians of
chaos.py, of kills that were restored from memory. The rest are constants, each with its source or called an assumption.
Every failure is taken to be cured by restarts; nothing here tells how long people look for a cause. A second simulation
counts jobs that fail for good. Writes results/goodput.md and .json.
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import json
import math
import pathlib
import random
import statistics
import sys
from collections.abc import Sequence

from autoshard.launch.progress import FACTOR

ROOT = pathlib.Path(__file__).resolve().parent
DAY_S = 86400.0
DAYS, GPUS, GPUS_PER_HOST = 54, 16_384, 8


@dataclasses.dataclass(frozen=True)
class Cause:
    """A cause of interruptions: how many in 54 days, and how it shows (our reading, an assumption).

    Attributes:
        shows: `crash`: a process ends; `stall`: processes live, and nothing moves; `silent`: wrong values, noticed
            late; `planned`: known before, so that the job saves first.
    """

    name: str
    count: float
    shows: str


LLAMA3 = (
    Cause("faulty GPU", 148, "crash"),
    Cause("GPU HBM3 memory", 72, "crash"),
    Cause("software bug", 54, "crash"),
    Cause("network switch or cable", 35, "stall"),
    Cause("unplanned host maintenance", 32, "crash"),
    Cause("GPU SRAM memory", 19, "crash"),
    Cause("GPU system processor", 17, "crash"),
    Cause("NIC", 7, "stall"),
    Cause("NCCL watchdog timeout", 7, "stall"),
    Cause("silent data corruption", 6, "silent"),
    Cause("GPU thermal interface and sensor", 6, "crash"),
    Cause("SSD", 3, "crash"),
    Cause("power supply", 3, "crash"),
    Cause("server chassis", 2, "crash"),
    Cause("IO expansion board", 2, "crash"),
    Cause("dependency", 2, "crash"),
    Cause("CPU", 2, "crash"),
    Cause("system memory", 2, "crash"),
    Cause("planned", 47, "planned"),
)
"""Table 5 of the paper: 419 unexpected interruptions; and 47 that were planned."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a job does about failures; all times in seconds.

    Attributes:
        detection_s: from a crash until it is noticed.
        stall_s: from the last progress until a stall is noticed.
        silent_s: from wrong values until they are noticed.
        restart_s: from there until the state is read: stop, start, join, plan, load the program.
        read_memory_s, read_disk_s: reading the state from a tier.
        memory_every_s, disk_every_s: training time between two checkpoints of a tier; 0 without a memory tier.
        in_memory: share of failures after which the memory tier has everything.
        repeat: share of restarts that fail again at once, such as where the faulty host was not the one replaced.
    """

    name: str
    detection_s: float
    stall_s: float
    silent_s: float
    restart_s: float
    read_memory_s: float
    read_disk_s: float
    memory_every_s: float
    disk_every_s: float
    in_memory: float
    repeat: float


@dataclasses.dataclass(frozen=True)
class Simulated:
    """What became of the time: parts of the whole.

    Attributes:
        productive: steps that count.
        redone, noticing, restarting: steps taken again, time until failures were noticed, and until steps went on.
        failures: how many there were, those during restarts included.
    """

    productive: float
    redone: float
    noticing: float
    restarting: float
    failures: float


def simulate(policy: Policy, causes: Sequence[Cause], days: float, seed: int) -> Simulated:
    """Runs a job for as many days; `causes` count what is expected in `DAYS` days of a job."""
    draw = random.Random(seed)
    rate = sum(cause.count for cause in causes) / (DAYS * DAY_S)
    end_s = days * DAY_S
    clock_s = done_s = redone_s = noticing_s = restarting_s = 0.0
    failures = 0
    while True:
        until_s = draw.expovariate(rate)
        if clock_s + until_s >= end_s:
            done_s += end_s - clock_s
            break
        clock_s, done_s, failures = clock_s + until_s, done_s + until_s, failures + 1
        shows = draw.choices(causes, [cause.count for cause in causes])[0].shows
        kept_s, read_s = _kept(policy, shows, done_s, draw)
        redone_s, done_s = redone_s + done_s - kept_s, kept_s
        unnoticed_s = {"crash": policy.detection_s, "stall": policy.stall_s, "silent": 0.0, "planned": 0.0}[shows]
        noticing_s, clock_s = noticing_s + unnoticed_s, clock_s + unnoticed_s
        took_s, again = _restart(policy, read_s, rate, draw)
        restarting_s, clock_s, failures = restarting_s + took_s, clock_s + took_s, failures + again
    total_s = done_s + redone_s + noticing_s + restarting_s
    return Simulated(done_s / total_s, redone_s / total_s, noticing_s / total_s, restarting_s / total_s, failures)


def _kept(policy: Policy, shows: str, done_s: float, draw: random.Random) -> tuple[float, float]:
    """Training time that is not lost, and how long its checkpoint takes to read."""
    has_memory = policy.memory_every_s > 0 and draw.random() < policy.in_memory
    if shows == "planned":
        return done_s, policy.read_memory_s if has_memory else policy.read_disk_s
    if shows == "silent":  # every checkpoint since then is wrong, and memory keeps none so old
        return _floor(max(done_s - policy.silent_s, 0.0), policy.disk_every_s), policy.read_disk_s
    if has_memory:
        return _floor(done_s, policy.memory_every_s), policy.read_memory_s
    return _floor(done_s, policy.disk_every_s), policy.read_disk_s


def _restart(policy: Policy, read_s: float, rate: float, draw: random.Random) -> tuple[float, int]:
    """Time until steps go on, and how many more failures came meanwhile: each starts the restart anew."""
    took_s, failures, whole_s = 0.0, 0, policy.restart_s + read_s
    while True:
        until_s = draw.expovariate(rate)
        if until_s < whole_s:
            took_s, failures = took_s + until_s, failures + 1
            continue
        took_s += whole_s
        if draw.random() >= policy.repeat:
            return took_s, failures
        failures += 1


def _floor(value: float, step: float) -> float:
    return math.floor(value / step) * step


def daly(rate: float, restart_s: float, every_s: float) -> float:
    """Effective training time with exponential failures, during restarts too, and checkpoints that cost nothing.

    Derivation: a stretch of `every_s` takes E, the time until it is done without a failure. It is done at once with
    probability exp(-rate every_s); otherwise the time until the failure is lost, a restart follows, and the stretch
    begins anew. A restart takes (exp(rate restart_s) - 1) / rate by the same argument, and E comes to
    exp(rate restart_s) (exp(rate every_s) - 1) / rate: Daly 2006, "A higher order estimate of the optimum checkpoint
    interval for restart dumps", equation 13 without the time to write.
    """
    return rate * every_s / (math.exp(rate * restart_s) * math.expm1(rate * every_s))


@dataclasses.dataclass(frozen=True)
class Measured:
    """What does not depend on the size of a job, in seconds, and where it was measured.

    Attributes:
        detection_s: from a kill until it is noticed.
        stop_s: from there until all workers are stopped and the next ones told what to do.
        planning_s: reading a plan that is ready.
        restore_s: reading a small state: what a restore takes beside its bytes.
    """

    source: str
    detection_s: float
    stop_s: float
    planning_s: float
    restore_s: float


PROTOTYPE = Measured("the prototype of gang restart on two CPU cores, not autoshard itself", 0.3, 0.5, 0.0, 0.6)
"""A kill noticed within 0.05 to 0.3 s; of 4.97 s at the median until the next step, 1.8 s imports and 2.3 s joining."""


def read_measured(path: pathlib.Path) -> Measured:
    """What benchmarks/chaos.py wrote of kills that were restored from memory."""
    found = json.loads(path.read_text())
    parts = found["memory, SIGKILL of a worker"]
    names = ("noticed_s", "stopped_s", "planned_s", "restored_s")
    return Measured(found["source"], *(parts[name] for name in names))


@dataclasses.dataclass(frozen=True)
class Scale:
    """What grows with the job: for Llama 3 405B on 16,384 H100."""

    step_s: float = 16e6 * 6 * 405e9 / (GPUS * 400e12)
    """16 million tokens, 6 operations a parameter and token, 400 TFLOP/s a GPU (Dubey et al. 2024, table 4)."""
    state_bytes: float = 16 * 405e9
    """Parameters and gradient in 2 bytes each, and three copies in 4: weights and Adam's two moments."""
    storage_bytes_per_s: float = 2e12
    """Sustained by their storage (section 3.3.1)."""
    neighbour_bytes_per_s: float = 50e9
    """One NIC of 400 Gbit/s of a host; each has eight (section 3.3.1)."""
    join_s: float = 30.0
    """Until more than 10,000 GPUs have joined (Jiang et al. 2024, MegaScale, arXiv:2402.15627, section 3.5)."""
    stop_s: float = 5.0
    """Assumption: until the last of 2,048 hosts has killed its processes."""
    load_program_s: float = 30.0
    """Assumption: reading the step's executable from JAX's cache, on all hosts."""
    compile_s: float = 300.0
    """Assumption: planning and compiling where nothing is ready."""
    start_s: float = 60.0
    """Assumption: new processes import Python packages from shared storage; warm standbys have done so."""
    requeue_s: float = 300.0
    """Assumption: a scheduler ends a job, finds hosts, and starts it again."""
    collective_timeout_s: float = 600.0
    """Default of NCCL's watchdog in PyTorch, and of XLA:GPU's collectives."""
    stall_steps: float = FACTOR
    """A stall is noticed after so many times the longest step, by autoshard/launch/progress.py."""
    silent_s: float = 3600.0
    """Assumption: until wrong values are noticed."""
    repeat: float = 0.05
    """Assumption: share of restarts that fail again at once."""
    in_memory: float = 0.95
    """Assumption: share of failures that take no two neighbours at once, so that the memory tier is complete."""

    @property
    def read_disk_s(self) -> float:
        """Reading the state from storage, each byte once."""
        return self.state_bytes / self.storage_bytes_per_s

    @property
    def read_memory_s(self) -> float:
        """A host's part of the state, from its neighbour."""
        return self.state_bytes / (GPUS / GPUS_PER_HOST) / self.neighbour_bytes_per_s


def whole_job(scale: Scale, every_s: float = 1800.0, restart_s: float | None = None) -> Policy:
    """A job that its scheduler starts again as a whole, from checkpoints on disk."""
    whole_s = scale.requeue_s + scale.start_s + scale.join_s + scale.compile_s
    return Policy(
        name=f"whole-job restart, a checkpoint every {every_s / 60:g} min",
        detection_s=10.0,  # assumption: until the launcher of one host has told the scheduler
        stall_s=scale.collective_timeout_s,
        silent_s=scale.silent_s,
        restart_s=whole_s if restart_s is None else restart_s,
        read_memory_s=scale.read_disk_s,
        read_disk_s=scale.read_disk_s,
        memory_every_s=0.0,
        disk_every_s=every_s,
        in_memory=0.0,
        repeat=scale.repeat,
    )


def elastic(
    scale: Scale, measured: Measured, *, is_warm: bool = True, has_memory: bool = True, every_s: float = 1800.0
) -> Policy:
    """A job under autoshard's supervisor, with spare hosts. Warm: processes, plan and executable are ready."""
    prepared_s = scale.load_program_s if is_warm else scale.start_s + scale.compile_s
    warmth = "everything ready" if is_warm else "nothing ready"
    tiers = "memory tier" if has_memory else "disk only"
    return Policy(
        name=f"autoshard, {warmth}, {tiers}, a checkpoint on disk every {every_s / 60:g} min",
        detection_s=measured.detection_s,
        stall_s=scale.stall_steps * scale.step_s,
        silent_s=scale.silent_s,
        restart_s=measured.stop_s + scale.stop_s + scale.join_s + measured.planning_s + prepared_s,
        read_memory_s=measured.restore_s + scale.read_memory_s,
        read_disk_s=measured.restore_s + scale.read_disk_s,
        memory_every_s=2 * scale.step_s if has_memory else 0.0,  # at most the step in flight and the one before
        disk_every_s=every_s,
        in_memory=scale.in_memory,
        repeat=scale.repeat,
    )


@dataclasses.dataclass(frozen=True)
class Job:
    """A long job of a shared cluster: how many GPUs for how many days."""

    gpus: int
    days: float


def population(count: int, seed: int) -> list[Job]:
    """Jobs of 8 to 1,024 GPUs (powers of two, equally likely) and 1 to 30 days (log-uniform): an assumption."""
    draw = random.Random(seed)
    return [Job(2 ** draw.randint(3, 10), math.exp(draw.uniform(0, math.log(30)))) for _ in range(count)]


@dataclasses.dataclass(frozen=True)
class FailedJobs:
    """Shares of jobs that failed: without help, with lost workers replaced, and where the size may change, too."""

    alone: float
    replaced: float
    elastic: float


UNCURABLE = sum(c.count for c in LLAMA3 if c.name == "software bug") / 419
"""Share of interruptions that come back after every restart: software bugs, all of them; pessimistic."""
NO_SPARE = 0.05
"""Assumption: share of failures at which no spare host comes within the time that a job of fixed size waits for one."""


def failed_jobs(jobs: Sequence[Job], own_errors: float, seed: int) -> FailedJobs:
    """Runs every job once, with Llama 3's rate of failures for a GPU; `own_errors` is the share that ends itself."""
    draw = random.Random(seed)
    rate = 419 / (GPUS * DAYS)  # a GPU and day
    alone = replaced = shrunk = 0
    for job in jobs:
        is_wrong = draw.random() < own_errors
        left = job.days
        met = lost = without_spare = False
        while (left := left - draw.expovariate(rate * job.gpus)) > 0:
            met = True
            lost = lost or draw.random() < UNCURABLE
            without_spare = without_spare or draw.random() < NO_SPARE
        alone += is_wrong or met
        replaced += is_wrong or lost or without_spare
        shrunk += is_wrong or lost
    return FailedJobs(alone / len(jobs), replaced / len(jobs), shrunk / len(jobs))


def mean_of(policy: Policy, seeds: int) -> tuple[Simulated, float]:
    """Means over seeds 0, 1, ..., and the standard deviation of effective training time among them."""
    runs = [simulate(policy, LLAMA3, DAYS, seed) for seed in range(seeds)]
    mean = lambda values: statistics.fmean(list(values))
    spread = statistics.stdev([run.productive for run in runs]) if seeds > 1 else 0.0
    parts = (mean(getattr(run, field.name) for run in runs) for field in dataclasses.fields(Simulated))
    return Simulated(*parts), spread


def report(measured: Measured, scale: Scale, seeds: int, command: str) -> tuple[str, dict]:
    """The page, and its figures by name."""
    ours, theirs = elastic(scale, measured), whole_job(scale)
    policies = [
        theirs,
        whole_job(scale, every_s=300.0),
        elastic(scale, measured, is_warm=False, has_memory=False),
        elastic(scale, measured, has_memory=False),
        elastic(scale, measured, is_warm=False),
        ours,
    ]
    rows = [(policy, *mean_of(policy, seeds)) for policy in policies]
    sensitivity = _sensitivity(scale, measured, seeds)
    jobs = population(JOBS, seed=0)
    failed = [(own, failed_jobs(jobs, own, seed=1)) for own in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)]
    allowed_s = 0.1 * DAYS * DAY_S / 466
    lines = [
        f"# Goodput of {DAYS} days on {GPUS:,} GPUs, simulated",
        "",
        f"`{command}`; means over seeds 0 to {seeds - 1}, with the standard deviation among seeds.",
        "",
        "419 unexpected interruptions and 47 planned ones, with the causes that Llama 3's training had, at exponential "
        f"times: one in {DAYS * 24 / 466:.2f} h. Effective training time is that of steps that count, by elapsed time.",
        "",
        "| policy | restart | effective | redone | noticing | restarting |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {policy.name} | {policy.restart_s:.0f} s | **{run.productive:.2%}** ± {spread:.2%} | {run.redone:.2%} "
            f"| {run.noticing:.2%} | {run.restarting:.2%} |"
            for policy, run, spread in rows
        ),
        "",
        "Beside it, as published: Llama 3 more than 90 % (arXiv:2407.21783), which leaves at most "
        f"{allowed_s / 60:.1f} min for each of its 466 interruptions; ByteRobust 97 % of effective training time on "
        "9,600 GPUs over three months (arXiv:2509.16293). Those are measured, with people and hardware as they are; "
        "these are simulated, with a cure that always works, so that they tell which part a restart has and no more.",
        "",
        "## What is assumed",
        "",
        f"Measured ({measured.source}): "
        + ", ".join(f"{f.name} {getattr(measured, f.name):.2f}" for f in dataclasses.fields(Measured)[1:])
        + ".",
        "",
        "| constant | value | source |",
        "| --- | --- | --- |",
        *(f"| {name} | {value:.6g} | {words} |" for name, value, words in _constants(scale)),
        "",
        "How a cause shows (our reading): "
        + "; ".join(
            f"{shows}: {', '.join(f'{c.name} {c.count:g}' for c in LLAMA3 if c.shows == shows)}"
            for shows in ("crash", "stall", "silent", "planned")
        )
        + ". Spare hosts are there for all policies.",
        "",
        "Without spares, a host that is repaired after 4 h (assumption) is missing "
        f"{419 / (DAYS * 24) * 4:.2f} times at once on average (Little's law). Where a lost host takes a group of 16 "
        f"(tensor 8, pipeline 16) out, that is {419 / (DAYS * 24) * 4 * 16 / (GPUS / GPUS_PER_HOST):.2%} of the "
        "throughput of an elastic run; a run of fixed size would stand still.",
        "",
        "## What matters",
        "",
        "Effective training time when one figure changes, all others as above:",
        "",
        "| figure | value | whole-job restart, half-hourly | autoshard, everything ready, memory tier |",
        "| --- | --- | --- | --- |",
        *(f"| {what} | {value} | {_share(a)} | {_share(b)} |" for what, value, a, b in sensitivity),
        "",
        "## Jobs that fail",
        "",
        f"{JOBS:,} jobs of 8 to 1,024 GPUs for 1 to 30 days (powers of two equally likely, days log-uniform: an "
        "assumption), with Llama 3's failures for each GPU and day. A job fails if it does not end: alone, at its "
        "first failure; with replacement, if the failure is a software bug (54 of 419, all taken to come back) or if "
        f"no spare host comes in time ({NO_SPARE:.0%} of failures, an assumption); elastic, for a software bug only. "
        "A share of jobs ends itself by an error of its own, which nothing here helps.",
        "",
        "| jobs with own errors | fail alone | with replacement | elastic | fewer: replacement | fewer: elastic |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {own:.0%} | {f.alone:.1%} | {f.replaced:.1%} | {f.elastic:.1%} | {1 - f.replaced / f.alone:.1%} "
            f"| {1 - f.elastic / f.alone:.1%} |"
            for own, f in failed
        ),
        "",
        "Paddle reports 34.49 % fewer failed long jobs in production (arXiv:2112.02752), and not how long and large "
        "they were and how many had errors of their own; so the table shows for which of these the same comes out.",
        "",
    ]
    figures = {
        "command": command,
        "measured": dataclasses.asdict(measured),
        "scale": dataclasses.asdict(scale),
        "policies": [
            dataclasses.asdict(policy) | dataclasses.asdict(run) | {"standard_deviation": spread}
            for policy, run, spread in rows
        ],
        "sensitivity": [
            {"figure": what, "value": value, "whole_job": a, "autoshard": b} for what, value, a, b in sensitivity
        ],
        "failed_jobs": [{"own_errors": own} | dataclasses.asdict(found) for own, found in failed],
    }
    return "\n".join(lines), figures


JOBS = 100_000


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _sensitivity(scale: Scale, measured: Measured, seeds: int) -> list[tuple[str, str, float | None, float | None]]:
    """What is changed, to what, and the effective training time of whole-job restart and of autoshard."""
    ours, theirs = elastic(scale, measured), whole_job(scale)
    effective = lambda policy, **change: mean_of(dataclasses.replace(policy, **change), seeds)[0].productive
    rows: list[tuple[str, str, float | None, float | None]] = []
    for minutes in (2, 5, 10, 20, 30):
        rows.append(("restart, whole job", f"{minutes} min", effective(theirs, restart_s=60.0 * minutes), None))
    for restart_s in (30, 60, 120, 300, 600):
        rows.append(("restart, autoshard", f"{restart_s} s", None, effective(ours, restart_s=float(restart_s))))
    for minutes in (5, 15, 30, 60):
        change = {"disk_every_s": 60.0 * minutes}
        rows.append(("checkpoint on disk", f"{minutes} min", effective(theirs, **change), effective(ours, **change)))
    for share in (0.0, 0.5, 0.8, 0.95, 1.0):
        rows.append(("memory tier complete", f"{share:.0%}", None, effective(ours, in_memory=share)))
    for share in (0.0, 0.05, 0.2, 0.5):
        change = {"repeat": share}
        rows.append(("restart fails again", f"{share:.0%}", effective(theirs, **change), effective(ours, **change)))
    for minutes in (0.5, 2, 10):
        change = {"stall_s": 60.0 * minutes}
        rows.append(("stall noticed after", f"{minutes:g} min", effective(theirs, **change), effective(ours, **change)))
    return rows


def _constants(scale: Scale) -> list[tuple[str, float, str]]:
    """Name, value and source of each constant, the latter as it stands in the class."""
    body = ast.parse(inspect.getsource(Scale)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = []
    for one, text in itertools.pairwise(body.body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(text, ast.Expr):
            words = " ".join(str(ast.literal_eval(text.value)).split())
            found.append((one.target.id, getattr(scale, one.target.id), words))
    return found


def main() -> None:
    """Simulates, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chaos", type=pathlib.Path, help="what benchmarks/chaos.py measured")
    for field in dataclasses.fields(Measured)[1:]:
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=float, help=f"seconds, instead of {field.name}")
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    measured = PROTOTYPE if arguments.chaos is None else read_measured(arguments.chaos)
    given = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(Measured)[1:]}
    measured = dataclasses.replace(measured, **{name: value for name, value in given.items() if value is not None})
    command = " ".join(["python benchmarks/goodput.py", *sys.argv[1:]])
    text, figures = report(measured, Scale(), arguments.seeds, command)
    print(text)
    (ROOT / "results" / "goodput.md").write_text(text)
    (ROOT / "results" / "goodput.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

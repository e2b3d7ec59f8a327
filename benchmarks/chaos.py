"""Real runs under `autoshard launch`, killed, stopped and damaged at random: do they end as an undisturbed one does?

    python benchmarks/chaos.py --faults 200 --seed 0      # random faults; goes on where it was stopped
    python benchmarks/chaos.py --recovery 20              # times from a kill to the next committed step
    python benchmarks/chaos.py --overhead 4               # step time with and without a supervisor
    python benchmarks/chaos.py --report                   # only the tables, from what is there

Every run trains a tiny model on four workers of this machine. `--faults`: each run has up to 20 faults, drawn from its
seed: SIGKILL of a worker, of the coordinator, of two, of the supervisor (which is started again); SIGSTOP; SIGTERM;
checkpoints damaged or deleted; at random times after startup, planning, restore, compilation, training or saving have
begun, often before the last fault is recovered from. Afterwards, from `events.jsonl`, `metrics.jsonl` and the process
table: did it finish, did it hang, does each generation follow on from what was committed, how many steps were taken
again, is every step there once, is the loss that of an undisturbed run, is any process left?

Figures go to results/chaos.jsonl, one line a run; their tables to results/chaos.md, and the medians that
`goodput.py --chaos` reads to results/chaos.json.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import yaml
from faults.injection import DAMAGES, Fault, Injected, Kind, Moment, draw, has_come, inject, memory_folder
from faults.lineage import compared_losses, lineage
from faults.recovery import PARTS, Recovery, percentile, recovery
from faults.supervised import SupervisedRun

from autoshard.launch.events import Finished, GenerationStarted, Restored, RunFailed, StepCommitted

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

FAULTS_IN_A_RUN = 20
WORKERS = 4
DISK_EVERY, MEMORY_EVERY = 5, 1
HANG_S = 180.0
"""No event for so long is a hang: longer than the longest limit of a stall in a run of this size, 30 s, and a restart
on a busy machine."""

MOMENT_LIMIT_S = 60.0
"""A moment that does not come within this time is not waited for, such as one after a fault that nobody noticed."""


@dataclasses.dataclass(frozen=True)
class RunReport:
    """What became of one run.

    Attributes:
        seed, number: from which its faults were drawn.
        size: the workers, as `autoshard launch --workers` takes them.
        steps: of the run.
        faults: what was done, as plain data.
        generations, redone, sources: see `faults.lineage.Lineage`.
        final_difference, largest_difference, is_bitwise_equal: see `faults.lineage.Losses`.
        orphans: processes that outlived a supervisor by 10 s, or the run.
        problems: what must not be.
        seconds: that it took.
    """

    seed: int
    number: int
    size: str
    steps: int
    faults: list[dict[str, Any]]
    generations: int
    redone: list[int]
    sources: list[str]
    final_difference: float
    largest_difference: float
    is_bitwise_equal: bool
    orphans: list[str]
    problems: list[str]
    seconds: float


class Bench:
    """Where runs are kept, and how they are made."""

    def __init__(
        self, folder: pathlib.Path, steps: int, memory_every: int | None = MEMORY_EVERY, num_workers: int = WORKERS
    ):
        """Args:
        folder: for configurations and output folders.
        steps: of every run.
        memory_every: steps between two checkpoints in memory; None for none.
        num_workers: of runs of a fixed size, and at most.
        """
        self.folder, self.steps, self.memory_every, self.num_workers = folder, steps, memory_every, num_workers
        folder.mkdir(parents=True, exist_ok=True)

    def config(self, name: str, disk_every: int = DISK_EVERY) -> pathlib.Path:
        """Writes the configuration of the run `name`; its path."""
        path = self.folder / f"{name}.yaml"
        train = {
            "steps": self.steps,
            "log_every": 1,
            "output_dir": str(self.folder / name),
            "resume": True,
            "checkpoint_every": disk_every,
            "memory_every": self.memory_every,
        }
        content = {
            "model": {"name": "gpt", "preset": "tiny", "overrides": {"num_layers": 1, "context_length": 32}},
            "optimizer": {"name": "adamw", "learning_rate": 1e-3, "warmup_steps": 5, "schedule": "cosine"},
            "data": {"name": "python_sources", "batch_size": 24, "sequence_length": 32},
            "train": train,
            "plan": {"work_limit": 1},
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def run(self, name: str, options: Sequence[str], disk_every: int = DISK_EVERY) -> SupervisedRun:
        """A new run, not started."""
        run_dir = self.folder / name
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.rmtree(memory_folder(run_dir).parent, ignore_errors=True)
        return SupervisedRun(self.config(name, disk_every), run_dir, options)

    def undisturbed(self) -> pathlib.Path:
        """The output folder of a run of fixed size to which nothing is done; made once."""
        folder = self.folder / f"undisturbed-{self.steps}"
        marker = folder / "complete"
        if not marker.exists():
            run = self.run(folder.name, launch_options(str(self.num_workers)))
            run.start()
            try:
                run.wait(lambda: False, timeout_s=1200)
            finally:
                run.end()
            if not any(isinstance(event, Finished) for event in run.events):
                raise SystemExit(f"The undisturbed run did not finish: see {folder / 'supervisor.log'}")
            marker.touch()
        return folder


def launch_options(size: str) -> tuple[str, ...]:
    """The options of `autoshard launch` for workers of one CPU device each."""
    elastic = ("--rejoin-after", "3") if ":" in size else ()
    return ("--workers", size, "--devices-per-worker", "1", "--max-crashes", "1000", *elastic)


# ---- random faults


def disturbed(bench: Bench, seed: int, number: int, size: str, faults: Iterable[Fault]) -> RunReport:
    """One run with these faults, as far as it lasts, and what became of it.

    Args:
        bench: makes it.
        seed, number: name it, and draw to whom the faults are done.
        size: its workers, as for `autoshard launch`.
        faults: one after another.
    """
    random_numbers = random.Random(f"targets-{seed}-{number}")
    reference = bench.undisturbed()
    run = bench.run(f"seed{seed}-run{number}", launch_options(size))
    started_s = time.time()
    run.start()
    injected, orphans, problems = [], [], []
    try:
        for fault in faults:
            last = injected[-1].generation if injected else 0
            if not fault.comes_before_steps and not await_commit(run, last):
                if not is_over(run):
                    problems.append(f"hang: nothing was committed for {HANG_S} s after {injected[-1:]}")
                break
            floor = last if injected and injected[-1].fault.kind is not Kind.READY_PROCESS else last - 1
            await_moment(run, fault.moment, floor)
            time.sleep(fault.delay_s)
            if is_over(run) or run.exit_status is not None:
                break
            injected.append(inject(run, fault, random_numbers))
            print(f"  {injected[-1].phase}: {fault.kind}, {injected[-1].target}", flush=True)
            if fault.kind is Kind.SUPERVISOR:
                orphans += run.left_after(10.0)
                run.start()
        if not problems and not await_end(run):
            problems.append(f"hang: no event for {HANG_S} s")
        if run.wait(lambda: run.exit_status is not None, 30.0) and run.exit_status != 0:
            problems.append(f"autoshard launch ended with status {run.exit_status}")
        orphans += run.left_after(5.0)
    finally:
        run.end()
    return judged(bench, run, reference, injected, orphans, problems, (seed, number, size), time.time() - started_s)


def await_moment(run: SupervisedRun, moment: Moment, after: int) -> None:
    """Waits until a generation above `after` is at a moment, for some time at most."""
    run.wait(lambda: has_come(run, moment, after, DISK_EVERY), MOMENT_LIMIT_S)


def is_over(run: SupervisedRun) -> bool:
    """Whether the log says that the run has ended."""
    return any(isinstance(event, Finished | RunFailed) for event in run.events)


def await_commit(run: SupervisedRun, generation: int) -> bool:
    """Waits until a generation above this one has committed a step; False if the run ends or hangs before."""
    return await_event(run, lambda: any(isinstance(e, StepCommitted) and e.generation > generation for e in run.events))


def await_end(run: SupervisedRun) -> bool:
    """Waits until the run is over; False if it hangs before."""
    return await_event(run, lambda: is_over(run))


def await_event(run: SupervisedRun, is_there: Callable[[], bool]) -> bool:
    """Waits until something is there; False if the run ends, or nothing happens for `HANG_S`."""
    seen, since_s = -1, time.monotonic()
    while not run.wait(is_there, 1.0):
        if len(run.events) != seen:
            seen, since_s = len(run.events), time.monotonic()
        if is_over(run) or run.exit_status is not None or time.monotonic() - since_s > HANG_S:
            return is_there()
    return True


def judged(
    bench: Bench,
    run: SupervisedRun,
    reference: pathlib.Path,
    injected: Sequence[Injected],
    orphans: Sequence[str],
    problems: Sequence[str],
    which: tuple[int, int, str],
    seconds: float,
) -> RunReport:
    """Looks at everything that a run left."""
    damaged_s = [one.time for one in injected if one.fault.kind in DAMAGES]
    followed = lineage(run.events, bench.steps, DISK_EVERY, bench.memory_every, damaged_s)
    losses = compared_losses(run.run_dir, reference)
    found = [*problems, *followed.problems, *losses.problems]
    if losses.final_difference > 1e-5:
        found.append(f"the final loss differs by {losses.final_difference:.1e} from that of the undisturbed run")
    if orphans:
        found.append(f"{len(orphans)} orphans: {'; '.join(orphans)}")
    return RunReport(
        *which,
        steps=bench.steps,
        faults=[
            {
                "kind": one.fault.kind.value,
                "aimed_at": one.fault.moment.value,
                "delay_s": round(one.fault.delay_s, 3),
                "generation": one.generation,
                "phase": one.phase,
                "target": one.target,
            }
            for one in injected
        ],
        generations=followed.generations,
        redone=list(followed.redone),
        sources=list(followed.sources),
        final_difference=losses.final_difference,
        largest_difference=losses.largest_difference,
        is_bitwise_equal=losses.is_bitwise_equal,
        orphans=list(orphans),
        problems=found,
        seconds=round(seconds, 1),
    )


def chaos(bench: Bench, seed: int, num_faults: int, path: pathlib.Path) -> None:
    """Runs until `num_faults` faults of this seed are done; what `path` holds already counts."""
    while True:
        done = [RunReport(**line) for line in read_lines(path, "run") if line["seed"] == seed]
        left = num_faults - sum(len(report.faults) for report in done)
        if left <= 0:
            return
        number = max((report.number for report in done), default=-1) + 1
        print(f"seed {seed}, run {number}: {left} faults left", flush=True)
        random_numbers = random.Random(f"faults-{seed}-{number}")
        faults = [draw(random_numbers) for _ in range(min(left, FAULTS_IN_A_RUN))]
        size = f"2:{bench.num_workers}" if number % 2 else str(bench.num_workers)
        report = disturbed(bench, seed, number, size, faults)
        append(path, "run", dataclasses.asdict(report))
        verdict = "; ".join(report.problems) or "all is well"
        print(f"  {len(report.faults)} faults, {report.generations} generations: {verdict}", flush=True)
        if not report.problems:
            shutil.rmtree(bench.folder / f"seed{seed}-run{number}", ignore_errors=True)


# ---- times of recovery


def recoveries(bench: Bench, tier: str, kind: Kind, count: int, seed: int) -> list[Recovery]:
    """Kills or stops one worker of four, again and again, each time after some steps; the recoveries."""
    random_numbers = random.Random(seed)
    run = bench.run(f"recovery-{tier}", launch_options(str(WORKERS)), disk_every=DISK_EVERY if tier == "memory" else 1)
    run.start()
    found = []
    try:
        generation = 0
        while len(found) < count:
            if not await_commit(run, generation):
                raise SystemExit(f"The run ended before all recoveries were measured: see {run.run_dir}")
            if not run.await_ready_processes(120.0):
                print("  the processes for the next generation are not ready after 120 s", flush=True)
            time.sleep(random_numbers.uniform(0.0, 1.0))
            run.read()
            workers = run.workers()
            generation = max(event.generation for event in run.events if isinstance(event, GenerationStarted))
            sent = signal.SIGSTOP if kind is Kind.STOP else signal.SIGKILL
            fault_s = time.time()
            os.kill(random_numbers.choice(workers).pid, sent)
            if not await_commit(run, generation):
                raise SystemExit(f"The run did not recover: see {run.run_dir}")
            one = recovery(run.events, fault_s)
            assert one is not None, "a commit follows a loss"
            source = [event.source for event in run.events if isinstance(event, Restored)][-1]
            found.append(one)
            parts = ", ".join(f"{name} {getattr(one, name):.2f}" for name in PARTS)
            print(f"  {tier}, {kind}: {one.total_s:.2f} s from {source}: {parts}", flush=True)
    finally:
        run.end()
    return found


# ---- overhead


def overhead(bench: Bench, rounds: int) -> list[dict[str, float]]:
    """Step times of the same run with and without a supervisor, side by side: at once, each on a core of its own.

    Cores are swapped from round to round, since they may not be equally fast.
    """
    found = []
    for number in range(rounds):
        cores = (0, 1) if number % 2 == 0 else (1, 0)
        folders = []
        processes = []
        for name, core in zip(("supervised", "alone"), cores, strict=True):
            run_dir = bench.folder / f"overhead-{name}"
            shutil.rmtree(run_dir, ignore_errors=True)
            config = bench.config(run_dir.name, disk_every=10**9)
            command = [sys.executable, "-m", "autoshard"]
            if name == "supervised":
                command += ["launch", str(config), "--workers", "1", "--devices-per-worker", "4"]
            else:
                command += ["train", str(config), "devices=4"]
            log = (bench.folder / f"{run_dir.name}.log").open("wb")
            processes.append(subprocess.Popen(["taskset", "-c", str(core), *command], stdout=log, stderr=log))
            folders.append(run_dir)
        for process in processes:
            process.wait()
        times = [step_times(folder) for folder in folders]
        settled = min(map(len, times)) // 2
        supervised_s, alone_s = (statistics.median(one[-settled:]) for one in times)
        found.append({"supervised_s": supervised_s, "alone_s": alone_s})
        print(f"  {supervised_s * 1e3:.2f} ms supervised, {alone_s * 1e3:.2f} ms alone", flush=True)
    return found


def step_times(run_dir: pathlib.Path) -> list[float]:
    """The time of each step of a run."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["step_time_s"] for line in lines if line["kind"] == "train"]


# ---- results


def append(path: pathlib.Path, kind: str, entry: dict[str, Any]) -> None:
    """Adds one line of results."""
    with path.open("a") as file:
        file.write(json.dumps({"kind": kind, **entry}) + "\n")


def read_lines(path: pathlib.Path, kind: str) -> list[dict[str, Any]]:
    """The lines of a kind, without it."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: value for key, value in line.items() if key != "kind"} for line in lines if line["kind"] == kind]


def report(path: pathlib.Path) -> str:
    """The tables of all results."""
    sections = ["# Faults on purpose", "", f"By `benchmarks/chaos.py`; {machine()}.", ""]
    runs = [RunReport(**line) for line in read_lines(path, "run")]
    if runs:
        sections += fault_tables(runs)
    if rows := [f"| {line['tier']} | {line['fault']} | {figures(line)} |" for line in read_lines(path, "recovery")]:
        sections += [
            "## From a fault to the next committed step",
            "",
            "Seconds, four workers of one device, of which one is killed or stopped as soon as the processes of the "
            "next generation are ready; medians of the parts. A checkpoint on disk is begun after every step where the "
            f"state is restored from there. Load of the machine: {load_of(read_lines(path, 'recovery'))}.",
            "",
            "| restored from | fault | times | median | 95th percentile | longest | "
            + " | ".join(name.removesuffix("_s") for name in PARTS)
            + " |",
            "| --- | --- |" + " --- |" * (4 + len(PARTS)),
            *rows,
            "",
        ]
    if found := read_lines(path, "overhead"):
        ratios = sorted(line["supervised_s"] / line["alone_s"] for line in found)
        sections += [
            "## The supervisor without failures",
            "",
            "Median step time with a supervisor by that without one, both at once and each on a core of its own, which "
            f"they swap from round to round: {statistics.geometric_mean(ratios):.4f} over {len(ratios)} rounds "
            f"({ratios[0]:.4f} to {ratios[-1]:.4f}); a step takes "
            f"{statistics.median(line['alone_s'] for line in found) * 1e3:.1f} ms.",
            "",
        ]
    return "\n".join(sections)


def load_of(lines: Sequence[dict[str, Any]]) -> str:
    """The load averages that were noted with results."""
    return ", ".join(f"{line['load']:.1f}" for line in lines)


def fault_tables(runs: Sequence[RunReport]) -> list[str]:
    """What was done to the runs, and what became of them."""
    faults = [fault for run in runs for fault in run.faults]
    redone = [steps for run in runs for steps in run.redone]
    problems = [f"seed {run.seed}, run {run.number}: {problem}" for run in runs for problem in run.problems]
    phases = sorted({fault["phase"] for fault in faults})
    kinds = sorted({fault["kind"] for fault in faults})
    count = lambda kind, phase: sum(fault["kind"] == kind and fault["phase"] == phase for fault in faults)
    sources = [source for run in runs for source in run.sources[1:]]
    return [
        f"## {len(faults)} faults in {len(runs)} runs",
        "",
        f"Seeds {', '.join(map(str, sorted({run.seed for run in runs})))}. {sum(run.generations for run in runs)} "
        f"generations; restarts from memory: {sources.count('memory')}, from disk: {sources.count('disk')}, from the "
        f"initial state: {sources.count('')}. Steps taken again: {sum(redone)} in all, at most "
        f"{max(redone, default=0)} after a fault. Final losses differ by at most "
        f"{max(run.final_difference for run in runs):.1e} from the undisturbed run's; "
        f"{sum(run.is_bitwise_equal for run in runs)} runs are equal to it bit by bit in every step. Orphans: "
        f"{sum(len(run.orphans) for run in runs)}.",
        "",
        *(["Problems:", "", *(f"- {problem}" for problem in problems)] if problems else ["Problems: none."]),
        "",
        "| fault, by what the coordinator was at | " + " | ".join(phases) + " |",
        "| --- |" + " --- |" * len(phases),
        *(f"| {kind} | " + " | ".join(str(count(kind, phase)) for phase in phases) + " |" for kind in kinds),
        "",
    ]


def figures(line: dict[str, Any]) -> str:
    """A row of recoveries."""
    totals = [sum(one[name] for name in PARTS) for one in line["recoveries"]]
    medians = [statistics.median(one[name] for one in line["recoveries"]) for name in PARTS]
    numbers = [statistics.median(totals), percentile(totals, 0.95), max(totals), *medians]
    return " | ".join([str(len(totals)), *(f"{number:.2f}" for number in numbers)])


def summary(path: pathlib.Path) -> dict[str, Any]:
    """Median times by tier and fault, for `goodput.py`."""
    return {
        f"{line['tier']}, {line['fault']}": {
            name: statistics.median(one[name] for one in line["recoveries"]) for name in PARTS
        }
        for line in read_lines(path, "recovery")
    } | {"source": f"benchmarks/chaos.py, {machine()}"}


def machine() -> str:
    """This machine and the day."""
    return f"{os.cpu_count()} cores, {datetime.datetime.now(datetime.UTC).date()}"


def main() -> None:
    """Does what the command line asks for, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=0, help="random faults, over as many runs as they need")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400, help="of each run with random faults")
    parser.add_argument("--recovery", type=int, default=0, help="kills to time, from disk and from memory each")
    parser.add_argument("--stops", type=int, default=0, help="stopped workers to time")
    parser.add_argument("--overhead", type=int, default=0, help="rounds with and without a supervisor")
    parser.add_argument("--no-memory", action="store_true", help="random faults without the memory tier")
    parser.add_argument("--report", action="store_true", help="only write the tables")
    parser.add_argument("--folder", type=pathlib.Path, help="of the runs; kept for runs with problems")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS / "chaos.jsonl")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the runs end as well
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    folder = arguments.folder or pathlib.Path(tempfile.gettempdir()) / f"autoshard-chaos-{os.getuid()}"
    path = arguments.results
    if arguments.faults:
        memory_every = None if arguments.no_memory else MEMORY_EVERY
        chaos(Bench(folder, arguments.steps, memory_every), arguments.seed, arguments.faults, path)
    plans = [("disk", Kind.WORKER, arguments.recovery), ("memory", Kind.WORKER, arguments.recovery)]
    for tier, kind, count in [*plans, ("memory", Kind.STOP, arguments.stops)]:
        if count:
            bench = Bench(folder, 100_000, MEMORY_EVERY if tier == "memory" else None)
            found = recoveries(bench, tier, kind, count, arguments.seed)
            append(
                path,
                "recovery",
                {"tier": tier, "fault": kind, "load": os.getloadavg()[0], "recoveries": [vars(one) for one in found]},
            )
    for line in overhead(Bench(folder, 1000, None), arguments.overhead) if arguments.overhead else ():
        append(path, "overhead", line)
    text = report(path)
    path.with_suffix(".md").write_text(text)
    path.with_suffix(".json").write_text(json.dumps(summary(path), indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()

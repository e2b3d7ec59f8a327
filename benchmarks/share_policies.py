"""160 jobs on 64 mixed devices under five policies: completion times, utilisation, failed jobs, moves.

    python benchmarks/share_policies.py [--seeds 5] [--hours 3] [--part policies ...]

Simulated by `autoshard/share/simulation`. The cluster is four nodes of eight V100 and four of eight P100; the models
are those of configs/jobs/mixed.yaml, with the speeds of their plans (planned on the first run, then kept; the table of
results/share-rates.md). Jobs are in the likeness of Philly's (`autoshard/share/traces/likeness.py` tells what is like
it): nobody ran them. Parts:

- policies: mean, 99th percentile, makespan and so on of each policy, over seeds.
- wrong: the work that is left is told to the policies wrongly, by a factor that is log-normal for each job.
- moves: a move takes 10 s, 60 s (everywhere else), 300 s.
- load: the jobs come in more or fewer hours.
- helios: jobs in the likeness of Helios'.
- picture: FIFO and ours over time, as docs/images/share.png.
- failures: long jobs, and nodes that fail: Paddle's two published figures beside ours.

Writes results/share-policies.md and .jsonl, a line for each simulation; parts that are not asked for are kept.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import random
import statistics
from collections.abc import Iterable, Sequence

from autoshard.cluster import Cluster
from autoshard.share.allocation.cp_sat import SolveLimits
from autoshard.share.allocation.objective import DecisionRules, Objective
from autoshard.share.jobs_file import read_jobs_file
from autoshard.share.jobs_of_file import jobs_of_file, templates_of
from autoshard.share.picture import write_picture
from autoshard.share.planned_rates import default_rate_cache
from autoshard.share.policies.policy import Policy
from autoshard.share.policies.registry import make_policy
from autoshard.share.pool import Node, nodes_of
from autoshard.share.simulation.events import random_failures
from autoshard.share.simulation.outcome import Figures
from autoshard.share.simulation.simulate import SimulationSettings, simulate
from autoshard.share.situation import Decision, Job, Situation
from autoshard.share.traces.likeness import helios_like, philly_like
from autoshard.share.traces.record import TraceJob
from autoshard.share.traces.workload import Template, workload

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
JOBS = ROOT / "configs" / "jobs" / "mixed.yaml"
CLUSTER = ROOT / "configs" / "clusters" / "v100x32_p100x32.yaml"
POLICIES = ("fifo", "sjf", "rigid", "sia-like", "autoshard")
NUM_JOBS = 160
MOST_DEVICE_HOURS = 200.0
PARTS = ("policies", "picture", "wrong", "moves", "load", "helios", "failures")


@dataclasses.dataclass(frozen=True)
class Misinformed:
    """A policy that is told wrong amounts of work: each job's by a factor exp(N(0, spread)) of its own."""

    inner: Policy
    spread: float
    seed: int

    @property
    def name(self) -> str:
        """As it is."""
        return self.inner.name

    @property
    def round_s(self) -> float:
        """As it is."""
        return self.inner.round_s

    def decide(self, situation: Situation) -> Decision:
        """Decides on what it is told."""
        told = tuple(
            dataclasses.replace(state, remaining_steps=max(state.remaining_steps * self._factor(state.job.name), 1.0))
            for state in situation.jobs
        )
        return self.inner.decide(dataclasses.replace(situation, jobs=told))

    def _factor(self, name: str) -> float:
        return math.exp(random.Random(f"{self.seed} {name}").gauss(0.0, self.spread))


class Bench:
    """The cluster, the models, and the results so far."""

    def __init__(self, seeds: int, hours: float):
        file, self.cluster = read_jobs_file(JOBS), Cluster.from_file(CLUSTER)
        jobs = jobs_of_file(file, self.cluster, default_rate_cache(), print)
        self.templates = templates_of(file, jobs)
        self.nodes: tuple[Node, ...] = nodes_of(self.cluster)
        self.seeds, self.hours = seeds, hours
        self.path = RESULTS / "share-policies.jsonl"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.rows: list[dict[str, object]] = [json.loads(line) for line in lines]
        (RESULTS / "share-rates.md").write_text(rates_table(jobs, self.cluster.name))

    def run(
        self,
        part: str,
        case: str,
        seed: int,
        trace: Sequence[TraceJob],
        policy: Policy,
        settings: SimulationSettings = SimulationSettings(),  # noqa: B008
        move_s: float = 60.0,
    ) -> Figures:
        """Simulates, and keeps the figures."""
        templates = [Template(dataclasses.replace(t.job, move_s=move_s), t.most_device_hours) for t in self.templates]
        run = simulate(workload(trace, templates), self.nodes, policy, settings)
        figures = run.figures
        row = {"part": part, "case": case, "seed": seed, "gap": run.worst_gap, **dataclasses.asdict(figures)}
        row["load"] = os.getloadavg()[0]
        self.rows.append(row)
        minutes, hours = figures.mean_completion_s / 60, figures.makespan_s / 3600
        print(f"{part} {case} seed {seed} {figures.policy}: mean {minutes:.1f} min, makespan {hours:.1f} h", flush=True)
        return figures

    def begin(self, part: str) -> None:
        """Forgets what is there of a part."""
        self.rows = [row for row in self.rows if row["part"] != part]

    def save(self) -> None:
        """Writes all figures."""
        self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))


def policy(name: str, objective: Objective = Objective.COMPLETION) -> Policy:
    """A policy as it is simulated."""
    return make_policy(name, DecisionRules(objective), SolveLimits(time_limit_s=10.0, gap=0.005))


def philly(bench: Bench, seed: int, hours: float | None = None) -> tuple[TraceJob, ...]:
    """The usual trace."""
    return philly_like(NUM_JOBS, (hours or bench.hours) * 3600, seed, MOST_DEVICE_HOURS)


def run_policies(bench: Bench) -> None:
    """All policies."""
    for seed in range(bench.seeds):
        for name in POLICIES:
            bench.run("policies", "", seed, philly(bench, seed), policy(name))


def run_wrong(bench: Bench) -> None:
    """Wrong amounts of work."""
    for seed in range(min(bench.seeds, 3)):
        for spread in (0.5, 1.0, 2.0):
            wrong = Misinformed(policy("autoshard"), spread, seed)
            bench.run("wrong", f"{spread:g}", seed, philly(bench, seed), wrong)


def run_moves(bench: Bench) -> None:
    """Other times of a move."""
    for seed in range(min(bench.seeds, 2)):
        for move_s in (10.0, 300.0):
            for name in ("fifo", "sia-like", "autoshard"):
                bench.run("moves", f"{move_s:g} s", seed, philly(bench, seed), policy(name), move_s=move_s)


def run_load(bench: Bench) -> None:
    """More and fewer hours."""
    for seed in range(min(bench.seeds, 2)):
        for hours in (1.0, 8.0):
            for name in ("fifo", "sia-like", "autoshard"):
                bench.run("load", f"{hours:g} h", seed, philly(bench, seed, hours), policy(name))


def run_helios(bench: Bench) -> None:
    """Another likeness."""
    for seed in range(min(bench.seeds, 2)):
        for name in POLICIES:
            bench.run("helios", "", seed, helios_like(NUM_JOBS, bench.hours * 3600, seed), policy(name))


def run_picture(bench: Bench) -> None:
    """FIFO and ours on the first trace, drawn."""
    jobs = workload(philly(bench, 0), bench.templates)
    runs = [simulate(jobs, bench.nodes, policy(name)) for name in ("fifo", "autoshard")]
    write_picture(ROOT / "docs" / "images" / "share.png", bench.nodes, runs)


def long_jobs(seed: int) -> tuple[TraceJob, ...]:
    """60 jobs of one to ten days on 8 or 16 devices, in ten days."""
    draw, day_s = random.Random(seed), 86400.0
    return tuple(
        TraceJob(
            f"job{number:03}",
            draw.uniform(0, 10 * day_s),
            draw.choice((8, 16)),
            day_s * math.exp(draw.uniform(0, math.log(10))),
        )
        for number in range(60)
    )


def run_failures(bench: Bench) -> None:
    """Long jobs on nodes that fail: alone they are lost, under a supervisor they go on."""
    for seed in range(min(bench.seeds, 2)):
        trace = sorted(long_jobs(seed), key=lambda job: job.arrival_s)
        for days in (30, 90):
            failures = random_failures(bench.nodes, days * 86400.0, 4 * 3600.0, 120 * 86400.0, seed)
            for name, retries in (("fifo", 0), ("fifo", 3), ("autoshard", None)):
                settings = SimulationSettings(failures, retries, refresh_s=3600.0)
                case = f"{days} days, {'any number of' if retries is None else retries} retries"
                bench.run("failures", case, seed, trace, policy(name), settings)


def rates_table(jobs: Iterable[Job], cluster: str) -> str:
    """The speeds that simulations use."""
    lines = [
        "# Speeds of the jobs that are simulated",
        "",
        f"Steps in a second on `{cluster}`, from plans for just these devices; `~` lies between two of them, by the "
        "power "
        "law through these. Times are predictions of the cost model, which no V100 or P100 has confirmed. Written by "
        "`python benchmarks/share_policies.py`.",
    ]
    for job in jobs:
        lines += ["", f"## {job.name}", "", "| devices | steps/s | by the rate for each device of the best |"]
        lines += ["| --- | --- | --- |"]
        best = max(rate.steps_per_s / rate.footprint.num_devices for rate in job.rates.entries)
        for rate in sorted(job.rates.entries, key=lambda own: (own.footprint.groups, own.footprint.num_devices)):
            mark = "~" if rate.source.value == "interpolated" else ""
            efficiency = rate.steps_per_s / rate.footprint.num_devices / best
            lines.append(f"| {rate.footprint} | {mark}{rate.steps_per_s:.3g} | {efficiency:.0%} |")
    return "\n".join(lines) + "\n"


def of(rows: Iterable[dict[str, object]], part: str, case: str | None = None, name: str | None = None) -> list[dict]:
    """The rows of a part, a case and a policy."""
    return [
        row
        for row in rows
        if row["part"] == part and (case is None or row["case"] == case) and (name is None or row["policy"] == name)
    ]


def mean(rows: Sequence[dict], key: str) -> float:
    """Over seeds."""
    return statistics.fmean(row[key] for row in rows)


def comparison(rows: list[dict], part: str, case: str = "") -> list[str]:
    """A table of policies."""
    names = list(dict.fromkeys(row["policy"] for row in of(rows, part, case)))
    seeds = sorted({row["seed"] for row in of(rows, part, case)})
    fifo = {row["seed"]: row["mean_completion_s"] for row in of(rows, part, case, "fifo")}
    lines = [
        "| policy | mean completion | by FIFO's (least to most, of seeds) | 99th percentile | makespan | devices in "
        "use | "
        "efficiency | moves | a decision, mean and longest |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        own = of(rows, part, case, name)
        ratios = [row["mean_completion_s"] / fifo[row["seed"]] for row in own if row["seed"] in fifo]
        lines.append(
            f"| {name} | {mean(own, 'mean_completion_s') / 60:.1f} min | {statistics.fmean(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) | {mean(own, 'p99_completion_s') / 3600:.1f} h | "
            f"{mean(own, 'makespan_s') / 3600:.1f} h | {mean(own, 'utilisation'):.0%} | "
            f"{mean(own, 'efficiency'):.0%} | {mean(own, 'num_moves'):.0f} | "
            f"{mean(own, 'mean_decision_s') * 1e3:.0f} ms, "
            f"{max(row['longest_decision_s'] for row in own):.2f} s |"
        )
    return [f"Seeds {', '.join(map(str, seeds))}.", "", *lines]


def cases_table(rows: list[dict], part: str, heading: str) -> list[str]:
    """Mean completion of each case and policy."""
    cases = list(dict.fromkeys(row["case"] for row in of(rows, part)))
    names = list(dict.fromkeys(row["policy"] for row in of(rows, part)))
    lines = [f"| {heading} | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for case in cases:
        cells = [
            f"{mean(own, 'mean_completion_s') / 60:.1f} min" if (own := of(rows, part, case, n)) else "" for n in names
        ]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return lines


def paddle_table(rows: list[dict]) -> list[str]:
    """Failed jobs and efficiency, beside Paddle's."""
    lines = [
        "| a node fails once in | failed: FIFO, no retries | FIFO, 3 retries | autoshard | fewer than with none | "
        "the same "
        "if 30 % of jobs end by errors of their own | efficiency: FIFO, no retries | FIFO, 3 retries | autoshard | "
        "more "
        "than with 3 retries | mean completion, by FIFO's with 3 retries |",
        "| --- |" + " --- |" * 10,
    ]
    cases = list(dict.fromkeys(str(row["case"]).split(",")[0] for row in of(rows, "failures")))
    for days in cases:
        alone, retried = (of(rows, "failures", f"{days}, {n} retries") for n in (0, 3))
        ours = of(rows, "failures", f"{days}, any number of retries")
        share = [mean(own, "num_failed") / mean(own, "num_jobs") for own in (alone, retried, ours)]
        useful = [mean(own, "efficiency") for own in (alone, retried, ours)]
        fewer = 1 - share[2] / share[0] if share[0] else 0.0
        with_own = [0.3 + 0.7 * one for one in share]
        sooner = mean(ours, "mean_completion_s") / mean(retried, "mean_completion_s")
        lines.append(
            f"| {days} | {share[0]:.1%} | {share[1]:.1%} | {share[2]:.1%} | {fewer:.1%} | "
            f"{1 - with_own[2] / with_own[0]:.1%} | {useful[0]:.0%} | {useful[1]:.0%} | {useful[2]:.0%} | "
            f"{useful[2] / useful[1] - 1:+.1%} | {sooner:.2f} |"
        )
    return lines


def report(rows: list[dict], hours: float) -> str:
    """All parts that are there."""
    lines = [
        "# 160 jobs on 64 mixed devices, simulated",
        "",
        "`python benchmarks/share_policies.py`: four nodes of eight V100 and four of eight P100; the models and "
        "speeds of "
        "[share-rates.md](share-rates.md), from plans; 160 jobs in the likeness of Philly's (none of them was run by "
        f"anybody), of at most {MOST_DEVICE_HOURS:g} device hours, that come within {hours:g} h. A start or a move "
        "takes "
        "60 s, in which a job takes no step. Every policy knows the speeds; those but Sia's know the work that is "
        "left, "
        "FIFO for its reservations. FIFO, shortest job first and `rigid` (the integer program, nothing moves) give "
        "each "
        "job the devices that it asks for, on the kind where it ends soonest; the others choose sizes within the job's "
        "limits. Efficiency is the share of device time that the work takes at its best rate for each device.",
    ]
    if of(rows, "policies"):
        own, sia, fifo = (
            mean(of(rows, "policies", "", name), "mean_completion_s")
            for name in ("autoshard (completion)", "sia-like", "fifo")
        )
        lines += ["", "## Policies", "", *comparison(rows, "policies")]
        lines += [
            "",
            f"Ours is {1 - own / fifo:.0%} below FIFO with backfill, and {1 - own / sia:.0%} below the Sia-like one.",
        ]
    if of(rows, "helios"):
        lines += ["", "## Jobs in the likeness of Helios'", "", *comparison(rows, "helios")]
    if of(rows, "wrong"):
        lines += ["", "## Where the work that is left is told wrongly", ""]
        lines += ["By a factor exp(N(0, s)) for each job; for s = 1 a third is off by more than 2.7 times.", ""]
        lines += cases_table(rows, "wrong", "s")
    if of(rows, "moves"):
        lines += ["", "## Where a move takes another time", "", *cases_table(rows, "moves", "a move takes")]
    if of(rows, "load"):
        lines += ["", "## Where the jobs come in another time", "", *cases_table(rows, "load", "160 jobs within")]
    if of(rows, "failures"):
        lines += ["", "## Nodes that fail, and Paddle's two figures", ""]
        lines += [
            "60 jobs of one to ten days on 8 or 16 devices come within ten days (log-uniform: assumptions); nodes "
            "fail at "
            "exponential times and are repaired after 4 h; checkpoints on disk every 30 min, of which a job on several "
            "nodes of ours needs none. A job without retries is lost with its first node; with three, at the fourth; "
            "under a supervisor it goes on. Paddle (arXiv:2112.02752) reports 34.49 % fewer failed long jobs and "
            "33.91 % "
            "more scheduling efficiency in production, and neither what jobs and failures there were nor how "
            "efficiency "
            "is defined: so these are set beside each other, not compared.",
            "",
        ]
        lines += paddle_table(rows)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    bench = Bench(arguments.seeds, arguments.hours)
    run = {
        "policies": run_policies,
        "picture": run_picture,
        "wrong": run_wrong,
        "moves": run_moves,
        "load": run_load,
        "helios": run_helios,
        "failures": run_failures,
    }
    for part in arguments.part:
        bench.begin(part)
        run[part](bench)
        bench.save()
        (RESULTS / "share-policies.md").write_text(report(bench.rows, arguments.hours))
    print((RESULTS / "share-policies.md").read_text())


if __name__ == "__main__":
    main()

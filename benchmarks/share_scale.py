"""How long a decision for 200 jobs on 4,096 devices takes, and how good it provably is.

    python benchmarks/share_scale.py [--rounds 5] [--time-limit 10] [--workers 2]

Four kinds of nodes, 128 nodes of eight devices each. Jobs run at k^p on k devices, p between 0.6 and 0.95, each kind at
a speed of its own for each job, on 1 to 8 devices of a node or 2 to 128 whole nodes; sizes are log-uniform. The first
decision is for jobs that all wait. Before each further one a tenth of the jobs ends, as many come, and five nodes fail,
so that the rest run and moves have their price. Times are of the whole decision, formulation included. Writes
results/share-scale.md and .json.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import random
import time

from autoshard.share.allocation.cp_sat import SolveLimits
from autoshard.share.allocation.decide import decide
from autoshard.share.allocation.objective import DecisionRules, Objective
from autoshard.share.footprint import Footprint, Part
from autoshard.share.pool import Node
from autoshard.share.rates import Rate, Rates
from autoshard.share.situation import Job, JobState, Situation

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
KINDS, NODES_OF_A_KIND, DEVICES_OF_A_NODE, JOBS = 4, 128, 8, 200


def some_job(number: int, draw: random.Random, now_s: float) -> Job:
    """A job with rates on every kind."""
    exponent, entries = draw.uniform(0.6, 0.95), []
    most = 2 ** draw.randint(2, 10)
    for kind in range(KINDS):
        speed = draw.uniform(0.5, 2.0)
        within = [Footprint((Part(f"kind{kind}", 1, k),)) for k in (1, 2, 4, 8)]
        whole = [Footprint((Part(f"kind{kind}", n, 8),)) for n in (2, 4, 8, 16, 32, 64, 128)]
        sizes = [f for f in (*within, *whole) if f.num_devices <= most]
        entries += [Rate(f, speed * f.num_devices**exponent) for f in sizes]
    steps = math.exp(draw.uniform(math.log(600.0), math.log(3e7)))
    weight = draw.choice([1.0, 1.0, 1.0, 2.0, 4.0])
    return Job(f"job{number}", steps, Rates(tuple(entries)), now_s, weight, now_s + draw.uniform(1, 50) * 3600)


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gap", type=float, default=0.01)
    arguments = parser.parse_args()
    limits = SolveLimits(arguments.time_limit, arguments.gap, arguments.workers)
    rows = []
    for objective in Objective:
        rows += measured(objective, limits, arguments.rounds)
    RESULTS.joinpath("share-scale.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = [
        "# Decisions for 200 jobs on 4,096 devices",
        "",
        f"`python benchmarks/share_scale.py --rounds {arguments.rounds} --time-limit {arguments.time_limit:g} "
        f"--workers {arguments.workers} --gap {arguments.gap:g}`, on {os.cpu_count()} cores. Load is that of the last "
        "minute, by others too: above the number of cores, times are longer than on a quiet machine.",
        "",
        "| objective | decision | load | seconds | gap | jobs that run | devices in use | moved |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['objective']} | {row['round']} | {row['load']:.1f} | {row['seconds']:.2f} | {row['gap']:.2%} | "
            f"{row['running']} | {row['devices']} | {row['moved']} |"
        )
    worst = max(row["seconds"] for row in rows), max(row["gap"] for row in rows)
    lines += ["", f"Longest {worst[0]:.2f} s, greatest gap {worst[1]:.2%}."]
    RESULTS.joinpath("share-scale.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def measured(objective: Objective, limits: SolveLimits, rounds: int) -> list[dict[str, object]]:
    """Decisions of one run of the cluster."""
    draw = random.Random(0)
    count = KINDS * NODES_OF_A_KIND
    nodes = tuple(Node(n, f"kind{n // NODES_OF_A_KIND}", DEVICES_OF_A_NODE) for n in range(count))
    jobs = [JobState(job, job.steps) for job in (some_job(number, draw, 0.0) for number in range(JOBS))]
    rules, rows, now_s, numbers = DecisionRules(objective), [], 0.0, JOBS
    for number in range(rounds):
        there = nodes if number == 0 else tuple(n for n in nodes if n.number not in draw.sample(range(count), 5))
        situation = Situation(now_s, there, tuple(jobs))
        started_s = time.perf_counter()
        decision = decide(situation, rules, limits)
        seconds = time.perf_counter() - started_s
        placed = decision.placements
        moved = sum(s.placement is not None and placed.get(s.job.name) != s.placement for s in jobs)
        rows.append(
            {
                "objective": objective.value,
                "round": number + 1,
                "load": os.getloadavg()[0],
                "seconds": seconds,
                "gap": decision.gap,
                "running": len(placed),
                "devices": sum(p.footprint.num_devices for p in placed.values()),
                "moved": moved,
            }
        )
        print(rows[-1], flush=True)
        now_s += 3600.0
        left = [dataclasses.replace(s, placement=placed.get(s.job.name), has_run=True) for s in jobs]
        draw.shuffle(left)
        jobs = left[JOBS // 10 :]
        while len(jobs) < JOBS:
            jobs.append(JobState(job := some_job(numbers, draw, now_s), job.steps))
            numbers += 1
    return rows


if __name__ == "__main__":
    main()

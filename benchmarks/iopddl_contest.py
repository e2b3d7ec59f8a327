"""Solves instances of the ASPLOS/EuroSys 2025 contest as a user would; `python benchmarks/iopddl_contest.py FOLDER`.

For each instance in FOLDER it runs `autoshard solve FILE --time-limit S --no-cache` in a process of its own, reads the
choices from the last line of its output, prices them from the instance's JSON by rules written here once more, and
prints a table: seconds from start to end of the process, peak memory, cost, lower bound, cost over that of the best
team, gap to the own bound and to the best bound known. With `--out NAME` the table and all figures also go to
`results/NAME.md` and `results/NAME.json`.

The contest (github.com/google/iopddl) gave its teams eight cores.
"""

import argparse
import dataclasses
import datetime
import gzip
import json
import math
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time

FORBIDDEN = 1e17
"""A cost from here on is forbidden."""


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """What is known of an instance: the time limit, the best and second of 20 teams, XLA's pass, a lower bound."""

    limit_s: float
    best: int
    second: int
    xla: int | None
    bound: int


PUBLISHED = {
    "A": Published(60, 6_548_641_531, 6_569_457_676, 13_214_846_074, 6_513_812_172),
    "G": Published(120, 217_039, 217_039, 1_264_777, 216_931),
    "M": Published(180, 49_928_460_991, 66_904_362_403, None, 49_407_421_919),
    "S": Published(240, 1_534_613_444, 1_956_391_668, None, 1_511_240_135),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
      cost: Priced here; +inf if infeasible or if there is no solution. bound: As the solver says.
      wall_s: Of the whole process. peak_bytes: Largest resident set of it, or of a child of it.
      load: Processes that wanted a core, on average over the last minute, before and after.
    """

    name: str
    nodes: int
    limit_s: float
    cost: float
    bound: float
    wall_s: float
    peak_bytes: int
    load: tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="with asplos-2025-iopddl-*.json.gz")
    parser.add_argument("--only", default="", help="letters of the instances to run, for example AG")
    parser.add_argument("--limit", type=float, default=None, help="seconds, instead of each instance's own limit")
    parser.add_argument("--out", default=None, help="name of the results' files")
    arguments = parser.parse_args()
    runs = []
    for path in sorted(arguments.folder.glob("asplos-2025-iopddl-*.json*")):
        name = path.name.removeprefix("asplos-2025-iopddl-").split(".")[0]
        if arguments.only and name not in arguments.only:
            continue
        known = PUBLISHED.get(name)
        limit_s = arguments.limit or (known.limit_s if known else 240.0)
        runs.append(run(name, path, limit_s))
        print(table(runs[-1:]).splitlines()[-1], flush=True)
    text = f"{table(runs)}\n{remarks()}\n"
    print(text)
    if arguments.out:
        results = pathlib.Path(__file__).with_name("results")
        (results / f"{arguments.out}.md").write_text(text)
        rows = [dataclasses.asdict(own) for own in runs]
        (results / f"{arguments.out}.json").write_text(json.dumps(rows, indent=1) + "\n")


def run(name: str, path: pathlib.Path, limit_s: float) -> Run:
    """Runs the solver on one instance."""
    command = [sys.executable, "-c", "from autoshard.cli import app; app()", "solve", str(path)]
    command += ["--time-limit", str(limit_s), "--no-cache"]
    before, began = os.getloadavg()[0], time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)
        _, _, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began
        output.seek(0)
        lines = output.read().splitlines()
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        problem = json.load(file)["problem"]
    cost, bound = math.inf, -math.inf
    if lines and lines[-1].startswith("["):
        cost = price(problem, json.loads(lines[-1]))
        bound = float(re.search(r"lower bound (\S+)", lines[-2]).group(1))
    scale = 1 if sys.platform == "darwin" else 1024
    return Run(name, len(problem["nodes"]["costs"]), limit_s, cost, bound, wall_s, usage.ru_maxrss * scale,
               (before, os.getloadavg()[0]))  # fmt: skip


def price(problem: dict, choices: list[int]) -> float:
    """Cost of the choices by the contest's rules; +inf if a cost is forbidden or the usage limit is exceeded."""
    nodes, edges = problem["nodes"], problem["edges"]
    total = sum(costs[choice] for costs, choice in zip(nodes["costs"], choices, strict=True))
    for (source, target), costs in zip(edges["nodes"], edges["costs"], strict=True):
        total += costs[choices[source] * len(nodes["costs"][target]) + choices[target]]
    steps: dict[int, int] = {}
    for (start, stop), usages, choice in zip(nodes["intervals"], nodes["usages"], choices, strict=True):
        if start < stop:
            steps[start] = steps.get(start, 0) + usages[choice]
            steps[stop] = steps.get(stop, 0) - usages[choice]
    usage = 0
    for instant in sorted(steps):
        usage += steps[instant]
        if problem["usage_limit"] is not None and usage > problem["usage_limit"]:
            return math.inf
    return math.inf if total >= FORBIDDEN else total


def table(runs: list[Run]) -> str:
    """Markdown."""
    lines = [
        "| instance | nodes | limit | seconds | memory | cost | lower bound | gap "
        "| of the best team's | of the second's | above the best known bound | load |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for own in runs:
        known = PUBLISHED.get(own.name)
        found = math.isfinite(own.cost)
        gap = f"{(own.cost - own.bound) / own.cost:.3%}" if found else "-"
        ratios = ["-"] * 3
        if known and found:
            ratios = [f"{own.cost / known.best:.4f}", f"{own.cost / known.second:.4f}",
                      f"{own.cost / known.bound - 1:.3%}"]  # fmt: skip
        cells = [own.name, f"{own.nodes:,}", f"{own.limit_s:g} s", f"{own.wall_s:.1f}",
                 f"{own.peak_bytes / 1e9:.2f} GB", f"{own.cost:,.0f}" if found else "none", f"{own.bound:,.0f}", gap,
                 *ratios, f"{own.load[0]:.1f} to {own.load[1]:.1f}"]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def remarks() -> str:
    """On what it was measured, and when."""
    day = datetime.datetime.now(datetime.UTC).date()
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {day}; "
        "load: processes that wanted a core, averaged over a minute, when the run began and when it ended "
        "(the run itself counts for one to two)."
    )


if __name__ == "__main__":
    main()

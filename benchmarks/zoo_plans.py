"""Every full-size configuration on three clusters: the plan, its proof, and the best hand-written strategy.

    python benchmarks/zoo_plans.py                       # every case; those already in the results file are kept
    python benchmarks/zoo_plans.py --only llama_70b@h100x64 --no-strategies
    python benchmarks/zoo_plans.py --table               # the tables of what is in the results file

A case is a file of configs/ and a cluster, planned from shapes in a process of its own, so that its memory is its own.
The plan searches meshes as by default, or all of up to `--axes` axes, within the devices' memory. One configuration of
each family (`COMPARED`) is also planned under every strategy of `autoshard.baselines` that applies to it, each on its
usual meshes (one axis; for a mix, the best tensor axis inside a node); a strategy counts where it keeps to the memory.
Results go to benchmarks/results/zoo_plans.jsonl, one line a case, and the table to benchmarks/results/zoo_plans.md.
`--axes 3` keeps files of its own.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CLUSTERS = ("h100x64", "h100x1024", "tpu-v5e-x256")
COMPARED = (
    "gpt_13b",
    "llama_8b",
    "encoder_large",
    "encoder_decoder_3b",
    "moe_10b",
    "vit_h14",
    "wide_resnet_1b",
    "unet_64",
    "dlrm_criteo",
    "recurrent_7b",
    "graph_network_weather",
)
CHANGES = {
    "llama_8b@h100x64": "optimizer.num_micro_batches=8",
    "llama_8b@tpu-v5e-x256": "optimizer.num_micro_batches=8",
    "llama_70b@h100x64": "optimizer.num_micro_batches=16",
    "llama_70b@tpu-v5e-x256": "optimizer.num_micro_batches=16",
    "gpt3_175b@h100x64": "optimizer.num_micro_batches=24",
    "gpt3_175b@tpu-v5e-x256": "data.batch_size=64",
    "wide_resnet_13b@tpu-v5e-x256": "optimizer.num_micro_batches=4",
    "moe_1t@h100x64": "model.overrides.param_dtype=bfloat16",
}
"""What is changed in a configuration that does not fit the cluster's memory as it is."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What one plan came to; None where there is no plan. Times of planning are wall-clock seconds."""

    strategy: str
    mesh: str
    fits: bool
    step_s: float | None = None
    compute_s: float | None = None
    comm_s: float | None = None
    peak_bytes: float | None = None
    bound_s: float | None = None
    gap: float | None = None
    seconds: float | None = None
    warnings: tuple[str, ...] = ()
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Record:
    """All rows of a case, the plan first; `batch` examples a step over all devices, in `micro_batches` parts."""

    case: str
    batch: int
    micro_batches: int
    rows: tuple[Row, ...]
    peak_rss_bytes: int
    load: float


def cases() -> list[str]:
    """Configuration and cluster of each case, as `name@cluster`; those that are compared come first."""
    small = ("tiny", "quickstart", "_1tb")  # the last is for `autoshard tables`: no devices alone hold it
    names = [f.stem for f in sorted((ROOT / "configs").glob("*.yaml")) if not f.stem.endswith(small)]
    names = [*COMPARED, *(n for n in names if n not in COMPARED)]
    return [f"{name}@{cluster}" for name in names for cluster in CLUSTERS]


def measure(case: str, with_strategies: bool, most_axes: int | None, time_limit_s: float) -> Record:
    """Plans a case in this process."""
    from autoshard import PlanOptions, baselines
    from autoshard.errors import AutoshardError
    from autoshard.plans.make import plan_program
    from autoshard.train.config import load_config
    from autoshard.train.planning import arguments
    from autoshard.train.registry import train_functions

    name, _, cluster = case.partition("@")
    changes = [CHANGES[case]] if case in CHANGES else []
    config = load_config(ROOT / "configs" / f"{name}.yaml", changes)
    functions = train_functions(config)
    state, batch = arguments(config, functions)
    options = PlanOptions(cache=False, max_mesh_axes=most_axes, mesh_limit_s=time_limit_s)
    file = ROOT / "configs" / "clusters" / f"{cluster}.yaml"
    began = time.perf_counter()
    subject = baselines.prepare_subject(functions.step, state, batch, cluster=file, donate_argnums=0)
    try:
        plan = plan_program(
            subject.traced,
            subject.program,
            subject.cluster,
            donate_argnums=subject.donated,
            options=options,
            started=began,
        )
        rows = [_row("plan", plan, True, time.perf_counter() - began)]
    except AutoshardError as error:
        rows = [_row("plan", None, False, time.perf_counter() - began, str(error))]
    if with_strategies and name in COMPARED:
        for strategy in baselines.suited(subject):
            began = time.perf_counter()
            outcome = baselines.try_baseline(strategy, subject, options=options)
            took_s = time.perf_counter() - began
            rows.append(_row(strategy.name, outcome.plan, outcome.fits, took_s, outcome.reason))
    rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    batch, micro_batches = config.data.batch_size, config.optimizer.num_micro_batches
    return Record(case, batch, micro_batches, tuple(rows), rss_bytes, round(os.getloadavg()[0], 1))


def _row(strategy, plan, fits, seconds, reason="") -> Row:
    if plan is None:
        return Row(strategy, "-", False, seconds=round(seconds, 2), reason=reason)
    e, c = plan.estimate, plan.certificate
    mesh = ",".join(f"{axis}={size}" for axis, size in plan.axes)
    bound, gap = (c.bound, c.gap) if math.isfinite(c.gap) else (None, None)
    figures = (e.step_s, e.compute_s, e.comm_s, e.peak_bytes, bound, gap)
    return Row(strategy, mesh, fits, *figures, round(seconds, 2), plan.warnings, reason)


def table(records: list[Record]) -> str:
    """The records as Markdown."""
    lines = [
        "| configuration | cluster | batch | mesh | step | gap | memory | planned in | host memory | best strategy "
        "| its step | ratio |",
        "| --- " * 12 + "|",
    ]
    for r in records:
        name, _, cluster = r.case.partition("@")
        own, batch = r.rows[0], f"{r.batch:,}" + (f" in {r.micro_batches}" if r.micro_batches > 1 else "")
        cells = [name, cluster, batch, own.mesh]
        if own.step_s is None:
            cells += ["none", "", "", f"{own.seconds:.1f} s", f"{r.peak_rss_bytes / 1e9:.2f} GB", "", "", ""]
            lines.append("| " + " | ".join(cells) + " |")
            continue
        cells += [_time(own.step_s), f"{own.gap:.2%}", f"{own.peak_bytes / 1e9:.3g} GB"]
        cells += [f"{own.seconds:.1f} s", f"{r.peak_rss_bytes / 1e9:.2f} GB"]
        best = best_strategy(r)
        cells += [best.strategy, _time(best.step_s), f"{best.step_s / own.step_s:.3f}"] if best else ["", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\n{r.case}: {r.rows[0].reason}" for r in records if r.rows[0].step_s is None]
    return "\n".join(lines)


def best_strategy(record: Record) -> Row | None:
    """The fastest strategy that keeps to the memory; None if none does or none was tried."""
    fitting = [row for row in record.rows[1:] if row.fits and row.step_s]
    return min(fitting, key=lambda row: row.step_s, default=None)


def summary(records: dict[str, Record]) -> str:
    """How much longer the best strategy takes than the plan, for each family and cluster, as Markdown."""
    lines = ["| configuration | " + " | ".join(CLUSTERS) + " |", "| --- " * (len(CLUSTERS) + 1) + "|"]
    ratios: dict[str, list[float]] = {cluster: [] for cluster in CLUSTERS}
    for name in COMPARED:
        cells = [name]
        for cluster in CLUSTERS:
            record = records.get(f"{name}@{cluster}")
            if record is None or record.rows[0].step_s is None:
                cells.append("no plan" if record else "")
                continue
            own, best = record.rows[0], best_strategy(record)
            if best is None:
                cells.append(f"no strategy fits; gap {own.gap:.2%}")
                continue
            ratios[cluster].append(best.step_s / own.step_s)
            cells.append(f"{ratios[cluster][-1]:.2f} x ({best.strategy}); gap {own.gap:.2%}")
        lines.append("| " + " | ".join(cells) + " |")
    means = [
        f"**{statistics.geometric_mean(ratios[c]):.2f} x** of {len(ratios[c])}" if ratios[c] else "" for c in CLUSTERS
    ]
    return "\n".join([*lines, "| **geometric mean** | " + " | ".join(means) + " |"])


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def read(path: pathlib.Path) -> dict[str, Record]:
    """The records of a results file, the newest of each case."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        data = json.loads(line)
        rows = tuple(Row(**{**row, "warnings": tuple(row["warnings"])}) for row in data["rows"])
        found[data["case"]] = Record(**{**data, "rows": rows})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="plan these cases only: parts of names such as llama_70b@h100x64")
    parser.add_argument("--no-strategies", action="store_true", help="the plan alone")
    parser.add_argument("--axes", type=int, help="search all meshes of up to this many axes; else as by default")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds a solve")
    parser.add_argument("--out", type=pathlib.Path, help="the results file")
    parser.add_argument("--table", action="store_true", help="print the table of the results file and stop")
    parser.add_argument("--again", action="store_true", help="plan also what is in the results file")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        with_strategies = not arguments.no_strategies
        record = measure(arguments.here, with_strategies, arguments.axes, arguments.time_limit)
        print(json.dumps(dataclasses.asdict(record)))
        return
    suffix = "" if arguments.axes is None else f"_{arguments.axes}_axes"
    out = arguments.out or RESULTS / f"zoo_plans{suffix}.jsonl"
    records = read(out)
    for case in () if arguments.table else cases():
        is_asked = not arguments.only or any(part in case for part in arguments.only)
        if not is_asked or case in records and not arguments.again:
            continue
        passed = ["--time-limit", str(arguments.time_limit)]
        passed += [] if arguments.axes is None else ["--axes", str(arguments.axes)]
        passed += ["--no-strategies"] * arguments.no_strategies
        done = subprocess.run([sys.executable, __file__, "--here", case, *passed], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{case}: failed", file=sys.stderr)
            continue
        with out.open("a") as file:
            file.write(done.stdout.splitlines()[-1] + "\n")
        records = read(out)
        own = records[case].rows[0]
        took = sum(row.seconds for row in records[case].rows)
        gap = "no plan" if own.gap is None else f"gap {own.gap:.2%}"
        print(f"{case}: {own.mesh} {gap} {own.reason[:100]} {took:.0f} s", file=sys.stderr)
    ordered = [records[case] for case in cases() if case in records]
    text = f"{summary(records)}\n\n{table(ordered)}"
    if not arguments.only:
        out.with_suffix(".md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()

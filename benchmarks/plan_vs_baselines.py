"""The plan against hand-written strategies: predicted on clusters, measured on eight CPU devices.

    python benchmarks/plan_vs_baselines.py predicted            # every case; --case NAME for one
    python benchmarks/plan_vs_baselines.py measured

Both write a table (`.md`) and its numbers (`.json`) into benchmarks/results/. Predicted: `autoshard.plan` searches all
meshes of up to two axes within the devices' memory; each baseline runs on its usual mesh (one axis; for a mix, the best
tensor axis inside a node), and one that does not fit is planned without a limit and marked. Measured: one process, all
programs compiled first, then one step of each in every round, in random order, so that whatever else the machine does
falls on all alike; medians over rounds of the step time as a multiple of the plan's in the same round.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import random
import statistics
import time

import jax

ROOT = pathlib.Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to plan on a cluster: a preset of `autoshard_models`, the global batch, a file of configs/clusters."""

    name: str
    preset: str
    batch_size: int
    cluster: str


CASES = (
    Case("gpt-1.3b-h100x8", "1.3b", 64, "h100x8"),
    Case("gpt-6.7b-a100-40x16", "6.7b", 64, "a100-40x16"),
    Case("gpt-13b-h100x64", "13b", 256, "h100x64"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a table; `step_s` and the like are None where there is no plan.

    `measured_s` is the median of the measured step times; `ratio` the median over rounds of the step time as a multiple
    of the plan's in the same round, and `ratio_quartiles` that of its quartiles.
    """

    name: str
    mesh: str
    status: str
    fits: bool
    step_s: float | None = None
    compute_s: float | None = None
    comm_s: float | None = None
    comm_bytes: float | None = None
    peak_bytes: float | None = None
    gap: float | None = None
    solve_s: float | None = None
    measured_s: float | None = None
    ratio: float | None = None
    ratio_quartiles: tuple[float, float] | None = None
    reason: str = ""


def row_of(name, plan, fits, reason="") -> Row:
    if plan is None:
        return Row(name, "-", "none", fits, reason=reason)
    e, c = plan.estimate, plan.certificate
    mesh = " x ".join(f"{a}={n}" for a, n in plan.axes)
    gap = c.gap if c.gap < float("inf") else None
    return Row(
        name,
        mesh,
        c.status.value,
        fits,
        e.step_s,
        e.compute_s,
        e.comm_s,
        e.comm_bytes,
        e.peak_bytes,
        gap,
        c.solve_s,
        reason=reason,
    )


def timed(row: Row, seconds: list[float], plan_seconds: list[float]) -> Row:
    """The row with its measured times and its ratios to the plan's times, round by round."""
    low, middle, high = statistics.quantiles(
        [ours / theirs for ours, theirs in zip(seconds, plan_seconds, strict=True)]
    )
    return dataclasses.replace(row, measured_s=statistics.median(seconds), ratio=middle, ratio_quartiles=(low, high))


def predicted(case: Case, time_limit_s: float, out: pathlib.Path) -> None:
    """Plans a case and all baselines, and writes the table."""
    from autoshard_models import presets, train_step

    from autoshard import PlanOptions, baselines
    from autoshard.errors import AutoshardError
    from autoshard.plans.make import plan_program

    config = presets.preset(case.preset)
    functions = train_step.build(config, train_step.adamw())
    state = jax.eval_shape(functions.init, 0)
    batch = train_step.batch_shapes(case.batch_size, config.context_length)
    cluster = ROOT / "configs" / "clusters" / f"{case.cluster}.yaml"
    options = PlanOptions(time_limit_s=time_limit_s, cache=False)
    subject = baselines.prepare_subject(functions.step, state, batch, cluster=cluster, donate_argnums=0)
    rows = []
    for strategy in baselines.suited(subject):
        outcome = baselines.try_baseline(strategy, subject, options=options)
        rows.append(row_of(strategy.name, outcome.plan, outcome.fits, outcome.reason))
        print(_line(rows[-1]), flush=True)
    try:
        plan = plan_program(
            subject.traced, subject.program, subject.cluster, None, subject.donated, None, None, options
        )
        rows.insert(0, row_of("plan", plan, True))
    except AutoshardError as error:
        rows.insert(0, row_of("plan", None, False, str(error)))
    print(_line(rows[0]), flush=True)
    memory = subject.cluster.slices()[0].device_type.memory_bytes
    title = (
        f"GPT {case.preset}, batch {case.batch_size} x {config.context_length} tokens, AdamW, recomputed blocks, on "
        f"`{case.cluster}` ({memory / 1e9:.0f} GB a device, 10 % reserved); at most {time_limit_s:g} s a solve"
    )
    write(out, f"predicted-{case.name}", title, rows)


def measured(layers: int, width: int, sequence: int, batch_size: int, rounds: int, out: pathlib.Path) -> None:
    """Runs the plan and all baselines of a small GPT on eight CPU devices, in turn, and writes the table."""
    jax.config.update("jax_num_cpu_devices", 8)
    from autoshard_models import presets, train_step

    import autoshard
    from autoshard import baselines

    config = presets.preset("tiny", num_layers=layers, embed_dim=width, num_heads=8, context_length=sequence)
    functions = train_step.build(config, train_step.adamw())
    state_shapes = jax.eval_shape(functions.init, 0)
    tokens = jax.random.randint(jax.random.key(7), (2, batch_size, sequence), 0, config.vocab_size)
    batch = {"inputs": tokens[0], "targets": tokens[1]}
    settings = {"cluster": ROOT / "configs" / "clusters" / "cpux8.yaml", "donate_argnums": 0}
    plans = {"plan": autoshard.plan(functions.step, state_shapes, batch, **settings)}
    for outcome in baselines.all_baselines(functions.step, state_shapes, batch, **settings):
        plans[outcome.strategy.name] = outcome.plan
    runs, states, losses = {}, {}, {}
    for name, plan in plans.items():
        started = time.perf_counter()
        runs[name] = plan.jit(functions.step)
        states[name] = plan.init(functions.init, 0)
        states[name], metrics = runs[name](states[name], batch)
        losses[name] = [float(metrics["loss"])]
        print(f"compiled {name} in {time.perf_counter() - started:.1f} s", flush=True)
    again = "plan, again"  # the same program once more: how far equal things differ here
    plans[again], runs[again], losses[again] = plans["plan"], runs["plan"], list(losses["plan"])
    states[again], _ = runs[again](plans[again].init(functions.init, 0), batch)
    seconds = {name: [] for name in plans}
    order, shuffle = list(plans), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            started = time.perf_counter()
            states[name], metrics = runs[name](states[name], batch)
            jax.block_until_ready((states[name], metrics))
            seconds[name].append(time.perf_counter() - started)
            losses[name].append(float(metrics["loss"]))
    worst = max(abs(ours - theirs) for own in losses.values() for ours, theirs in zip(own, losses["plan"], strict=True))
    rows = [timed(row_of(name, plan, True), seconds[name], seconds["plan"]) for name, plan in plans.items()]
    title = (
        f"GPT with {layers} layers, width {width}, batch {batch_size} x {sequence} tokens, float32, AdamW, on "
        f"eight CPU devices of one process ({os.cpu_count()} cores, jax {jax.__version__}); {rounds} rounds in turn, "
        f"losses of all programs within {worst:.1e} of the plan's"
    )
    write(out, "measured-cpux8", title, rows)
    for row in rows:
        print(_line(row))


def _line(row: Row) -> str:
    cells = [f"{row.name:16s}", f"{row.mesh:20s}", row.status]
    if row.step_s is not None:
        cells += [
            f"step {row.step_s * 1e3:.2f} ms",
            f"peak {row.peak_bytes / 1e9:.3f} GB",
            "" if row.fits else "does not fit",
        ]
        cells += [f"solved in {row.solve_s:.0f} s"]
    if row.measured_s is not None:
        cells += [f"measured {row.measured_s * 1e3:.2f} ms"]
    return "  ".join(cells) if row.step_s is not None else "  ".join([*cells, row.reason])


def table(rows: list[Row]) -> str:
    """The rows as Markdown; ratios are relative to the first row, the plan."""
    first = rows[0]
    is_measured = first.measured_s is not None
    head = [
        "strategy",
        "mesh",
        "step",
        "of the plan's",
        "compute",
        "communication",
        "sent",
        "peak memory",
        "fits",
        "proof",
    ]
    if is_measured:
        head[2:4] = ["measured step", "of the plan's", "quartiles", "predicted step", "of the plan's"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for r in rows:
        if r.step_s is None:
            lines.append(f"| {r.name} | - |" + " - |" * (len(head) - 4) + f" {'no' if not r.fits else ''} | no plan |")
            continue
        ratio = lambda ours, theirs: f"{ours / theirs:.3f}" if ours and theirs else "-"
        cells = [r.name, r.mesh]
        if is_measured:
            cells += [
                f"{r.measured_s * 1e3:.2f} ms",
                f"{r.ratio:.3f}",
                "{:.3f} to {:.3f}".format(*r.ratio_quartiles),
            ]
        cells += [
            f"{r.step_s * 1e3:.2f} ms",
            ratio(r.step_s, first.step_s),
            f"{r.compute_s * 1e3:.2f} ms",
            f"{r.comm_s * 1e3:.2f} ms",
            f"{r.comm_bytes / 1e9:.3g} GB",
            f"{r.peak_bytes / 1e9:.3g} GB",
            "yes" if r.fits else "no",
            f"{r.status}, " + (f"gap {r.gap:.2%}" if r.gap is not None else "no bound"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(out: pathlib.Path, name: str, title: str, rows: list[Row]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "title": title,
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "rows": [dataclasses.asdict(r) for r in rows],
    }
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / f"{name}.md").write_text(f"{title}.\n\n{table(rows)}\n")
    print(f"wrote {out / name}.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("predicted", help="plan GPTs on cluster files; no device is needed")
    one.add_argument("--case", choices=[c.name for c in CASES], help="only this case")
    one.add_argument("--time-limit", type=float, default=60.0, help="seconds for each solve (default 60)")
    two = commands.add_parser("measured", help="run a small GPT on eight CPU devices")
    two.add_argument("--layers", type=int, default=2)
    two.add_argument("--width", type=int, default=128)
    two.add_argument("--sequence", type=int, default=64)
    two.add_argument("--batch", type=int, default=32)
    two.add_argument("--rounds", type=int, default=100, help="timed steps of each program (default 100)")
    for command in (one, two):
        command.add_argument(
            "--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results", help="folder of the tables"
        )
    chosen = parser.parse_args()
    if chosen.command == "predicted":
        for case in CASES:
            if chosen.case in (None, case.name):
                predicted(case, chosen.time_limit, chosen.out)
    else:
        measured(chosen.layers, chosen.width, chosen.sequence, chosen.batch, chosen.rounds, chosen.out)


if __name__ == "__main__":
    main()

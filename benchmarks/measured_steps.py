"""The plan against hand-written strategies, measured on eight CPU devices.

    python benchmarks/measured_steps.py

Writes a table (`.md`) and its numbers (`.json`) into benchmarks/results/. One process, all programs compiled first,
then one step of each in every round, in random order, so that whatever else the machine does falls on all alike;
medians over rounds of the step time as a multiple of the plan's in the same round.
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
    head = [
        "strategy",
        "mesh",
        "measured step",
        "of the plan's",
        "quartiles",
        "predicted step",
        "of the plan's",
        "compute",
        "communication",
        "sent",
        "peak memory",
        "fits",
        "proof",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for r in rows:
        ratio = lambda ours, theirs: f"{ours / theirs:.3f}" if ours and theirs else "-"
        cells = [
            r.name,
            r.mesh,
            f"{r.measured_s * 1e3:.2f} ms",
            f"{r.ratio:.3f}",
            "{:.3f} to {:.3f}".format(*r.ratio_quartiles),
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
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=100, help="timed steps of each program (default 100)")
    parser.add_argument(
        "--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results", help="folder of the tables"
    )
    chosen = parser.parse_args()
    measured(chosen.layers, chosen.width, chosen.sequence, chosen.batch, chosen.rounds, chosen.out)


if __name__ == "__main__":
    main()

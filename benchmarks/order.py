"""Does the cost model rank plans as the clock does? Predicted against measured step times on eight CPU devices.

    autoshard calibrate --devices 8 --out cluster.yaml
    python benchmarks/order.py --cluster cluster.yaml
    python benchmarks/order.py --cluster cluster.yaml --resume    # goes on with the models that are not there yet

For each of several small models: many different plans (the plan, the best plan of each mesh, hand-written strategies on
several meshes, plans under pins drawn at random), all compiled, then steps of all of them in rounds of random order in
one process, so that whatever else the machine does falls on all alike. Judged by the rank correlation (Spearman)
between predicted and measured step times, and by how far the plan that is predicted to be fastest is from the one that
is. Figures go to results/order.jsonl, one line a plan, and their table to results/order.md.

Memory that a step frees is kept for the next, as the allocators of accelerators do: the C library would give arrays of
many megabytes back to the system, and getting them again page by page took up to two fifths of the processor time.
"""

import argparse
import ctypes
import dataclasses
import datetime
import json
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ADAMW = ("optimizer.name=adamw", "train.steps=1000")

MODELS: dict[str, tuple[str, ...]] = {
    "gpt": (
        "gpt_tiny",
        "model.overrides={num_layers: 2, embed_dim: 256, context_length: 64}",
        "data.batch_size=16",
    ),
    "encoder": (
        "encoder_tiny",
        "model.overrides={num_heads: 8, embed_dim: 256, context_length: 32}",
        "data.batch_size=32",
    ),
    "vit": (
        "vit_tiny",
        "model.overrides={num_heads: 8, embed_dim: 256, hidden_dim: 1024}",
        "data.batch_size=64",
    ),
    "moe": (
        "moe_tiny",
        "model.overrides={num_heads: 8, embed_dim: 128, hidden_dim: 512, context_length: 64}",
        "data.batch_size=16",
    ),
    "dlrm": (
        "dlrm_tiny",
        "model.overrides={table_rows: [65536, 8192, 1024, 64], num_numbers: 16, embed_dim: 64,"
        " bottom_dims: [512, 256], top_dims: [1024, 512, 256]}",
        "data.batch_size=4096",
    ),
    "recurrent": (
        "recurrent_tiny",
        "model.overrides={embed_dim: 256, state_dim: 256, hidden_dim: 768}",
        "data.batch_size=16",
    ),
    "unet": (
        "unet_tiny",
        "model.overrides={base_channels: 32, head_dim: 16}",
        "data.batch_size=32",
    ),
}
"""A file of configs/ and what is changed in it, so that a step takes tens to hundreds of milliseconds on two cores."""

MESHES = ({"data": 8}, {"data": 4, "tensor": 2}, {"data": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2})
NUM_RANDOM, NUM_PINNED = 8, 6
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
"""Parameters of `mallopt` (glibc, malloc.h)."""


class Subject(NamedTuple):
    """A model's training step and what it is called with."""

    functions: object
    state: object
    batch: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Timed:
    """A plan and its times.

    Attributes:
      predicted_s: By the cost model; compute_s and comm_s are its parts.
      measured_s: Median over rounds. quartiles_s: The other two quartiles.
      cpu_s: Median of the processor time of all threads, which other load on the machine hardly changes.
    """

    model: str
    plan: str
    mesh: str
    predicted_s: float
    compute_s: float
    comm_s: float
    measured_s: float
    quartiles_s: tuple[float, float]
    cpu_s: float


def subject_of(model: str) -> Subject:
    """Builds the model's step and draws one batch."""
    from autoshard.train.config import load_config
    from autoshard.train.registry import load_data, train_functions

    name, *overrides = MODELS[model]
    config = load_config(ROOT / "configs" / f"{name}.yaml", overrides)
    functions = train_functions(config)
    batch = load_data(config).batches[0]
    return Subject(functions, jax.eval_shape(functions.init, 0), dict(batch))


def random_pins(graph, axes: dict[str, int], rng: random.Random) -> dict[str, jax.sharding.PartitionSpec]:
    """Layouts for `NUM_PINNED` of the larger parameters: each mesh axis on a dimension that it divides, or on none."""
    shapes = {a.name: graph.values[a.value].shape for a in graph.arguments if a.name.startswith("state.params")}
    largest = sorted(shapes, key=lambda name: -np.prod(shapes[name]))[: 3 * NUM_PINNED]
    pins = {}
    for name in rng.sample(largest, min(NUM_PINNED, len(largest))):
        room = list(shapes[name])
        entries: list[tuple[str, ...]] = [()] * len(room)
        for axis, size in axes.items():
            dim = rng.choice([None, *(d for d, n in enumerate(room) if n % size == 0)])
            if dim is not None:
                room[dim] //= size
                entries[dim] = (*entries[dim], axis)
        pins[name] = jax.sharding.PartitionSpec(*(e or None for e in entries))
    return pins


def candidates(subject: Subject, cluster: str) -> Iterator[tuple[str, object]]:
    """Names and plans, no two with equal layouts."""
    import autoshard
    from autoshard import PlanOptions, baselines
    from autoshard.errors import AutoshardError

    options = PlanOptions(mesh_limit_s=20, max_mesh_axes=3)
    common = {"cluster": cluster, "donate_argnums": 0, "options": options}
    program = (subject.functions.step, subject.state, subject.batch)
    prepared = baselines.prepare_subject(*program, cluster=cluster, donate_argnums=0)
    tries = [("plan", lambda: autoshard.plan(*program, **common))]
    for mesh in MESHES:
        sizes = "x".join(map(str, mesh.values()))
        tries.append((f"best of {sizes}", lambda m=mesh: autoshard.plan(*program, mesh=m, **common)))
        for strategy in baselines.suited(prepared):
            if (strategy.data is None) != (len(mesh) == 1 and strategy.tensor is not None):
                continue
            if strategy.tensor is not None and strategy.data is not None and len(mesh) != 2:
                continue
            if strategy.data is not None and strategy.tensor is None and len(mesh) > 1:
                continue
            axes = {"tensor": 8} if strategy.data is None else mesh
            tries.append(
                (
                    f"{strategy.name} of {sizes}",
                    lambda s=strategy, a=axes: baselines.plan_baseline(s, prepared, mesh=a, options=options),
                )
            )
    rng = random.Random(0)
    for n in range(NUM_RANDOM):
        mesh = MESHES[n % len(MESHES)]
        pins = random_pins(prepared.traced.graph, mesh, rng)
        tries.append((f"random {n}", lambda m=mesh, p=pins: autoshard.plan(*program, mesh=m, pins=p, **common)))
    seen = set()
    for name, make in tries:
        try:
            plan = make()
        except AutoshardError as error:
            print(f"  {name}: no plan: {str(error)[:120]}", flush=True)
            continue
        layouts = plan.axes, plan.arguments, plan.outputs, plan.output_steps, plan.shardings
        if layouts not in seen:
            seen.add(layouts)
            yield name, plan


def measure(model: str, cluster: str, rounds: int, most: int, watch=lambda name, plan: None) -> list[Timed]:
    """Plans, compiles and times one model; `watch` is told of every plan."""
    subject = subject_of(model)
    plans, runs, states, seconds, cpu = {}, {}, {}, {}, {}
    for name, plan in candidates(subject, cluster):
        if len(plans) >= most:
            break
        watch(name, plan)
        started = time.perf_counter()
        run = plan.jit(subject.functions.step)
        state, _ = run(plan.init(subject.functions.init, 0), subject.batch)
        plans[name], runs[name], states[name], seconds[name], cpu[name] = plan, run, state, [], []
        print(f"  {name}: compiled in {time.perf_counter() - started:.1f} s", flush=True)
    order, shuffle = list(plans), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            started, worked = time.perf_counter(), time.process_time()
            states[name], metrics = runs[name](states[name], subject.batch)
            jax.block_until_ready((states[name], metrics))
            seconds[name].append(time.perf_counter() - started)
            cpu[name].append(time.process_time() - worked)
    rows = []
    for name, plan in plans.items():
        low, middle, high = statistics.quantiles(seconds[name])
        e, mesh = plan.estimate, ", ".join(f"{a}={n}" for a, n in plan.axes)
        rows.append(
            Timed(model, name, mesh, e.step_s, e.compute_s, e.comm_s, middle, (low, high), statistics.median(cpu[name]))
        )
    return rows


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How well one model's plans are ranked.

    Attributes:
      spearman: Rank correlation of predicted and measured times.
      chosen: The plan that is predicted to be fastest; chosen_ratio: its measured time as a multiple of the fastest's.
      worst_ratio: The slowest plan's measured time as a multiple of the fastest's.
      scale: Median of predicted over measured time.
    """

    model: str
    plans: int
    spearman: float
    chosen: str
    chosen_ratio: float
    worst_ratio: float
    scale: float


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation; equal values share the mean of their ranks (Spearman, 1904)."""

    def ranks(values):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        last = np.cumsum(counts)
        return (last - (counts - 1) / 2)[inverse]

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def verdict(rows: list[Timed]) -> Verdict:
    chosen = min(rows, key=lambda r: r.predicted_s)
    times = [r.measured_s for r in rows]
    return Verdict(
        rows[0].model,
        len(rows),
        spearman([r.predicted_s for r in rows], times),
        chosen.plan,
        chosen.measured_s / min(times),
        max(times) / min(times),
        statistics.median(r.predicted_s / r.measured_s for r in rows),
    )


def report(rows: list[Timed], title: str) -> str:
    """The verdicts and all plans as Markdown."""
    models = list(dict.fromkeys(r.model for r in rows))
    verdicts = [verdict([r for r in rows if r.model == m]) for m in models]
    lines = [title, ""]
    lines += ["| model | plans | Spearman | chosen plan | of the fastest | slowest | predicted / measured |"]
    lines += ["|" + " --- |" * 7]
    for v in verdicts:
        lines.append(
            f"| {v.model} | {v.plans} | {v.spearman:.3f} | {v.chosen} | {v.chosen_ratio:.3f} x | "
            f"{v.worst_ratio:.2f} x | {v.scale:.2f} |"
        )
    middle = statistics.median(v.spearman for v in verdicts)
    lines += ["", f"Median rank correlation {middle:.3f}.", ""]
    head = ("model", "plan", "mesh", "predicted", "compute", "communication", "measured", "quartiles", "processor time")
    lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    ms = lambda s: f"{s * 1e3:.1f} ms"
    for r in sorted(rows, key=lambda r: (models.index(r.model), r.measured_s)):
        low, high = map(ms, r.quartiles_s)
        figures = map(ms, (r.predicted_s, r.compute_s, r.comm_s, r.measured_s))
        cells = (r.model, r.plan, r.mesh, *figures, f"{low} to {high}", ms(r.cpu_s))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def keep_memory() -> None:
    """Tells glibc to keep what is freed; does nothing where the C library is another."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        print("This C library cannot be told to keep memory: page faults are part of the times.", flush=True)
        return
    for parameter, value in ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1)):
        mallopt(parameter, value)


def read(path: pathlib.Path) -> list[Timed]:
    """The rows of a file; none if there is no such file."""
    return [Timed(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", required=True, help="cluster file of `autoshard calibrate --devices 8`")
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, with commas between")
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each plan (default 30)")
    parser.add_argument("--most", type=int, default=24, help="most plans of a model (default 24)")
    parser.add_argument("--resume", action="store_true", help="keep what the results have of these models")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    chosen = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    keep_memory()
    chosen.out.mkdir(parents=True, exist_ok=True)
    lines, models = chosen.out / "order.jsonl", chosen.models.split(",")
    before = os.getloadavg()[0]
    rows = [r for r in read(lines) if r.model in models] if chosen.resume else []
    for model in models:
        if any(r.model == model for r in rows):
            continue
        print(model, flush=True)
        rows += measure(model, chosen.cluster, chosen.rounds, chosen.most)
        print(json.dumps(dataclasses.asdict(verdict([r for r in rows if r.model == model]))), flush=True)
        lines.write_text("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in rows))
        jax.clear_caches()
    machine = (
        f"eight CPU devices of one process on {os.cpu_count()} cores, jax {jax.__version__}, load {before:.1f} before"
    )
    command = f"python benchmarks/order.py {' '.join(sys.argv[1:])}"
    title = f"`{command}`, {datetime.date.today().isoformat()}: {machine}; {chosen.rounds} rounds."
    text = report(rows, title)
    (chosen.out / "order.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

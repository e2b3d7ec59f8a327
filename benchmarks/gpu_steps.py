"""Steps on the GPU at hand: what they take, kernel by kernel, beside what the cost model says of them.

    export XLA_FLAGS=--xla_gpu_enable_command_buffer=        # so that kernels are recorded with their instructions
    python benchmarks/gpu_steps.py measure --out runs/gpu    # needs a GPU
    python benchmarks/gpu_steps.py table runs/gpu            # needs none

A program of `by_hand/programs.py` has one device's share of its batch on 16 devices, so that its products are those of
a plan that splits the batch; those of `foreign/` are as they are. Each runs as written (`jax.jit`) and as planned for
one device (`Plan.jit`, which may also change what is recomputed), is timed, and recorded by JAX's profiler. What was
measured before is not measured again.
"""

import argparse
import collections
import dataclasses
import glob
import gzip
import json
import math
import os
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from by_hand import gpt
from by_hand.programs import PROGRAMS
from foreign.table import PROGRAMS as FOREIGN

import autoshard
from autoshard import PlanOptions
from autoshard.cluster import Cluster, DeviceType
from autoshard.execution.trial import Trial
from autoshard.hlo.kernel_cost import kernel_s
from autoshard.hlo.module import parse
from autoshard.train.planning import arguments
from autoshard.train.registry import train_functions

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHARES = 16
"""Of the batch of a program on 16 devices, one has this part."""
WARM, TIMED, RECORDED = 3, 20, 3
"""Steps before any is timed, steps that are timed, and steps that are recorded."""
MOST_S = 2.0
"""Fewer steps are timed where these take longer together."""
AS_WRITTEN, PLANNED = "as written", "planned"


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to schedule a plan's program: the step as replayed, as timed (0.0 where it was not tried), its memory."""

    name: str
    replayed_s: float
    step_s: float
    reserved_bytes: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """A step on the GPU.

    Attributes:
      program, way: Which, and `AS_WRITTEN` or `PLANNED`. device, jax: What it ran on. reason: Why it did not.
      step_s: Median of steps that each end before the next begins. flowing_s: Of steps one behind the other.
      compile_s: What compiling took, in all ways.
      form: What the plan recomputes. planned_step_s, planned_reserved_bytes: By the plan. ways: What was tried.
      reserved_bytes: What the compiled program needs.
      kernels: (instruction, kernels a step, seconds a step), the longest first.
      busy_s: What all kernels of a step take together.
    """

    program: str
    way: str
    device: str = ""
    jax: str = ""
    reason: str = ""
    step_s: float = 0.0
    flowing_s: float = 0.0
    compile_s: float = 0.0
    form: str = ""
    planned_step_s: float = 0.0
    planned_reserved_bytes: float = 0.0
    ways: tuple[Way, ...] = ()
    reserved_bytes: float = 0.0
    busy_s: float = 0.0
    kernels: tuple[tuple[str, float, float], ...] = ()

    @property
    def name(self) -> str:
        """Of its files."""
        return re.sub(r"\W+", "-", f"{self.program} {self.way}")


# ---- programs


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A step, its arguments by shape, and what makes them: random numbers, since zeros draw less power."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    make: Callable[[], tuple[Any, ...]]


def loaded(name: str, is_open: bool) -> Loaded:
    """A program; `is_open`: in a form that leaves open what it recomputes, where there is one."""
    if name in FOREIGN:
        subject = FOREIGN[name].make()
        args = (subject.state, subject.batch)
        return Loaded(subject.step, args, lambda: tuple(random_arrays(a, n) for n, a in enumerate(args)))
    program = PROGRAMS[name]
    batch = max(1, program.batch // SHARES)
    if program.config is None:
        args = gpt.train_arguments(gpt.Sizes(batch=batch))
        return Loaded(gpt.train_step(), args, lambda: tuple(random_arrays(a, n) for n, a in enumerate(args)))
    more = ("plan.remat=search",) if is_open else ()
    config = program.loaded(SHARES, f"data.batch_size={batch}", *more)
    functions = train_functions(config)
    args = arguments(config, functions)
    make_rest = lambda: (random_arrays(a, n) for n, a in enumerate(args[1:]))
    return Loaded(functions.step, args, lambda: (jax.jit(functions.init)(0), *make_rest()))


def random_arrays(shapes: Any, seed: int) -> Any:
    """Arrays of these shapes: small numbers, or ids below 1,000."""
    leaves, tree = jax.tree_util.tree_flatten(shapes)

    def make(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, len(leaves))
        return [_leaf(k, leaf) for k, leaf in zip(keys, leaves, strict=True)]

    return jax.tree_util.tree_unflatten(tree, jax.jit(make)(jax.random.key(seed)))


def _leaf(key: jax.Array, leaf: Any) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return key
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return (jnp.abs(jax.random.normal(key, leaf.shape)) * 0.02).astype(leaf.dtype)
    return jax.random.randint(key, leaf.shape, 0, 1000 if leaf.ndim else 1).astype(leaf.dtype)


# ---- measuring


def timed(run: Callable[..., Any], state: Any, rest: Sequence[Any]) -> tuple[float, float, Any]:
    """Seconds of a step that ends before the next begins, and of one in a row; and the state behind them."""
    seconds: list[float] = []
    for _ in range(WARM + TIMED):
        started = time.perf_counter()
        state, aux = run(state, *rest)
        jax.block_until_ready((state, aux))
        seconds.append(time.perf_counter() - started)
        if math.fsum(seconds[WARM:]) > MOST_S:
            break
    steps = len(seconds) - WARM
    started = time.perf_counter()
    for _ in range(steps):
        state, aux = run(state, *rest)
    jax.block_until_ready((state, aux))
    return statistics.median(seconds[WARM:]), (time.perf_counter() - started) / steps, state


def recorded(run: Callable[..., Any], state: Any, rest: Sequence[Any]) -> tuple[tuple[str, float, float], ...]:
    """What kernels take: (instruction, kernels a step, seconds a step)."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(RECORDED):
                state, _ = run(state, *rest)
            jax.block_until_ready(state)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        found = list(_events(jax.profiler.ProfileData.from_file(path)))
    runs, total_s = collections.Counter(), collections.Counter()
    for name, seconds in found:
        runs[name] += 1
        total_s[name] += seconds
    return tuple((name, runs[name] / RECORDED, s / RECORDED) for name, s in total_s.most_common())


def _events(profile: Any) -> Iterator[tuple[str, float]]:
    """Every event on a stream of the GPU: the instruction that it belongs to, else its own name, and its seconds."""
    for plane in profile.planes:
        if "/device:GPU" not in plane.name:
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    instruction = dict(event.stats).get("hlo_op")
                    yield str(instruction or f"? {event.name}"), event.duration_ns * 1e-9


def measure(name: str, way: str, cluster: Cluster, out: pathlib.Path) -> Measured:
    """Runs a program in one way; its compiled text goes beside the row."""
    row = Measured(name, way, jax.devices()[0].device_kind, jax.__version__)
    program = loaded(name, is_open=way == PLANNED)
    state, *rest = program.make()
    jax.block_until_ready((state, rest))
    if way == AS_WRITTEN:
        started = time.perf_counter()
        compiled = jax.jit(program.step, donate_argnums=0).lower(state, *rest).compile()
        row = dataclasses.replace(row, compile_s=time.perf_counter() - started)
    else:
        plan = planned(program, cluster)
        started = time.perf_counter()
        trial, state = tried(plan.jit(program.step), state, rest)
        row = dataclasses.replace(row, compile_s=time.perf_counter() - started, **_of_plan(plan, trial))
        assert trial.chosen is not None
        compiled = trial.chosen.compiled
    with gzip.open(out / f"{row.name}.hlo.txt.gz", "wt") as file:
        file.write(compiled.as_text() or "")
    step_s, flowing_s, state = timed(compiled, state, rest)
    kernels = recorded(compiled, state, rest)
    return dataclasses.replace(
        row,
        step_s=step_s,
        flowing_s=flowing_s,
        reserved_bytes=reserved_bytes(compiled),
        busy_s=math.fsum(s for _, _, s in kernels),
        kernels=kernels,
    )


def reserved_bytes(compiled: Any) -> float:
    """What a compiled program needs, by XLA."""
    memory = compiled.memory_analysis()
    needed_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return needed_bytes - memory.alias_size_in_bytes


def planned(program: Loaded, cluster: Cluster) -> Any:
    """The plan of a program, which recomputes what it chooses where the program leaves that open."""
    search = PlanOptions(remat="search") if isinstance(program.step, autoshard.TrainStep) else PlanOptions()
    return autoshard.plan(program.step, *program.args, cluster=cluster, donate_argnums=0, options=search)


def tried(run: Any, state: Any, rest: Sequence[Any]) -> tuple[Trial, Any]:
    """Steps until the fastest way to schedule the program is found."""
    while True:
        state, _ = run(state, *rest)
        (trial,) = run.trials
        if trial.chosen is not None:
            return trial, state


def _of_plan(plan: Any, trial: Trial) -> dict[str, Any]:
    """The fields of a row that a plan and its trial tell."""
    timed_s = {t.candidate.figures.candidate: t.step_s for t in trial.timed}
    ways = [c.figures for c in trial.candidates]
    return {
        "form": "" if plan.choice is None else str(plan.choice.variant),
        "planned_step_s": plan.estimate.step_s,
        "planned_reserved_bytes": plan.estimate.reserved_bytes or plan.estimate.peak_bytes,
        "ways": tuple(Way(f.candidate.value, f.step_s, timed_s.get(f.candidate, 0.0), f.reserved_bytes) for f in ways),
    }


def measure_all(cases: Sequence[tuple[str, str]], cluster: Cluster, out: pathlib.Path, limit_s: float) -> None:
    """Measures each program and way that is not there yet, as long as there is time to begin another."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for name, way in cases:
        path = out / f"{Measured(name, way).name}.json"
        if path.exists() or time.perf_counter() - began > limit_s:
            continue
        started = time.perf_counter()
        try:
            row = measure(name, way, cluster, out)
        except Exception as error:  # what fails is told; the others are measured
            row = Measured(name, way, reason=f"{type(error).__name__}: {error}"[:1000])
        jax.clear_caches()
        path.write_text(json.dumps(dataclasses.asdict(row)) + "\n")
        took = f"in {time.perf_counter() - started:.0f} s, of which {row.compile_s:.0f} to compile"
        planned = f", planned {row.planned_step_s * 1e3:.2f} ms" if row.planned_step_s else ""
        figures = f"{row.step_s * 1e3:.2f} ms, {row.flowing_s * 1e3:.2f} in a row, kernels {row.busy_s * 1e3:.2f}"
        print(f"{row.name}: {row.reason or figures + planned}, {took}", flush=True)


# ---- table


def read(folder: pathlib.Path) -> list[Measured]:
    """The rows that were measured."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        own = json.loads(path.read_text())
        known = {f.name for f in dataclasses.fields(Measured)}
        own["ways"] = tuple(Way(**way) for way in own.get("ways", ()))
        rows.append(Measured(**{key: value for key, value in own.items() if key in known}))
    return rows


def priced_s(row: Measured, device: DeviceType, folder: pathlib.Path) -> float:
    """What the kernels that were recorded of a program take by the cost model's formulas for compiled ones."""
    with gzip.open(folder / f"{row.name}.hlo.txt.gz", "rt") as file:
        module = parse(file.read())
    ran = {name for name, _, _ in row.kernels}
    return math.fsum(
        run.times * kernel_s(device, module, run.computation, run.instruction)
        for run in module.runs()
        if run.instruction.name in ran
    )


def table(rows: Sequence[Measured], cluster: Cluster, folder: pathlib.Path) -> str:
    """The rows as Markdown; what plans predict is predicted anew, by the cost model of today."""
    device = cluster.slices()[0].device_type
    predicted: dict[tuple[str, bool], float] = {}
    ms = lambda time_s: f"{time_s * 1e3:.2f}" if time_s else "-"
    head = (
        "program",
        "way",
        "step, ms",
        "in a row",
        "kernels",
        "priced as compiled",
        "of measured",
        "planned",
        "of them",
    )
    lines = [line(*head, "reserved, GB", "planned, GB"), "|" + " --- |" * (len(head) + 2)]
    for row in rows:
        if row.reason:
            lines.append(line(row.program, row.way, row.reason[:80], *["-"] * 8))
            continue
        own_s = priced_s(row, device, folder)
        key = row.program, row.way == PLANNED
        if key not in predicted:
            predicted[key] = planned(loaded(*key), cluster).estimate.step_s
        lines.append(
            line(
                row.program,
                f"{row.way}{f' ({row.form})' if row.form else ''}",
                ms(row.step_s),
                ms(row.flowing_s),
                ms(row.busy_s),
                ms(own_s),
                f"{own_s / row.busy_s:.2f}",
                ms(predicted[key]),
                f"{predicted[key] / row.busy_s:.2f}",
                f"{row.reserved_bytes / 1e9:.2f}",
                f"{row.planned_reserved_bytes / 1e9:.2f}" if row.planned_reserved_bytes else "-",
            )
        )
    tried = [(row, way) for row in rows for way in row.ways]
    if tried:
        lines += ["", line("program", "scheduled for", "replayed, ms", "timed, ms", "GB"), "|" + " --- |" * 5]
        lines += [
            line(row.program, way.name, ms(way.replayed_s), ms(way.step_s), f"{way.reserved_bytes / 1e9:.2f}")
            for row, way in tried
        ]
    return "\n".join(lines) + "\n"


def line(*entries: Any) -> str:
    """A row of a table in Markdown."""
    return "| " + " | ".join(map(str, entries)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=pathlib.Path, default=ROOT / "configs" / "clusters" / "h100x1.yaml")
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="run programs on the GPU")
    measuring.add_argument("--out", type=pathlib.Path, required=True)
    measuring.add_argument(
        "--cases", default=",".join(f"{name}:{way}" for name in PROGRAMS for way in (AS_WRITTEN, PLANNED))
    )
    measuring.add_argument("--limit", type=float, default=math.inf, help="seconds after which no other program begins")
    commands.add_parser("table", help="print what was measured").add_argument("folder", type=pathlib.Path)
    own = parser.parse_args()
    cluster = Cluster.from_file(own.cluster)
    if own.command == "table":
        print(table(read(own.folder), cluster, own.folder))
        return
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.93")
    cases = [(name, way) for name, _, way in (case.partition(":") for case in own.cases.split(","))]
    measure_all(cases, cluster, own.out, own.limit)


if __name__ == "__main__":
    main()

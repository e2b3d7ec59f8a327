"""What a step recomputes and in how many micro-batches, on the GPU at hand: the plan's choice against those by hand.

    python benchmarks/gpu_forms.py plan --out runs/forms     # plans every program for one H100; needs no GPU
    python benchmarks/gpu_forms.py measure runs/forms        # needs the GPU
    python benchmarks/gpu_forms.py table runs/forms          # needs none

Programs have so many examples that their step does not fit the GPU's memory as it is. By hand there are three ways out,
of which each can be tried in minutes: recompute nothing, or all but products with weights, or whole layers
(`jax.checkpoint` with `dots_with_no_batch_dims_saveable`, or without a policy), in the fewest micro-batches that fit:
powers of two, gradients added up in a loop. All are compiled by `jax.jit` with XLA's defaults. Both sides
are timed as they would run; steps wait for each other. In micro-batches both may be another step, where a loss is no
mean over examples (a mixture of experts balances them).
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
from gpu_steps import line, random_arrays, reserved_bytes, timed, tried

import autoshard
from autoshard import PlanOptions, TrainStep
from autoshard.api.program import Plan
from autoshard.cluster import Cluster
from autoshard.errors import MemoryBudgetError
from autoshard.remat.rewrite import layers_of
from autoshard.strategies.hand_written import POLICIES
from autoshard.train.config import load_config
from autoshard.train.planning import arguments
from autoshard.train.registry import train_functions

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
MICRO_BATCHES = (1, 2, 4, 8, 16)
AS_WRITTEN = PlanOptions(remat="as_written", micro_batches="as_written", cache=False)
PLANNED = "plan"


@dataclasses.dataclass(frozen=True)
class Program:
    """A model of the zoo at a size for one GPU: its configuration, what replaces entries of it, and its examples."""

    config: str
    batch: int
    overrides: tuple[str, ...]

    def loaded(self) -> tuple[TrainStep, tuple[Any, ...], Any]:
        """The step, its arguments by shape, and what makes its state from a seed."""
        more = (f"data.batch_size={self.batch}", "optimizer.num_micro_batches=1", "plan.remat=search")
        settings = load_config(CONFIGS / f"{self.config}.yaml", [*self.overrides, *more])
        functions = train_functions(settings)
        return functions.step, arguments(settings, functions), functions.init


PROGRAMS = {
    "gpt": Program("gpt_1.3b", 32, ("model.overrides.num_layers=12",)),
    "llama": Program("llama_8b", 4, ("model.overrides.num_layers=10",)),
    "vit": Program("vit_h14", 512, ("model.overrides.num_layers=16",)),
    "encoder_decoder": Program("encoder_decoder_3b", 128, ("model.overrides.num_layers=4",)),
    "moe": Program("moe_10b", 128, ("model.overrides.num_layers=2", "model.overrides.num_experts=32")),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A step in one form.

    Attributes:
      program: Which. way: `PLANNED`, or a policy by hand. form: What it recomputes, and its micro-batches.
      num_micro_batches: How many there are.
      planned_step_s, planned_bytes: What is predicted, before anything is compiled.
      gap: To which the plan is proven to be the best; 0.0 by hand.
      device, jax: What it ran on. step_s, reserved_bytes: As timed, and by XLA; 0.0 where it did not run.
      compile_s: What compiling took, in all ways, with the steps by which a plan's are tried.
      reason: Why it did not run.
    """

    program: str
    way: str
    form: str
    num_micro_batches: int
    planned_step_s: float
    planned_bytes: float
    gap: float = 0.0
    device: str = ""
    jax: str = ""
    step_s: float = 0.0
    reserved_bytes: float = 0.0
    compile_s: float = 0.0
    reason: str = ""

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.program}-{self.way.replace(' ', '-')}"


# ---- planning


def planned(name: str, cluster: Cluster, out: pathlib.Path) -> Row:
    """The plan, whose file goes into `out`."""
    step, args, _ = PROGRAMS[name].loaded()
    # by hand, too, the mean over micro-batches will do
    options = PlanOptions(remat="search", micro_batches="search", cache=False)
    plan = autoshard.plan(step, *args, cluster=cluster, donate_argnums=0, options=options)
    assert plan.choice is not None
    variant = plan.choice.variant
    row = _row(name, PLANNED, str(variant), variant.num_micro_batches or 1, plan)
    plan.save(plan_file(row, out))
    return dataclasses.replace(row, gap=plan.certificate.gap)


def plan_file(row: Row, out: pathlib.Path) -> pathlib.Path:
    """Of a program's plan."""
    return out / f"{row.name}.plan"


def by_hand(name: str, cluster: Cluster) -> Iterator[Row]:
    """Every policy in the fewest micro-batches that are predicted to fit."""
    program = PROGRAMS[name]
    step, args, _ = program.loaded()
    for policy in map(str, POLICIES):
        for count in (c for c in MICRO_BATCHES if program.batch % c == 0):
            own = in_form(step, args, policy, program.batch, count)
            try:
                plan = autoshard.plan(own, *args, cluster=cluster, donate_argnums=0, options=AS_WRITTEN)
            except MemoryBudgetError:
                continue
            yield _row(name, policy, f"{policy}, in {count} micro-batches" if count > 1 else policy, count, plan)
            break


def in_form(step: TrainStep, args: tuple[Any, ...], policy: str, batch: int, count: int) -> TrainStep:
    """The step with a policy in all layers, in micro-batches."""
    (own,) = [p.of(step, layers_of(step, *args)) for p in POLICIES if str(p) == policy]
    return own.in_parts((batch // count,) * count) if count > 1 else own


def _row(name: str, way: str, form: str, count: int, plan: Plan) -> Row:
    needed_bytes = plan.estimate.reserved_bytes or plan.estimate.peak_bytes
    return Row(name, way, form, count, plan.estimate.step_s, needed_bytes)


# ---- measuring


def measured(row: Row, out: pathlib.Path) -> Row:
    """The row with what its step takes on the GPU."""
    program = PROGRAMS[row.program]
    step, args, init = program.loaded()
    rest = [random_arrays(a, n) for n, a in enumerate(args[1:])]
    state = jax.jit(init)(0)
    started = time.perf_counter()
    if row.way == PLANNED:
        trial, state = tried(Plan.load(plan_file(row, out)).jit(step), state, rest)
        compiled = trial.chosen.compiled
    else:
        own = in_form(step, args, row.way, program.batch, row.num_micro_batches)
        compiled = jax.jit(own, donate_argnums=0).lower(state, *rest).compile()
    compile_s = time.perf_counter() - started
    step_s, _, _ = timed(compiled, state, rest)
    return dataclasses.replace(
        row,
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
        step_s=step_s,
        reserved_bytes=reserved_bytes(compiled),
        compile_s=compile_s,
    )


def measure(folder: pathlib.Path, limit_s: float) -> None:
    """Times every row that was not timed yet, as long as there is time to begin another."""
    began = time.perf_counter()
    for row in read(folder):
        if row.step_s or time.perf_counter() - began > limit_s:
            continue
        try:
            row = measured(row, folder)
        except Exception as error:  # what fails is told; the others are measured
            row = dataclasses.replace(row, reason=f"{type(error).__name__}: {error}"[:1000])
        jax.clear_caches()
        write(row, folder)
        took = f"{row.step_s * 1e3:.1f} ms, predicted {row.planned_step_s * 1e3:.1f}"
        memory = f"{row.reserved_bytes / 1e9:.1f} GB, predicted {row.planned_bytes / 1e9:.1f}"
        told = row.reason or f"{took}; {memory}; {row.compile_s:.0f} s to compile"
        print(f"{row.program}, {row.way} ({row.form}): {told}", flush=True)


# ---- table


def read(folder: pathlib.Path) -> list[Row]:
    """The rows that are there, by program, as they were made."""
    rows = [Row(**json.loads(path.read_text())) for path in folder.glob("*.json")]
    ways = (PLANNED, *map(str, POLICIES))
    return sorted(rows, key=lambda row: (list(PROGRAMS).index(row.program), ways.index(row.way)))


def write(row: Row, folder: pathlib.Path) -> None:
    """Into a file of its own."""
    (folder / f"{row.name}.json").write_text(json.dumps(dataclasses.asdict(row), indent=1) + "\n")


def table(rows: list[Row]) -> str:
    """The rows as Markdown, and what plans gain over the best by hand."""
    ran = [row for row in rows if row.step_s]
    best = {p: min((r.step_s for r in ran if r.program == p and r.way != PLANNED), default=math.nan) for p in PROGRAMS}
    gains = [best[row.program] / row.step_s for row in ran if row.way == PLANNED and best[row.program] > 0]
    head = ("program", "way", "form", "step, ms", "predicted", "of measured", "reserved, GB", "predicted, GB")
    lines = [line(*head), "|" + " --- |" * len(head)]
    for row in rows:
        memory = f"{row.reserved_bytes / 1e9:.1f}" if row.step_s else row.reason[:80] or "not run"
        shown = ("-", f"{row.planned_step_s * 1e3:.1f}", "-")
        if row.step_s:
            of_measured = f"{row.planned_step_s / row.step_s:.2f}"
            shown = (f"{row.step_s * 1e3:.1f}", f"{row.planned_step_s * 1e3:.1f}", of_measured)
        lines.append(line(row.program, row.way, row.form, *shown, memory, f"{row.planned_bytes / 1e9:.1f}"))
    if gains:
        mean = statistics.geometric_mean(gains)
        lines += ["", f"Over the best by hand: geometric mean {mean:.3f} of {len(gains)}, least {min(gains):.3f}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan", help="plan the programs")
    planning.add_argument("--out", type=pathlib.Path, required=True)
    planning.add_argument("--program", default=",".join(PROGRAMS), help="only these, with commas between them")
    planning.add_argument("--cluster", type=pathlib.Path, default=CONFIGS / "clusters" / "h100x1.yaml")
    measuring = commands.add_parser("measure", help="time them on the GPU")
    measuring.add_argument("folder", type=pathlib.Path)
    measuring.add_argument("--limit", type=float, default=math.inf, help="seconds after which no other one begins")
    commands.add_parser("table", help="print what was measured").add_argument("folder", type=pathlib.Path)
    own = parser.parse_args()
    if own.command == "plan":
        cluster = Cluster.from_file(own.cluster)
        own.out.mkdir(parents=True, exist_ok=True)
        for name in own.program.split(","):
            for row in (planned(name, cluster, own.out), *by_hand(name, cluster)):
                write(row, own.out)
                print(f"{row.name}: {row.form}, {row.planned_step_s * 1e3:.1f} ms, {row.planned_bytes / 1e9:.1f} GB")
    elif own.command == "measure":
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.93")
        measure(own.folder, own.limit)
    else:
        print(table(read(own.folder)))


if __name__ == "__main__":
    main()

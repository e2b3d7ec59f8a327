"""The plan against strategies written by hand, as XLA:GPU schedules them: how much communication stays exposed?

    python benchmarks/exposed.py                           # goes on where it stopped
    python benchmarks/exposed.py --program gpt --devices 16 --only "fsdp;plan" --budget 72,8
    python benchmarks/exposed.py --by-hand                 # only the hand-written strategies, which do not change
    python benchmarks/exposed.py --table                   # only writes the table of what is there
    python benchmarks/exposed.py --measured                # kernels at what an H100 took, into exposed-measured.*

Needs the extra `verify-gpu`, no GPU. Every program is compiled for H100s ahead of time, and its schedule replayed on
two streams (`autoshard/hlo/compiled_schedule.py`). One JSON line a program goes to benchmarks/results/exposed.jsonl as
soon as it is known, the tables to exposed.md.
"""

import argparse
import collections
import dataclasses
import datetime
import json
import os
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from by_hand import gpt, strategies
from by_hand.options import COST_PROFILE, DEFAULTS, OPTIONS
from by_hand.programs import PROGRAMS
from by_hand.strategies import Strategy
from scipy.stats import spearmanr

import autoshard
from autoshard import PlanOptions, TrainStep
from autoshard.cluster import Cluster, LogicalMesh
from autoshard.compiler.schedule import Schedule
from autoshard.errors import AutoshardError
from autoshard.execution.candidates import compile_candidates
from autoshard.execution.compiled_memory import CompiledMemory
from autoshard.execution.jit import device_mesh
from autoshard.hlo.compiled_schedule import replay
from autoshard.hlo.cost_profile import cost_profile, instruction_costs
from autoshard.hlo.module import HloModule, parse
from autoshard.plans.apply import planned_function
from autoshard.plans.make import homogeneous_slice
from autoshard.train.planning import arguments
from autoshard.train.registry import train_functions
from autoshard.verify.devices import gpu_devices
from autoshard.verify.gpus import COMPILER_OPTIONS, H100
from autoshard.verify.kept_kernels import kernels_kept

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CONFIGS = ROOT / "configs"
PER_NODE = 8
RATES = {
    "matmul_efficiency": 0.5,
    "convolution_efficiency": None,
    "kernel_forms": None,
    "memory_bandwidth_bytes_per_s": 0.8 * 3.35e12,
    "memory_efficiency": 1.0,
    "launch_overhead_s": 3e-6,
}
"""What kernels of an H100 SXM were taken to reach before one was measured, for the planner as in the replay: half of
the dense peak, 0.8 of its memory's bandwidth (NVIDIA's data sheet), 3 us a launch. With `--measured` the catalogue's
figures serve, by which kernels are shorter, so that less hides behind them.
"""
DEVICES = (8, 16, 64)

_HIDING = PlanOptions(mesh_limit_s=60, schedule=Schedule.LATENCY_HIDING, remat="search")
PLANS = {
    "plan": _HIDING,
    "plan, as written": dataclasses.replace(_HIDING, remat="as_written", micro_batches="as_written"),
    "plan, fastest of 3 meshes": dataclasses.replace(_HIDING, compile_check=True, compile_check_meshes=3),
}
"""The first may change what the step recomputes, as strategies may (`FSDP_REGATHERED`), and its micro-batches where it
is the same step in them; the second may not. Only where `--only` names them: the second; and the last one, which is
compiled for every mesh, which takes minutes."""
BY_NAME = ("plan, as written", "plan, fastest of 3 meshes")


Key = tuple[str, int, str, str, float]
"""Program, number of devices, strategy, options, budget."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One compiled program.

    Attributes:
      strategy: Hand-written, or a plan. options: Of the compiler; the way in which a plan's program is scheduled.
      form: What a plan recomputes, and in how many micro-batches it runs; empty by hand and for the step as written.
      budget_gb: What was planned for; 0.0 by hand. is_run: Whether `Plan.jit` takes it, of a plan's programs.
      reason: Why there is no program. mesh: Its axes.
      step_s, kernel_s, collective_s, exposed_s: Of its schedule, replayed. peak_bytes, total_bytes: The most alive at
        once, and all that must be there for it to run, by XLA.
      predicted_...: By the plan; 0.0 by hand, or where it does not tell. gap: How near the optimum it is proven to be.
      seconds: What compiling took, for a plan in all ways and with planning.
    """

    program: str
    num_devices: int
    strategy: str
    options: str
    budget_gb: float = 0.0
    is_run: bool = False
    reason: str = ""
    mesh: str = ""
    form: str = ""
    step_s: float = 0.0
    kernel_s: float = 0.0
    collective_s: float = 0.0
    exposed_s: float = 0.0
    peak_bytes: float = 0.0
    total_bytes: float = 0.0
    predicted_step_s: float = 0.0
    predicted_exposed_s: float = 0.0
    predicted_peak_bytes: float = 0.0
    predicted_reserved_bytes: float = 0.0
    gap: float = 0.0
    seconds: float = 0.0

    @property
    def key(self) -> Key:
        return self.program, self.num_devices, self.strategy, self.options, self.budget_gb

    @property
    def is_plan(self) -> bool:
        return self.budget_gb > 0


def read(path: pathlib.Path) -> dict[Key, Cell]:
    """The cells that are known already."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {cell.key: cell for cell in (Cell(**json.loads(line)) for line in lines)}


def laid_out(cluster: Cluster, axes: Sequence[tuple[str, int]]) -> LogicalMesh:
    """A mesh of H100s with these axes."""
    return homogeneous_slice(cluster).logical_mesh(dict(axes))


def cluster_of(num_devices: int, is_measured: bool = False) -> Cluster:
    """H100s that reach `RATES`, or what kernels of one were measured to reach."""
    cluster = Cluster.from_file(CONFIGS / "clusters" / f"h100x{num_devices}.yaml")
    if is_measured:
        return cluster
    groups = [dataclasses.replace(g, device_type=dataclasses.replace(g.device_type, **RATES)) for g in cluster.groups]
    return dataclasses.replace(cluster, groups=tuple(groups))


def measured(
    cell: Cell, compiled: Any, module: HloModule, mesh: LogicalMesh, keep: pathlib.Path | None, seconds: float
) -> Cell:
    """The cell with what was compiled for it."""
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        file_name = re.sub(r"\W+", "-", " ".join(map(str, cell.key)))
        (keep / f"{file_name}.hlo.txt").write_text(compiled.as_text() or "")
    memory, done = CompiledMemory.of(compiled, "cuda"), replay(module, mesh)
    return dataclasses.replace(
        cell,
        step_s=done.step_s,
        kernel_s=done.kernel_s,
        collective_s=done.collective_s,
        exposed_s=done.exposed_s,
        peak_bytes=memory.peak_bytes,
        total_bytes=memory.total_bytes,
        seconds=seconds,
    )


@dataclasses.dataclass
class Compiling:
    """Compiles one lowered program under several options; the cost profile is made of the first compile."""

    cell: Cell
    lowered: jax.stages.Lowered
    mesh: LogicalMesh
    keep: pathlib.Path | None
    started: float
    module: HloModule | None = None

    def under(self, name: str, options: Mapping[str, Any]) -> Cell:
        """The cell of the program under these options."""
        cell = dataclasses.replace(self.cell, options=name)
        try:
            if name == COST_PROFILE:
                # XLA keeps what it read of a path, so that every profile needs a path of its own.
                with tempfile.NamedTemporaryFile("w", suffix=".pbtxt") as file:
                    module = self.module or self._compiled({})[1]
                    file.write(cost_profile(instruction_costs(module, self.mesh)))
                    file.flush()
                    compiled, module = self._compiled(
                        {**options, "xla_gpu_pgle_profile_file_or_directory_path": file.name}
                    )
            else:
                compiled, module = self._compiled(options)
        except jax.errors.JaxRuntimeError as error:
            return dataclasses.replace(cell, reason=" ".join(str(error).split())[:300], seconds=self._passed_s())
        self.module = self.module or module
        return measured(cell, compiled, module, self.mesh, self.keep, self._passed_s())

    def _compiled(self, options: Mapping[str, Any]) -> tuple[Any, HloModule]:
        compiled = self.lowered.compile(compiler_options={**COMPILER_OPTIONS, **options})
        return compiled, parse(compiled.as_text() or "")

    def _passed_s(self) -> float:
        started, self.started = self.started, time.perf_counter()
        return round(self.started - started, 1)


def by_hand(
    name: str, cluster: Cluster, strategy: Strategy, wanted: Sequence[str], keep: pathlib.Path | None
) -> Iterator[Cell]:
    """A strategy under each of the `wanted` options."""
    num_devices = cluster.num_devices
    started, program = time.perf_counter(), PROGRAMS[name]
    devices, axes = gpu_devices(H100, num_devices, PER_NODE), strategy.axes(num_devices)
    cell = Cell(name, num_devices, strategy.name, DEFAULTS, mesh=_mesh_text(axes))
    try:
        if program.config is None:
            lowered = strategies.lowered_gpt(strategy, program.sizes(num_devices), devices)
        else:
            without = ("model.overrides.remat=false",) if strategy.keeps_all else ()
            lowered = strategies.lowered_zoo(strategy, program.loaded(num_devices, *without), devices)
    except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        yield from (dataclasses.replace(cell, options=options, reason=reason) for options in wanted)
        return
    compiling = Compiling(cell, lowered, laid_out(cluster, axes), keep, started)
    with kernels_kept("cuda") as kept:
        for options in OPTIONS:
            if options in wanted:
                yield compiling.under(options, {**OPTIONS[options], **kept})


@dataclasses.dataclass
class Planning:
    """A program on a number of devices, and its plans."""

    name: str
    cluster: Cluster
    step: TrainStep | None = None
    args: tuple[Any, ...] = ()

    def planned(self, strategy: str, budget_gb: float, keep: pathlib.Path | None) -> Iterator[Cell]:
        """The plan for a budget, compiled in each way that `Plan.jit` tries."""
        started = time.perf_counter()
        cell = Cell(self.name, self.cluster.num_devices, strategy, "", budget_gb)
        step, args = self._loaded()
        try:
            plan = autoshard.plan(
                step,
                *args,
                cluster=self.cluster,
                donate_argnums=0,
                memory_budget_bytes=budget_gb * 1e9,
                options=PLANS[strategy],
            )
            devices = gpu_devices(H100, plan.num_devices, min(PER_NODE, plan.num_devices))
            run = planned_function(plan, step, device_mesh(plan.axes, devices))
            choosing = plan.interface.choosing
            with kernels_kept("cuda") as kept:
                given = {**COMPILER_OPTIONS, **kept}
                candidates = compile_candidates(run.compile_as(args), "cuda", choosing, given)
        except (AutoshardError, jax.errors.JaxRuntimeError) as error:
            reason, seconds = " ".join(str(error).split())[:300], round(time.perf_counter() - started, 1)
            yield dataclasses.replace(cell, reason=reason, seconds=seconds)
            return
        estimate, fastest = plan.estimate, choosing.fastest([c.figures for c in candidates])
        cell = dataclasses.replace(
            cell,
            mesh=_mesh_text(plan.axes),
            form="" if plan.choice is None or plan.choice.variant.is_as_written else str(plan.choice.variant),
            predicted_step_s=estimate.step_s,
            predicted_exposed_s=estimate.step_s - estimate.compute_s,
            predicted_peak_bytes=estimate.peak_bytes,
            predicted_reserved_bytes=estimate.reserved_bytes or 0.0,
            gap=plan.certificate.gap,
        )
        seconds = round(time.perf_counter() - started, 1)
        for one in candidates:
            own = dataclasses.replace(cell, options=one.figures.candidate.value, is_run=one.figures is fastest)
            yield measured(own, one.compiled, parse(one.text), choosing.mesh, keep, seconds)

    def _loaded(self) -> tuple[TrainStep, tuple[Any, ...]]:
        """The step as a loss and an optimizer, which leaves its form open, and its arguments."""
        if self.step is None:
            program = PROGRAMS[self.name]
            if program.config is None:
                sizes = program.sizes(self.cluster.num_devices)
                self.step, self.args = gpt.train_step(sizes.fused_attention), gpt.train_arguments(sizes)
            else:
                config = program.loaded(self.cluster.num_devices, "plan.remat=search")
                functions = train_functions(config)
                self.step, self.args = functions.step, arguments(config, functions)
        return self.step, self.args


def _mesh_text(axes: Sequence[tuple[str, int]]) -> str:
    return " x ".join(f"{name}={size}" for name, size in axes)


# ---- tables


def best_by_hand(cells: Sequence[Cell], budget_gb: float, as_written: bool = False) -> Cell | None:
    """The fastest hand-written program that fits the budget; None if none does.

    `as_written`: Only of those that leave the model's checkpoints as they are.
    """
    rivals = [c for c in cells if not c.is_plan and not c.reason and c.total_bytes <= budget_gb * 1e9]
    if as_written:
        rivals = [c for c in rivals if c.strategy not in {s.name for s in strategies.WITHOUT_CHECKPOINTS}]
    return min(rivals, key=lambda c: c.step_s, default=None)


def best_plan(cells: Sequence[Cell], budget_gb: float) -> Cell | None:
    """The faster of the programs that `Plan.jit` runs for the budget, of those that fit it; None if none does."""
    fitting = [c for c in cells if c.budget_gb == budget_gb and c.is_run and c.total_bytes <= budget_gb * 1e9]
    return min(fitting, key=lambda c: c.step_s, default=None)


def table(cells: Sequence[Cell]) -> str:
    """What the cells say, as Markdown: the plan against the strategies, predictions, and every cell."""
    done = [c for c in cells if not c.reason]
    cases: dict[tuple[str, int], list[Cell]] = collections.defaultdict(list)
    for cell in cells:
        cases[cell.program, cell.num_devices].append(cell)
    lines = [f"{len(done)} programs compiled; {len(cells) - len(done)} cells without one.", ""]
    lines += [*_compared(cases), *_best_options(cases), *_predicted(done), *_every(done)]
    if len(done) < len(cells):
        lines += ["", "Without a program:", ""]
        lines += [f"- {' '.join(map(str, c.key))}: {c.reason[:200]}" for c in cells if c.reason]
    return "\n".join(lines) + "\n"


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.2f}"


def _row(*entries: Any) -> str:
    return "| " + " | ".join(map(str, entries)) + " |"


def _compared(cases: Mapping[tuple[str, int], Sequence[Cell]]) -> list[str]:
    """The plan's step beside that of the best hand-written programs that fit the same budget."""
    rows = []
    as_written, whatever = [], []
    for (program, num_devices), cells in cases.items():
        for budget_gb in sorted({c.budget_gb for c in cells if c.is_plan}, reverse=True):
            plan = best_plan(cells, budget_gb)
            rivals = best_by_hand(cells, budget_gb, as_written=True), best_by_hand(cells, budget_gb)
            by_hand = [f"{r.strategy}; {r.options}; {_ms(r.step_s)}" if r else "none fits" for r in rivals]
            found, ratios = ("none fits", "-", "-"), [None, None]
            if plan is not None:
                what = f"{plan.strategy}; {plan.form or 'as written'}; {plan.options}; {plan.mesh}"
                found = what, _ms(plan.step_s), _ms(plan.exposed_s)
                ratios = [plan.step_s / r.step_s if r else None for r in rivals]
            for all_, ratio in zip((as_written, whatever), ratios, strict=True):
                all_ += [ratio] if ratio is not None else []
            told = [f"{ratio:.3f}" if ratio else "-" for ratio in ratios]
            rows.append(_row(program, num_devices, f"{budget_gb:g}", *found, by_hand[0], told[0], by_hand[1], told[1]))
    if not rows:
        return []
    lines = [
        "Plan against the best hand-written program whose memory (all that XLA reserves) is within the budget: of "
        "those that recompute what the model says or more, and of all, also those that take its checkpoints out.",
        "",
    ]
    for name, ratios in (("the best of those", as_written), ("the best of all", whatever)):
        if ratios:
            mean = statistics.geometric_mean(ratios)
            lines += [f"Over {name}: geometric mean {mean:.3f}, most {max(ratios):.3f}, of {len(ratios)}.", ""]
    head = (
        "program",
        "H100s",
        "budget, GB",
        "plan",
        "step, ms",
        "exposed, ms",
        "by hand, as the model is written",
        "ratio",
    )
    return [*lines, _row(*head, "by hand, all", "ratio"), "|" + " --- |" * 10, *rows, ""]


def _best_options(cases: Mapping[tuple[str, int], Sequence[Cell]]) -> list[str]:
    """Which options make each hand-written strategy fastest."""
    rows = []
    for (program, num_devices), cells in cases.items():
        for strategy in dict.fromkeys(c.strategy for c in cells if not c.is_plan):
            own = {c.options: c for c in cells if c.strategy == strategy and not c.reason}
            if own:
                steps = [_ms(own[o].step_s) if o in own else "-" for o in OPTIONS]
                rows.append(_row(program, num_devices, strategy, *steps))
    if not rows:
        return []
    return [
        "Hand-written strategies: step in ms by options of the compiler.",
        "",
        _row("program", "H100s", "strategy", *OPTIONS),
        "|" + " --- |" * (3 + len(OPTIONS)),
        *rows,
        "",
    ]


def _predicted(done: Sequence[Cell]) -> list[str]:
    """How the plans' predictions compare with their schedules."""
    plans = [c for c in done if c.is_run]
    if not plans:
        return []
    steps = [c.predicted_step_s / c.step_s for c in plans]
    exposed = [c.predicted_exposed_s / c.exposed_s for c in plans if c.exposed_s]
    off = [abs(c.predicted_exposed_s - c.exposed_s) / c.step_s for c in plans]
    hidden = [1 - c.exposed_s / c.collective_s for c in plans if c.collective_s]
    peaks = [c.predicted_peak_bytes / c.peak_bytes for c in plans]
    share = lambda ratios, within: f"{sum(abs(r - 1) <= within for r in ratios)} of {len(ratios)}"
    median = lambda values: f"{statistics.median(values):.3f}" if values else "-"
    lines = [
        _row("of the programs that plans run", "median", "within"),
        "|" + " --- |" * 3,
        _row("predicted step over replayed", median(steps), f"10 %: {share(steps, 0.1)}"),
        _row("predicted exposed over replayed", median(exposed), f"20 %: {share(exposed, 0.2)}"),
        _row(
            "predicted exposed off by, share of the step",
            median(off),
            f"2 %: {sum(o <= 0.02 for o in off)} of {len(off)}",
        ),
        _row("predicted peak over compiled", median(peaks), f"10 %: {share(peaks, 0.1)}"),
        _row(
            "share of collective time hidden",
            median(hidden),
            f"85 % or more: {sum(h >= 0.85 for h in hidden)} of {len(hidden)}",
        ),
    ]
    if len(plans) > 2:
        rank = spearmanr([c.predicted_step_s for c in plans], [c.step_s for c in plans])[0]
        lines.append(_row("rank correlation of predicted and replayed steps", f"{rank:.3f}", f"{len(plans)} programs"))
    return [*lines, ""]


def _every(done: Sequence[Cell]) -> list[str]:
    head = (
        "program",
        "H100s",
        "strategy",
        "budget, GB",
        "options",
        "mesh",
        "step, ms",
        "kernels",
        "collectives",
        "exposed",
    )
    lines = [_row(*head, "peak, GB", "reserved, GB", "predicted step, ms", "exposed", "peak, GB"), "|" + " --- |" * 15]
    for c in done:
        strategy = f"{c.strategy}; {c.form}" if c.form else c.strategy
        known = (c.program, c.num_devices, strategy, f"{c.budget_gb:g}" if c.is_plan else "-", c.options, c.mesh)
        found = (
            *map(_ms, (c.step_s, c.kernel_s, c.collective_s, c.exposed_s)),
            *(f"{b / 1e9:.2f}" for b in (c.peak_bytes, c.total_bytes)),
        )
        told = (
            (_ms(c.predicted_step_s), _ms(c.predicted_exposed_s), f"{c.predicted_peak_bytes / 1e9:.2f}")
            if c.is_plan
            else ("-",) * 3
        )
        lines.append(_row(*known, *found, *told))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help=f"only these of {', '.join(PROGRAMS)}, with commas between them")
    parser.add_argument("--devices", help=f"only these numbers of {', '.join(map(str, DEVICES))}")
    parser.add_argument("--only", help="only these strategies, with `;` between them; plans are " + "; ".join(PLANS))
    parser.add_argument("--by-hand", action="store_true", help="no plans")
    parser.add_argument("--budget", help="plans only for these budgets in GB, with commas between them")
    parser.add_argument("--again", action="store_true", help="also cells that are known")
    parser.add_argument("--keep", type=pathlib.Path, help="keep compiled programs in this folder")
    parser.add_argument("--table", action="store_true", help="compile nothing; write the tables of what is known")
    parser.add_argument(
        "--measured", action="store_true", help="price kernels as the catalogue does, by what an H100 took"
    )
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    chosen = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1)
    results = "exposed-measured" if chosen.measured else "exposed"
    lines = chosen.out / f"{results}.jsonl"
    known = read(lines)

    def record(cells: Iterator[Cell]) -> None:
        for cell in cells:
            known[cell.key] = cell
            with lines.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(cell)) + "\n")
            print(_told(cell), flush=True)

    only = set(chosen.only.split(";")) if chosen.only else None
    is_wanted = lambda name: only is None or name in only
    is_open = lambda *key: chosen.again or key not in known
    for name in [] if chosen.table else (chosen.program.split(",") if chosen.program else PROGRAMS):
        for num_devices in map(int, chosen.devices.split(",")) if chosen.devices else DEVICES:
            cluster = cluster_of(num_devices, chosen.measured)
            for strategy in PROGRAMS[name].strategies:
                wanted = [o for o in OPTIONS if is_open(name, num_devices, strategy.name, o, 0.0)]
                if wanted and is_wanted(strategy.name):
                    record(by_hand(name, cluster, strategy, wanted, chosen.keep))
            planning = Planning(name, cluster)
            budgets = tuple(map(float, chosen.budget.split(","))) if chosen.budget else PROGRAMS[name].budgets_gb
            for strategy in () if chosen.by_hand else PLANS:
                if only is None and strategy in BY_NAME:
                    continue
                for budget_gb in budgets:
                    if is_wanted(strategy) and (
                        chosen.again or not _has_plan(known, name, num_devices, strategy, budget_gb)
                    ):
                        record(planning.planned(strategy, budget_gb, chosen.keep))
            jax.clear_caches()
    places = list(PROGRAMS)
    ordered = sorted(known.values(), key=lambda c: (places.index(c.program), c.num_devices, c.is_plan, -c.budget_gb))
    today = datetime.date.today().isoformat()
    by = "at what they took on one" if chosen.measured else "at half of the peak and 0.8 of the memory's bandwidth"
    head = f"Schedules of XLA:GPU, compiled for H100 and replayed, kernels {by}; jax {jax.__version__}, {today}."
    (chosen.out / f"{results}.md").write_text(head + "\n\n" + table(ordered))


def _has_plan(known: Iterable[Key], name: str, num_devices: int, strategy: str, budget_gb: float) -> bool:
    return any((*key[:3], key[4]) == (name, num_devices, strategy, budget_gb) for key in known)


def _told(cell: Cell) -> str:
    head = f"{' '.join(map(str, cell.key)):55s}"
    if cell.reason:
        return f"{head} {cell.reason[:140]}"
    return (
        f"{head} step {_ms(cell.step_s)} kernels {_ms(cell.kernel_s)} exposed {_ms(cell.exposed_s)} of "
        f"{_ms(cell.collective_s)} ms   peak {cell.peak_bytes / 1e9:.2f} reserved {cell.total_bytes / 1e9:.2f} GB   "
        f"{cell.seconds} s"
    )


if __name__ == "__main__":
    main()

"""Every model under the plan and under hand-written strategies, compiled for H100s: do the predictions hold?

    python benchmarks/verify_matrix.py                     # goes on where it stopped
    python benchmarks/verify_matrix.py --model gpt,moe --mesh 2x4 --only plan,zero3
    python benchmarks/verify_matrix.py --foreign --mesh 2x4 --only plan   # also programs that are not in the zoo
    python benchmarks/verify_matrix.py --schedule "least memory"       # XLA's other order, into files of its own
    python benchmarks/verify_matrix.py --share 0/2 & python benchmarks/verify_matrix.py --share 1/2   # on two CPUs
    python benchmarks/verify_matrix.py --table             # only writes the table of what is there

Needs the extra `verify-gpu`, no GPU. The models have their published widths and few layers, since layers repeat. One
JSON line a cell goes to benchmarks/results/verify-matrix.jsonl (hiding latency, as plans are by default: to
verify-matrix-hiding.jsonl) as soon as it is known, the table to the same name with .md.
"""

import argparse
import collections
import dataclasses
import datetime
import json
import math
import os
import pathlib
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from foreign.table import PROGRAMS, Program

from autoshard import Plan, baselines
from autoshard.cluster import Cluster
from autoshard.compiler.schedule import Schedule
from autoshard.errors import AutoshardError
from autoshard.hlo.collectives import compiled_collectives
from autoshard.hlo.compiled_schedule import collective_s
from autoshard.hlo.module import parse
from autoshard.plans.make import homogeneous_slice, plan_program
from autoshard.plans.options import PlanOptions
from autoshard.train.config import load_config
from autoshard.train.planning import arguments
from autoshard.train.registry import train_functions
from autoshard.verify.compile import compile_step
from autoshard.verify.devices import gpu_devices
from autoshard.verify.gpus import COMPILER_OPTIONS, H100

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CONFIGS = ROOT / "configs"


@dataclasses.dataclass(frozen=True)
class Model:
    """A configuration and what replaces its entries: fewer layers, and a batch for at most 16 devices."""

    config: str
    overrides: tuple[str, ...]


MODELS = {
    "gpt": Model("gpt_1.3b", ("model.overrides.num_layers=2", "data.batch_size=32")),
    "gpt_linen": Model("gpt_1.3b", ("model.name=gpt_linen", "model.overrides.num_layers=2", "data.batch_size=32")),
    "llama": Model("llama_8b", ("model.overrides.num_layers=2", "data.batch_size=16", "data.sequence_length=2048")),
    "encoder": Model("encoder_large", ("model.overrides.num_layers=2", "data.batch_size=128")),
    "encoder_decoder": Model("encoder_decoder_3b", ("model.overrides.num_layers=2", "data.batch_size=64")),
    "moe": Model("moe_10b", ("model.overrides.num_layers=2", "model.overrides.num_experts=32", "data.batch_size=64")),
    "vit": Model("vit_l16", ("model.overrides.num_layers=2", "data.batch_size=256")),
    "vit_linen": Model("vit_l16", ("model.name=vit_linen", "model.overrides.num_layers=2", "data.batch_size=256")),
    "wide_resnet": Model("wide_resnet_250m", ("model.overrides.blocks_per_stage=[1,1,1,1]", "data.batch_size=256")),
    "unet": Model("unet_64", ("model.overrides.blocks_per_level=1", "data.batch_size=128")),
    "dlrm": Model("dlrm_criteo", ("data.batch_size=8192",)),
    "recurrent": Model("recurrent_1b", ("model.overrides.num_layers=2", "data.batch_size=32")),
    "graph_network": Model("graph_network_weather", ("model.overrides.num_layers=2", "data.batch_size=16")),
}
MESHES = {
    "8": {"data": 8},
    "2x4": {"data": 2, "tensor": 4},
    "4x4": {"data": 4, "tensor": 4},
    "2x2x4": {"replica": 2, "data": 2, "tensor": 4},
}
PLAN = "plan"
FILES = {Schedule.LEAST_MEMORY: "verify-matrix", Schedule.LATENCY_HIDING: "verify-matrix-hiding"}
STRATEGIES = (PLAN, "ddp", "zero3", "megatron", "zero3+megatron")
PER_NODE = 8
BUDGET_BYTES = 72e9
"""What a plan may use of an H100's 80 GB (`PlanOptions.memory_reserve`)."""


@dataclasses.dataclass(frozen=True)
class Flow:
    """Bytes that a device sends in a step by collectives of one kind over the same axes."""

    kind: str
    axes: tuple[str, ...]
    predicted_bytes: float
    compiled_bytes: float


@dataclasses.dataclass(frozen=True)
class Cell:
    """What became of one model on one mesh under one strategy.

    Attributes:
      reason: Why there is no plan or no program.
      predicted_peak_bytes, compiled_peak_bytes: The most alive at once, by the plan and by XLA.
      predicted_reserved_bytes, compiled_total_bytes: All that must be there for the program to run, with the gaps
        between buffers. 0.0: the first was not predicted when the cell was made.
      compute_s: Predicted, by the roofline. predicted_comm_s, compiled_comm_s: The collectives that were predicted and
        those that were compiled, by the same formulas.
      gap: How near the optimum the plan is proven to be.
      seconds: What planning and compiling took.
    """

    model: str
    mesh: str
    strategy: str
    reason: str = ""
    flows: tuple[Flow, ...] = ()
    predicted_peak_bytes: float = 0.0
    predicted_reserved_bytes: float = 0.0
    compiled_peak_bytes: float = 0.0
    compiled_total_bytes: float = 0.0
    compute_s: float = 0.0
    predicted_comm_s: float = 0.0
    compiled_comm_s: float = 0.0
    gap: float = 0.0
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.mesh, self.strategy

    @property
    def predicted_bytes(self) -> float:
        return sum(f.predicted_bytes for f in self.flows)

    @property
    def compiled_bytes(self) -> float:
        return sum(f.compiled_bytes for f in self.flows)


def read(path: pathlib.Path) -> dict[tuple[str, str, str], Cell]:
    """The cells that are known already."""
    cells = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        fields = json.loads(line)
        fields["flows"] = tuple(Flow(**{**f, "axes": tuple(f["axes"])}) for f in fields["flows"])
        cell = Cell(**fields)
        cells[cell.key] = cell
    return cells


def subject_of(model: Model | Program, cluster: Cluster):
    """The step of a model, its arguments, and the traced and prepared program."""
    if isinstance(model, Program):
        made = model.make()
        args = made.state, made.batch
        return made.step, args, baselines.prepare_subject(made.step, *args, cluster=cluster, donate_argnums=0)
    config = load_config(CONFIGS / f"{model.config}.yaml", model.overrides)
    functions = train_functions(config)
    args = arguments(config, functions)
    return functions.step, args, baselines.prepare_subject(functions.step, *args, cluster=cluster, donate_argnums=0)


def plan_of(name: str, subject, mesh, options: PlanOptions):
    if name == PLAN:
        made = plan_program(
            subject.traced, subject.program, subject.cluster, mesh=mesh, donate_argnums=(0,), options=options
        )
        return Plan.of(made)
    strategy = next(s for s in baselines.ALL if s.name == name)
    return baselines.plan_baseline(strategy, subject, mesh=mesh, options=options)


def measured(key, step, args, subject, options, keep) -> Cell:
    """Plans and compiles one cell."""
    model, mesh, name = key
    axes, started = MESHES[mesh], time.perf_counter()
    try:
        plan = plan_of(name, subject, axes, options)
        devices = gpu_devices(H100, plan.num_devices, min(PER_NODE, plan.num_devices))
        compiled = compile_step(plan, step, args, devices, COMPILER_OPTIONS)
    except (AutoshardError, jax.errors.JaxRuntimeError) as error:
        return Cell(*key, reason=str(error)[:300])
    if keep:
        folder = keep / "-".join(key)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hlo.txt").write_text(compiled.text)
        (folder / "plan.txt").write_text(plan.explain(full=True))
        plan.save(folder / "plan.json")
    predicted, found = collections.Counter(), collections.Counter()
    for c in plan.estimate.communication:
        predicted[c.kind, tuple(sorted(c.axes))] += c.wire_bytes
    collectives = compiled_collectives(parse(compiled.text), plan.axes)
    for c in collectives:
        found[c.kind, tuple(sorted(c.axes))] += c.wire_bytes
    flows = tuple(Flow(*k, predicted[k], found[k]) for k in sorted({*predicted, *found}))
    memory, laid = compiled.memory, homogeneous_slice(subject.cluster).logical_mesh(axes)
    return Cell(
        *key,
        flows=flows,
        predicted_peak_bytes=plan.estimate.peak_bytes,
        predicted_reserved_bytes=plan.estimate.reserved_bytes or 0.0,
        compiled_peak_bytes=memory.peak_bytes,
        compiled_total_bytes=memory.total_bytes,
        compute_s=plan.estimate.compute_s,
        predicted_comm_s=plan.estimate.comm_s,
        compiled_comm_s=sum(c.times * collective_s(c, laid) for c in collectives),
        gap=plan.certificate.gap,
        seconds=round(time.perf_counter() - started, 1),
    )


UNPREDICTED = 0.01
"""A kind of collective over some axes counts as not predicted from this share of the cell's bytes on."""


def strange(cell: Cell) -> list[Flow]:
    """The collectives over axes that no collective was predicted for."""
    predicted = {frozenset(f.axes) for f in cell.flows if f.predicted_bytes > 0}
    limit_bytes = UNPREDICTED * cell.compiled_bytes
    return [f for f in cell.flows if f.compiled_bytes > limit_bytes and frozenset(f.axes) not in predicted]


def deviation(ours: float, theirs: float) -> float:
    """How far a prediction is above (or below) what was compiled, as a share of the latter."""
    if theirs:
        return ours / theirs - 1
    return math.inf if ours else 0.0


def table(cells: list[Cell], schedule: Schedule) -> str:
    """What the cells say, as Markdown: the targets, the plan beside the strategies where times add up, every cell."""
    done = [c for c in cells if not c.reason]
    sent = [abs(deviation(c.predicted_bytes, c.compiled_bytes)) for c in done]
    pairs = {
        "peak, against XLA's own": [(c.predicted_peak_bytes, c.compiled_peak_bytes) for c in done],
        "reserved, with gaps": [(c.predicted_reserved_bytes, c.compiled_total_bytes) for c in done],
    }
    share = lambda hits: f"{sum(hits)} of {len(hits)} ({100 * sum(hits) / max(len(hits), 1):.1f} %)"
    middle = lambda values: f"{100 * statistics.median(values):.2f} %" if values else "-"
    lines = [
        f"{len(done)} programs compiled; {len(cells) - len(done)} cells without one.",
        "",
        "| what | found |",
        "| --- | --- |",
        f"| bytes on the wire within 5 % | {share([d <= 0.05 for d in sent])} |",
        f"| bytes on the wire, median deviation | {middle(sent)} |",
        f"| cells with a collective over axes that were not predicted | {share([bool(strange(c)) for c in done])} |",
    ]
    for what, figures in pairs.items():
        held = [deviation(ours, theirs) for ours, theirs in figures if ours and theirs]
        lines += [
            f"| memory {what}: within 10 % | {share([abs(d) <= 0.1 for d in held])} |",
            f"| memory {what}: median deviation | {middle([abs(d) for d in held])} |",
            f"| memory {what}: predicted more than 3 % under the compiled | {share([d < -0.03 for d in held])} |",
        ]
    lines += [
        "",
        "Peak: the most alive at once. Reserved: what must be there for the program to run, with the gaps between "
        "buffers, whose places are fixed.",
        "",
        *(_gains(done) if schedule is Schedule.LEAST_MEMORY else []),
        "| model | mesh | strategy | sent, MB: predicted | compiled | deviation | peak, GB: predicted | compiled | "
        "deviation | reserved, GB: predicted | compiled | deviation |",
        "|" + " --- |" * 12,
    ]
    for c in done:
        figures = [
            *_beside(c.predicted_bytes / 1e6, c.compiled_bytes / 1e6, ".1f"),
            *_beside(c.predicted_peak_bytes / 1e9, c.compiled_peak_bytes / 1e9, ".3f"),
            *_beside(c.predicted_reserved_bytes / 1e9 or None, c.compiled_total_bytes / 1e9, ".3f"),
        ]
        lines.append("| " + " | ".join([*c.key, *figures]) + " |")
    if len(done) < len(cells):
        lines += ["", "Without a program:", ""]
        lines += [f"- {' '.join(c.key)}: {' '.join(c.reason.split())[:200]}" for c in cells if c.reason]
    return "\n".join(lines) + "\n"


def _beside(predicted: float | None, compiled: float, form: str) -> tuple[str, str, str]:
    """Cells of a row: both figures, and how far the first is above the second."""
    if predicted is None:
        return "-", f"{compiled:{form}}", "-"
    return f"{predicted:{form}}", f"{compiled:{form}}", f"{100 * deviation(predicted, compiled):+.1f} %"


def _gains(done: list[Cell]) -> list[str]:
    """The compiled cost of the plan beside that of the best strategy that fits, on each model and mesh."""
    by_case: dict[tuple[str, str], list[Cell]] = collections.defaultdict(list)
    for c in done:
        by_case[c.model, c.mesh].append(c)
    cost = lambda c: c.compute_s + c.compiled_comm_s
    rows, ratios = [], []
    for (model, mesh), own in by_case.items():
        plan = next((c for c in own if c.strategy == PLAN), None)
        others = [c for c in own if c.strategy != PLAN and c.compiled_total_bytes <= BUDGET_BYTES]
        if plan is None or not others:
            continue
        best = min(others, key=cost)
        ratios.append(cost(best) / cost(plan))
        cells = [model, mesh, f"{cost(plan) * 1e3:.2f}", f"{plan.compiled_comm_s * 1e3:.2f}", best.strategy]
        cells += [f"{cost(best) * 1e3:.2f}", f"{ratios[-1]:.3f}", f"{100 * plan.gap:.2f} %"]
        rows.append("| " + " | ".join(cells) + " |")
    if not ratios:
        return []
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return [
        "Compiled cost: the collectives that were compiled, by the formulas of the cost model on the cluster's links, "
        f"and computation by the roofline. Best strategy over plan: geometric mean {mean:.3f}, least "
        f"{min(ratios):.3f}. The gap is what a better plan could still gain, by proof.",
        "",
        "| model | mesh | plan, ms | of it collectives | best strategy | ms | over plan | gap of the plan |",
        "|" + " --- |" * 8,
        *rows,
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="only these, with commas between them")
    parser.add_argument("--foreign", action="store_true", help="also the programs of benchmarks/foreign")
    parser.add_argument("--mesh", help=f"only these of {', '.join(MESHES)}")
    parser.add_argument("--only", help=f"only these of {', '.join(STRATEGIES)}")
    parser.add_argument("--schedule", choices=[s.value for s in Schedule], default=Schedule.LATENCY_HIDING.value)
    parser.add_argument("--share", default="0/1", help="K/N: every N-th model and mesh, from the K-th on")
    parser.add_argument("--again", action="store_true", help="also cells that are known")
    parser.add_argument("--keep", type=pathlib.Path, help="keep plans and compiled programs in this folder")
    parser.add_argument("--table", action="store_true", help="compile nothing; write the table of what is known")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    chosen = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1)
    schedule = Schedule(chosen.schedule)
    options = PlanOptions(mesh_limit_s=30, cache=True, schedule=schedule)
    name = FILES[schedule]
    chosen.out.mkdir(parents=True, exist_ok=True)
    lines = chosen.out / f"{name}.jsonl"
    known = read(lines)
    share, shares = map(int, chosen.share.split("/"))
    models = {**MODELS, **(PROGRAMS if chosen.foreign else {})}
    chosen_models = chosen.model.split(",") if chosen.model else models
    cases = [(m, mesh) for m in chosen_models for mesh in (chosen.mesh.split(",") if chosen.mesh else MESHES)]
    for model, mesh in [] if chosen.table else cases[share::shares]:
        wanted = [(model, mesh, s) for s in (chosen.only.split(",") if chosen.only else STRATEGIES)]
        if not chosen.again:
            wanted = [key for key in wanted if key not in known]
        wanted = [k for k in wanted if "+" not in k[2] or len(MESHES[mesh]) > 1]
        if not wanted:
            continue
        nodes = max(1, jax.numpy.prod(jax.numpy.array(list(MESHES[mesh].values()))).item() // PER_NODE)
        cluster = Cluster.from_file(CONFIGS / "clusters" / f"h100x{nodes * PER_NODE}.yaml")
        step, args, subject = subject_of(models[model], cluster)
        for key in wanted:
            cell = measured(key, step, args, subject, options, chosen.keep)
            with lines.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(cell)) + "\n")
            print(_told(cell), flush=True)
        jax.clear_caches()
    known = read(lines)
    places = {model: n for n, model in enumerate((*MODELS, *PROGRAMS))}
    ordered = sorted(known.values(), key=lambda c: (places[c.model], list(MESHES).index(c.mesh)))
    head = f"Predictions against XLA:GPU, compiled for H100, scheduled for: {schedule.value}; jax {jax.__version__}, "
    head += f"{datetime.date.today().isoformat()}."
    (chosen.out / f"{name}.md").write_text(head + "\n\n" + table(ordered, schedule))


def _told(cell: Cell) -> str:
    head = f"{' '.join(cell.key):38s}"
    if cell.reason:
        return f"{head} {cell.reason[:120]}"
    ratio = lambda ours, theirs: ours / theirs if theirs else float("nan")
    return (
        f"{head} sent {cell.predicted_bytes / 1e6:9.1f} of {cell.compiled_bytes / 1e6:9.1f} MB "
        f"{ratio(cell.predicted_bytes, cell.compiled_bytes):6.3f}   peak {cell.predicted_peak_bytes / 1e9:7.3f} of "
        f"{cell.compiled_peak_bytes / 1e9:7.3f} GB {ratio(cell.predicted_peak_bytes, cell.compiled_peak_bytes):6.3f}   "
        f"reserved {cell.predicted_reserved_bytes / 1e9:7.3f} of {cell.compiled_total_bytes / 1e9:7.3f} GB "
        f"{ratio(cell.predicted_reserved_bytes, cell.compiled_total_bytes):6.3f}   {cell.seconds} s"
    )


if __name__ == "__main__":
    main()

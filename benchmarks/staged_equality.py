"""Every family of models in stages: does a step over several meshes equal the step on one device?

    python benchmarks/staged_equality.py                        # four cells a family; goes on where it stopped
    python benchmarks/staged_equality.py --family unet,dlrm --all
    python benchmarks/staged_equality.py --table                # only writes the table of what is there

Each family takes two steps on six CPU devices, four called fast and two called slow: under every schedule, in 2 to 4
stages and 1 to 8 micro-batches, and with an uneven second pipeline that has the model whole. They are compared with
`TrainStep.in_parts(plan.parts)` on one device: metrics, gradients (after one step SGD's momentum is the gradient), and
updated parameters; the second step starts from the plain state after the first. One JSON line a cell goes to
benchmarks/results/staged-equality.jsonl as soon as it is known, and the table to staged-equality.md. The environment
XLA_FLAGS=--xla_cpu_use_fusion_emitters=false makes compilation several times as fast.

The measure is the largest |difference| in a leaf over the scale of the leaf: its largest number, but no less than a
hundredth of the largest in all leaves. float32 rounds each number by 6e-8 of itself, and a sum over a few hundred
terms, made in another order, differs by some multiple of that: 1e-5 is allowed. A leaf whose own gradient cancels (that
of the biases of attention keys is zero) is left with the rounding of terms as large as other leaves': the hundredth
keeps it out of the measure, while a term left out or counted twice is far above 1e-7 of the largest.
"""

import argparse
import collections
import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import platform
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "tests" / "models"))

TOLERANCE = 1e-5
SCALE_FLOOR = 1e-2
"""Of the largest number in all leaves; see above."""
BATCH = 8
PARTS = ("metrics", "gradients", "parameters", "mutable")


@dataclasses.dataclass(frozen=True)
class Case:
    """How the model is cut and run.

    Attributes:
      schedule: Its order. num_stages: Of the first pipeline; interleaved stages share two places.
      num_micro_batches: Of the first pipeline. is_uneven: Whether a second pipeline, with the whole model in one stage,
        takes one micro-batch of a quarter of the batch, and the first one the rest.
      rematerialises: Whether the first stage is computed again in the backward pass.
    """

    schedule: str
    num_stages: int
    num_micro_batches: int
    is_uneven: bool = False
    rematerialises: bool = False

    def __str__(self) -> str:
        more = ", uneven" * self.is_uneven + ", remat" * self.rematerialises
        return f"{self.schedule} {self.num_stages}x{self.num_micro_batches}{more}"


CASES = (
    Case("1f1b", 3, 4),
    Case("zb-h1", 2, 3, is_uneven=True),
    Case("interleaved", 4, 2, rematerialises=True),
    Case("gpipe", 4, 8),
)
"""Between them: all schedules, 1 to 4 stages, micro-batches of 1, 2 and 4."""


def all_cases() -> list[Case]:
    """Every schedule with every number of stages and micro-batches."""
    found = list(CASES)
    for schedule, stages, micro in itertools.product(("gpipe", "1f1b", "zb-h1"), (2, 3, 4), (1, 2, 4, 8)):
        found.append(Case(schedule, stages, micro))
    found += [Case("interleaved", 4, micro) for micro in (2, 4, 8)]
    found += [Case(schedule, 3, micro, is_uneven=True) for schedule in ("gpipe", "1f1b") for micro in (2, 6)]
    return list(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class Cell:
    """What became of one family in one case.

    Attributes:
      verdict: `equal`; `differs`; `too few layers`; `fails`, if it raised an error.
      deviations: The largest difference by part, as a share of the scale of a leaf; that of metrics and parameters
        after the second step, of gradients after the first.
      worst: The leaf that differs most. reason: The error. seconds: What planning, compiling and running took.
    """

    family: str
    case: str
    verdict: str
    layers: int = 0
    deviations: dict[str, float] = dataclasses.field(default_factory=dict)
    worst: str = ""
    reason: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        return self.family, self.case


def read(path: pathlib.Path) -> dict[tuple[str, str], Cell]:
    """The cells that are known already."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {cell.key: cell for cell in (Cell(**json.loads(line)) for line in lines)}


def cluster() -> Any:
    """Four fast devices and two slow ones, for which splitting pays at any size: arithmetic is slow, links are not."""
    from autoshard.cluster import Cluster, DeviceType, Link, NodeGroup

    made_up = "made up for this comparison"
    device = lambda name, flops: DeviceType(name, {"float32": flops}, 10**9, 1e9, 0.0, made_up)
    group = lambda name, flops, count: NodeGroup(name, device(name, flops), 1, count, Link(1e-12, 1e9, 0, made_up))
    return Cluster("mixed", (group("fast", 1e9, 4), group("slow", 5e8, 2)), Link(1e-12, 1e9, 1, made_up))


def arrangement(case: Case, num_layers: int) -> Any:
    """The case for a model of so many layers on `cluster()`, whose stages may have one or two devices."""
    from autoshard.pipelines.schedule.tasks import ScheduleKind
    from autoshard.pipelines.search.arrangement import Arrangement, Pipeline, Stage, Submesh

    fast_1, fast_2, slow_1, slow_2 = range(4)  # as `stage_meshes` counts them
    last = Submesh(0, 3, fast_1) if case.is_uneven else Submesh(1, 0, slow_2)
    submeshes = [Submesh(0, 0, fast_2), Submesh(0, 2, fast_1), Submesh(0, 3, fast_1)]
    count = 2 if case.schedule == "interleaved" else case.num_stages
    submeshes = [*submeshes[: count - 1], last]
    ends = [round(k * num_layers / case.num_stages) for k in range(case.num_stages + 1)]
    stages = [Stage(a, b, case.rematerialises and not a) for a, b in itertools.pairwise(ends)]
    examples = BATCH * 3 // 4 if case.is_uneven else BATCH
    size = examples // case.num_micro_batches
    found = [Pipeline(tuple(submeshes), tuple(stages), size, case.num_micro_batches, ScheduleKind(case.schedule))]
    if case.is_uneven:
        whole = (Stage(0, num_layers),)
        found.append(Pipeline((Submesh(1, 0, slow_1),), whole, BATCH - examples, 1, ScheduleKind.ONE_F_ONE_B))
    return Arrangement(tuple(found))


@dataclasses.dataclass(frozen=True)
class Subject:
    """A family's training step, the state before the first step, its batch, and the number of its layers."""

    step: Any
    state: Any
    batch: Any
    num_layers: int


def subject_of(family: str) -> Subject:
    """The family's small program of the tests, with two blocks where it has one, and not scanned."""
    from autoshard_models.zoo import FAMILIES
    from zoo_programs import PROGRAMS

    from autoshard.pipelines.split.forward import trace_forward
    from autoshard.pipelines.split.layer_boundaries import find_layers
    from autoshard.train_step import TrainStep

    program = PROGRAMS[family]
    config = program.config
    if getattr(config, "num_layers", 0) == 1:
        config = dataclasses.replace(config, num_layers=2)
    if getattr(config, "scan_layers", False):
        config = dataclasses.replace(config, scan_layers=False)
    if family == "wide_resnet":  # so that its last batch norms see more than a pixel of each image
        config = dataclasses.replace(config, image_size=32)
    program = program._replace(config=config, batch_size=BATCH)
    objective, is_graph = FAMILIES[family].objective(config), family == "graph_network"

    def loss_fn(params, mutable, batch, key):
        batch = one_graph(batch) if is_graph else batch
        return objective.loss(params, mutable, batch, key if objective.is_random else None)

    step = TrainStep(loss_fn, optax.sgd(0.1, momentum=0.9), has_mutable=True)
    params, mutable = objective.init(jax.random.key(0))
    state = step.init(params, jax.random.key(1), mutable)
    if is_graph:
        batch = jax.tree.map(
            lambda *graphs: jnp.stack(graphs), *map(program._replace(batch_size=1).batch, range(BATCH))
        )
    else:
        batch = program.batch()
    num_layers = find_layers(trace_forward(step, state, batch, 2)).num_layers
    return Subject(step, state, batch, num_layers)


def one_graph(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Graphs in a row, (graph, node or edge, ...), as one graph of separate parts: a micro-batch is some of them."""
    num_graphs, num_nodes = batch["nodes"].shape[:2]
    first = jnp.arange(num_graphs, dtype=jnp.int32)[:, None] * num_nodes
    moved = {name: batch[name] + first for name in ("senders", "receivers")}
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch | moved)


def measure(family: str, case: Case, subject: Subject) -> Cell:
    """Takes two staged steps and two plain ones, and compares them."""
    from autoshard import PlanOptions, StagedPlan
    from autoshard.pipelines.plan.make import plan_staged
    from autoshard.pipelines.search.options import StageOptions

    if subject.num_layers < case.num_stages:
        return Cell(family, str(case), "too few layers", subject.num_layers)
    started = time.perf_counter()
    options = PlanOptions(cache=False, relative_gap=0.05, mesh_limit_s=10)
    try:
        made = plan_staged(
            subject.step,
            subject.state,
            subject.batch,
            cluster(),
            options,
            StageOptions(most_devices_per_stage=2),
            arrangement=arrangement(case, subject.num_layers),
        )
        plan = StagedPlan.of(made)
        reference = reference_of(jax.jit(subject.step.in_parts(plan.parts)), subject)
        expected = reference.made
        found = followed(plan.jit(subject.step, jax.devices()[:6]), reference, subject)
    except Exception as error:  # a cell that fails is a result, and the others go on
        text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        seconds = round(time.perf_counter() - started, 1)
        return Cell(family, str(case), "fails", subject.num_layers, reason=text, seconds=seconds)
    if case.is_uneven:  # of two pipelines, running averages are means of two runs; the tests have this
        del found["mutable"], expected["mutable"]
    deviations = {part: deviation(found[part], expected[part]) for part in expected}
    largest = max(deviations, key=lambda part: deviations[part][0])
    return Cell(
        family,
        str(case),
        "equal" if deviations[largest][0] <= TOLERANCE else "differs",
        subject.num_layers,
        {part: float(f"{share:.2e}") for part, (share, _) in deviations.items()},
        f"{largest} {deviations[largest][1]}",
        seconds=round(time.perf_counter() - started, 1),
    )


@dataclasses.dataclass(frozen=True)
class Reference:
    """The states before each of two plain steps, and what they make."""

    states: list[Any]
    made: dict[str, Any]


def reference_of(step: Any, subject: Subject) -> Reference:
    """Takes two steps on one device."""
    states, made = [subject.state], {}
    for number in range(2):
        state, metrics = step(states[-1], subject.batch)
        made |= _made(number, state, metrics)
        states.append(state)
    return Reference(states, made)


def followed(step: Any, reference: Reference, subject: Subject) -> dict[str, Any]:
    """What staged steps make, each from the state before the plain one: so that a model in which rounding grows (batch
    norm of few numbers, behind rectifiers) does not carry it from step to step.
    """
    made = {}
    for number in range(2):
        made |= _made(number, *step(reference.states[number], subject.batch))
    return made


def _made(number: int, state: Any, metrics: Any) -> dict[str, Any]:
    first = {"gradients": state.opt_state[0].trace} if number == 0 else {}
    return first | {"metrics": metrics, "parameters": state.params, "mutable": state.mutable}


def deviation(found: Any, expected: Any) -> tuple[float, str]:
    """The largest difference between two trees over the scale of its leaf, and the leaf."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True)]
    largest = max((float(np.abs(y).max(initial=0)) for _, y in pairs), default=0.0)
    worst = (0.0, "")
    for path, (x, y) in zip(paths, pairs, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        if not jnp.issubdtype(y.dtype, jnp.inexact):
            assert (x == y).all(), path
            continue
        scale = max(float(np.abs(y).max(initial=0)), SCALE_FLOOR * largest, np.finfo(np.float32).tiny)
        difference = float(np.abs(x - y).max(initial=0))
        worst = max(worst, (difference / scale if np.isfinite(difference) else np.inf, path))
    return worst


def table(cells: list[Cell]) -> str:
    """Cells as Markdown."""
    count = collections.Counter(cell.verdict for cell in cells)
    lines = [
        f"{len(cells)} cells: " + ", ".join(f"{n} {verdict}" for verdict, n in sorted(count.items())) + f". Equal: no "
        f"part deviates by more than {TOLERANCE:g} of the scale of a leaf, which is its largest number, but no less "
        "than a hundredth of the largest in all leaves.",
        "",
        "A case is the schedule, stages x micro-batches of the first pipeline; `uneven`: a second pipeline has the "
        "whole model and a quarter of the batch; `remat`: the first stage is computed again.",
        "",
        "| family | layers | case | verdict | " + " | ".join(PARTS) + " |",
        "|" + " --- |" * (4 + len(PARTS)),
    ]
    for cell in sorted(cells, key=lambda cell: cell.key):
        shown = [f"{cell.deviations[part]:.1e}" if part in cell.deviations else "-" for part in PARTS]
        lines.append("| " + " | ".join([cell.family, str(cell.layers), cell.case, cell.verdict, *shown]) + " |")
    others = [c for c in cells if c.verdict in ("differs", "fails")]
    if others:
        lines += ["", "Cells that are not equal:", ""]
        lines += [f"- {c.family}, {c.case}: {c.verdict}; {c.reason or c.worst}" for c in others]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", help="only these, with commas between them")
    parser.add_argument("--all", action="store_true", help="every schedule with every number of stages")
    parser.add_argument("--again", action="store_true", help="also the cells that failed before")
    parser.add_argument("--table", action="store_true", help="run nothing; write the table of the cells that are known")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    chosen = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)  # the programs are tiny; what takes time is to compile
    from zoo_programs import PROGRAMS

    lines = chosen.out / "staged-equality.jsonl"
    known = read(lines)
    kept = {key for key, cell in known.items() if not (chosen.again and cell.verdict in ("differs", "fails"))}
    families = chosen.family.split(",") if chosen.family else list(PROGRAMS)
    for family in [] if chosen.table else families:
        wanted = [c for c in (all_cases() if chosen.all else CASES) if (family, str(c)) not in kept]
        subject = subject_of(family) if wanted else None
        for case in wanted:
            cell = measure(family, case, subject)
            known[cell.key] = cell
            with lines.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(cell)) + "\n")
            worst = max(cell.deviations.values(), default=0.0)
            told = cell.reason or f"{worst:.1e} at {cell.worst}"
            print(f"{' '.join(cell.key):45s} {cell.verdict:8s} {cell.seconds:6.1f} s  {told[:200]}", flush=True)
        jax.clear_caches()
    head = (
        "Staged steps against the step on one device, by `python benchmarks/staged_equality.py`; "
        f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, {datetime.date.today().isoformat()}.\n\n"
    )
    (chosen.out / "staged-equality.md").write_text(head + table(list(known.values())))


if __name__ == "__main__":
    main()

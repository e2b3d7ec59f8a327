"""Every family of models under the plan and under every strategy that applies: do sharded steps equal the plain one?

    python benchmarks/zoo_equality.py                      # goes on where it stopped; hours on a few cores
    python benchmarks/zoo_equality.py --only forms         # in every form that a search may choose
    python benchmarks/zoo_equality.py --family moe,dlrm --only plan,ddp+experts
    python benchmarks/zoo_equality.py --table              # only writes the table of what is there

Every family trains for three steps on eight CPU devices, laid out as meshes of one, two and three axes; its small
programs and the measure are those of the tests (tests/models/zoo_programs.py, zoo_checks.deviations). Decoders also
decode token by token. Forms are what `PlanOptions.remat` and `.micro_batches` choose from: each policy for all layers,
a mixture of two, and two micro-batches, of a step of two layers as a `TrainStep`, against that step as it is written
(no micro-batches where random numbers are drawn, or the loss is no plain mean over examples). One JSON line a cell goes
to benchmarks/results/zoo-equality.jsonl as soon as it is known, and the table to zoo-equality.md. A plan with the
layouts of one that was run already, on the same mesh, is not run again. The environment
XLA_FLAGS=--xla_cpu_use_fusion_emitters=false makes compilation several times as fast.
"""

import argparse
import collections
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import sys
import time

import jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "tests" / "models"))

PLAN, DECODING, FORM = "plan", "planned decoding", "form: "
PARTS = ("metrics", "params", "opt_state", "mutable", "rest")


@dataclasses.dataclass(frozen=True)
class Cell:
    """What became of one family on one mesh under one strategy.

    Attributes:
      verdict: `equal`; `differs`; `no plan`; `fails`, if it raised an error.
      same_as: The strategy whose plan has the same layouts, and whose deviations these are; empty if it was run itself.
      deviations: The largest difference by part of the state, as a share of the scale of a leaf.
      worst: The leaf that differs most. reason: Why there is no plan, or the error.
      seconds: What planning, compiling and running took.
    """

    family: str
    mesh: str
    strategy: str
    verdict: str
    same_as: str = ""
    deviations: dict[str, float] = dataclasses.field(default_factory=dict)
    worst: str = ""
    reason: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.family, self.mesh, self.strategy


def read(path: pathlib.Path) -> dict[tuple[str, str, str], Cell]:
    """The cells that are known already."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {cell.key: cell for cell in (Cell(**json.loads(line)) for line in lines)}


def train_cells(family: str, meshes: list[str], is_wanted, write) -> None:
    """Runs the cells of a family's training step that are wanted."""
    import zoo_checks
    from zoo_programs import PROGRAMS

    from autoshard import Plan, baselines
    from autoshard.errors import AutoshardError
    from autoshard.plans.make import plan_program

    names = [PLAN, *(strategy.name for strategy in baselines.ALL)]
    if not any(is_wanted(family, mesh, name) for mesh in meshes for name in names):
        return
    reference = zoo_checks.reference_of(PROGRAMS[family])
    subject = reference.subject
    for mesh in meshes:
        axes, run = zoo_checks.MESHES[mesh], {}
        for strategy in (None, *baselines.suited(subject)):
            name = PLAN if strategy is None else strategy.name
            needs_axes = 2 if strategy and strategy.data and strategy.tensor else 1
            if not is_wanted(family, mesh, name) or len(axes) < needs_axes:
                continue
            started = time.perf_counter()
            try:
                if strategy is None:
                    made = plan_program(
                        subject.traced,
                        subject.program,
                        subject.cluster,
                        mesh=axes,
                        donate_argnums=(0,),
                        options=zoo_checks.OPTIONS,
                    )
                    plan = Plan.of(made)
                else:
                    plan = baselines.plan_baseline(strategy, subject, mesh=axes, options=zoo_checks.OPTIONS)
            except AutoshardError as error:
                write(Cell(family, mesh, name, "no plan", reason=str(error)))
                continue
            layouts = plan.axes, plan.arguments, plan.outputs, plan.output_steps, plan.shardings
            if layouts in run:
                same = run[layouts]
                write(dataclasses.replace(same, strategy=name, same_as=same.strategy, seconds=0.0))
                continue
            run[layouts] = measured(family, mesh, name, started, lambda p=plan: zoo_checks.deviations(p, reference))
            write(run[layouts])


def form_cells(family: str, meshes: list[str], is_wanted, write) -> None:
    """Runs the cells of the forms that a family's step can take that are wanted."""
    import zoo_checks
    from autoshard_models.train_step import build
    from autoshard_models.zoo import objective_of
    from zoo_programs import ADAMW, PROGRAMS

    import autoshard
    from autoshard.plans.step_variant import StepVariant
    from autoshard.plans.variant_space import why_no_mean_of
    from autoshard.remat.policy import Keep, first_layers, uniform
    from autoshard.remat.rewrite import layers_of

    program, written = PROGRAMS[family], {"remat": "as_written", "micro_batches": "as_written"}
    config = program.config
    if hasattr(config, "num_layers"):
        config = dataclasses.replace(config, num_layers=2)
    objective = objective_of(config)
    loss = lambda params, mutable, batch, key: objective.loss(
        params, mutable, batch, key if objective.is_random else None
    )
    step = autoshard.TrainStep(loss, ADAMW, has_mutable=True)
    program = program._replace(config=config, functions=build(config, ADAMW)._replace(step=step))
    state, batch = jax.eval_shape(program.functions.init, 0), program.batch()
    runs = layers_of(step, state, batch).runs
    forms = {keep.value: StepVariant(uniform(runs, keep)) for keep in Keep if runs}
    if runs and not any(run.is_loop for run in runs):
        forms["inputs, then all"] = StepVariant(first_layers(runs, Keep.INPUTS, Keep.ALL, 1))
    if not objective.is_random and why_no_mean_of(step, state, batch) is None:
        halves = (program.batch_size // 2,) * 2
        forms["two micro-batches"] = StepVariant(None, halves)
        if runs:
            forms["inputs, two micro-batches"] = StepVariant(uniform(runs, Keep.INPUTS), halves)
    wanted = [(mesh, name) for mesh in meshes for name in forms if is_wanted(family, mesh, FORM + name)]
    reference = zoo_checks.reference_of(program) if wanted else None
    for mesh, name in wanted:
        own = forms[name].of(step)

        def run(own=own, axes=zoo_checks.MESHES[mesh]):
            options = dataclasses.replace(zoo_checks.OPTIONS, **written)
            plan = autoshard.plan(
                own,
                state,
                batch,
                cluster=zoo_checks.slow_device_cluster(),
                mesh=axes,
                donate_argnums=0,
                options=options,
            )
            return zoo_checks.deviations_of(plan.jit(own), reference)

        write(measured(family, mesh, FORM + name, time.perf_counter(), run))


def decoding_cells(family: str, meshes: list[str], is_wanted, write) -> None:
    """Runs the cells of a decoder's token-by-token generation that are wanted."""
    import zoo_checks
    from zoo_programs import PROGRAMS

    for mesh in meshes:
        if is_wanted(family, mesh, DECODING):
            started, program = time.perf_counter(), PROGRAMS[family]
            run = lambda m=mesh, p=program: zoo_checks.decoding_deviations(p, zoo_checks.MESHES[m])
            write(measured(family, mesh, DECODING, started, run))


def measured(family: str, mesh: str, name: str, started: float, run) -> Cell:
    """The cell of deviations that `run` returns."""
    import zoo_checks

    try:
        found = run()
    except Exception as error:  # a cell that fails is a result, and the others go on
        text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        return Cell(family, mesh, name, "fails", reason=text, seconds=round(time.perf_counter() - started, 1))
    worst = max(found.values())
    return Cell(
        family,
        mesh,
        name,
        "equal" if worst.share <= zoo_checks.TOLERANCE else "differs",
        deviations={part: float(f"{d.share:.2e}") for part, d in found.items()},
        worst=worst.leaf,
        seconds=round(time.perf_counter() - started, 1),
    )


def table(cells: list[Cell], tolerance: float) -> str:
    """Cells as Markdown: for each family and mesh the largest deviations, and how many strategies were run."""
    groups = collections.defaultdict(list)
    for cell in cells:
        groups[cell.family, cell.mesh, cell.strategy in (PLAN, DECODING)].append(cell)
    count = collections.Counter(cell.verdict for cell in cells)
    same = sum(bool(cell.same_as) for cell in cells)
    lines = [
        f"{len(cells)} cells: " + ", ".join(f"{n} {verdict}" for verdict, n in sorted(count.items())) + f"; {same} of "
        f"them have the layouts of another cell, which was run. Equal: no part deviates by more than {tolerance:g}.",
        "",
        "| family | mesh | what | cells | equal | loss and metrics | parameters | optimizer state | mutable state |",
        "|" + " --- |" * 9,
    ]
    for (family, mesh, is_own), own in sorted(groups.items()):
        kinds = {}
        for cell in own:
            is_form = cell.strategy.startswith(FORM)
            kinds.setdefault(cell.strategy if is_own else "forms" if is_form else "strategies", []).append(cell)
        for what, those in kinds.items():
            largest = lambda part, those=those: max(
                (c.deviations[part] for c in those if part in c.deviations), default=None
            )
            shown = ["-" if largest(part) is None else f"{largest(part):.1e}" for part in PARTS[:4]]
            equal = sum(c.verdict == "equal" for c in those)
            lines.append("| " + " | ".join([family, mesh, what, str(len(those)), str(equal), *shown]) + " |")
    others = [c for c in cells if c.verdict != "equal"]
    if others:
        lines += ["", "Cells that are not equal:", ""]
        lines += [f"- {c.family}, {c.mesh}, {c.strategy}: {c.verdict}; {c.reason or c.worst}" for c in others]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", help="only these, with commas between them")
    parser.add_argument("--mesh", help="only these of 8, 2x4 and 2x2x2, with commas between them")
    parser.add_argument(
        "--only", help=f"only `{PLAN}`, `decoding`, `forms` or strategies of these names, with commas between"
    )
    parser.add_argument("--table", action="store_true", help="run nothing; write the table of the cells that are known")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    chosen = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)  # the programs are tiny; what takes time is to compile
    import zoo_checks
    from zoo_programs import PROGRAMS

    lines = chosen.out / "zoo-equality.jsonl"
    known = read(lines)

    def write(cell: Cell) -> None:
        known[cell.key] = cell
        with lines.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(cell)) + "\n")
        worst = max(cell.deviations.values(), default=0.0)
        told = cell.reason or (f"as {cell.same_as}" if cell.same_as else f"{worst:.1e} at {cell.worst}")
        print(f"{' '.join(cell.key):45s} {cell.verdict:8s} {cell.seconds:6.1f} s  {told[:150]}", flush=True)

    only = chosen.only and chosen.only.replace("decoding", DECODING).split(",")

    def is_wanted(*key: str) -> bool:
        return key not in known and (not only or key[2] in only or "forms" in only and key[2].startswith(FORM))

    meshes = list(zoo_checks.MESHES) if chosen.mesh is None else chosen.mesh.split(",")
    for family in [] if chosen.table else (chosen.family.split(",") if chosen.family else list(PROGRAMS)):
        train_cells(family, meshes, is_wanted, write)
        if family in ("gpt", "llama"):
            decoding_cells(family, meshes, is_wanted, write)
        form_cells(family, meshes, is_wanted, write)
        jax.clear_caches()
    head = (
        f"Sharded steps against plain ones; {platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, "
        f"{datetime.date.today().isoformat()}.\n\n"
    )
    (chosen.out / "zoo-equality.md").write_text(head + table(list(known.values()), zoo_checks.TOLERANCE))


if __name__ == "__main__":
    main()

"""How long planning takes, from the traced function to the plan: GPT-3 175B with every layer unrolled, 1,024 H100.

    python benchmarks/whole_models.py            # the table: 24 and 96 layers, two and three mesh axes, meshes searched
    python benchmarks/whole_models.py --layers 96 --mesh data=128,tensor=8
    python benchmarks/whole_models.py --model linen --layers 96     # Flax Linen's own layers (foreign/large.py)
    python benchmarks/whole_models.py --model linen --layers 24 --time-limit 3

Each row runs in a process of its own, so that its memory is its own. The solver's kernels are loaded (on a fresh
machine: compiled) before the clock starts; the cache of solutions is off. `jax` is the time of `jax.make_jaxpr` of the
same function, measured just before: it is subtracted from the total, as tracing is JAX's own work. `processor` is the
processor time of the same, which other work on the machine changes less than the clock's. `step` is what the compiler
makes of it, as predicted; `best schedule` what the solver counts, to which the gap belongs.
"""

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import time

import jax
from autoshard_models import train_step
from autoshard_models.presets import preset
from foreign.common import Subject
from foreign.large import linen_gpt3

import autoshard
from autoshard.garbage import collection_paused
from autoshard.solver.warm_up import ALWAYS, SELDOM, WITHIN_CAPACITY, load_kernels

CLUSTER = os.path.join(os.path.dirname(__file__), "..", "configs", "clusters", "h100x1024.yaml")
BATCH = {"own": 1536, "linen": 256}
ROWS = (
    ("own", 24, "data=128,tensor=8"),
    ("own", 96, "data=128,tensor=8"),
    ("own", 96, "data=16,fsdp=8,tensor=8"),
    ("own", 96, "all"),
    ("own", 96, "all:3"),
    ("linen", 24, "data=128,tensor=8"),
    ("linen", 96, "data=128,tensor=8"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured plan; times in seconds."""

    model: str
    layers: int
    mesh: str
    equations: int
    jax_s: float
    graph_s: float
    prepare_s: float
    solve_s: float
    finish_s: float
    total_s: float
    processor_s: float
    peak_rss_bytes: int
    step_s: float
    objective_s: float
    gap: float
    load: float


def _subject(model: str, layers: int) -> Subject:
    """The step of a model with its abstract arguments."""
    if model == "linen":
        return linen_gpt3(layers, BATCH[model])
    config = preset("175b", num_layers=layers)
    built = train_step.build(config, train_step.adamw())
    batch = train_step.batch_shapes(batch_size=BATCH[model], sequence_length=config.context_length)
    return Subject(built.step, jax.eval_shape(built.init, 0), batch)


def measure(model: str, layers: int, mesh: str, time_limit_s: float) -> Row:
    """Plans once."""
    subject = _subject(model, layers)
    load_kernels(ALWAYS + WITHIN_CAPACITY + SELDOM)
    began, began_processor_s = time.perf_counter(), time.process_time()
    with collection_paused():  # as it is inside `plan`
        jax.make_jaxpr(subject.step)(subject.state, subject.batch)
    jax_s, jax_processor_s = time.perf_counter() - began, time.process_time() - began_processor_s
    jax.clear_caches()
    stages: dict[str, float] = {}

    def tell(progress: autoshard.PlanProgress) -> None:
        stages.setdefault(progress.stage.split()[0], progress.elapsed_s)

    axes, most_axes = None, None
    if mesh.startswith("all"):
        most_axes = int(mesh[4:]) if mesh[4:] else None
    else:
        axes = {name: int(size) for name, size in (a.split("=") for a in mesh.split(","))}
    options = autoshard.PlanOptions(on_progress=tell, cache=False, max_mesh_axes=most_axes, mesh_limit_s=time_limit_s)
    began, began_processor_s = time.perf_counter(), time.process_time()
    plan = autoshard.plan(
        subject.step, subject.state, subject.batch, cluster=CLUSTER, mesh=axes, donate_argnums=0, options=options
    )
    total_s, processor_s = time.perf_counter() - began, time.process_time() - began_processor_s
    assert plan.estimate.peak_bytes <= plan.budget_bytes
    return Row(
        model,
        layers,
        mesh,
        len(plan.equations),
        jax_s,
        stages["group"] - stages["trace"] - jax_s,
        stages["solve"] - stages["group"],
        stages["decode"] - stages["solve"],
        total_s - stages["decode"],
        total_s - jax_s,
        processor_s - jax_processor_s,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        plan.estimate.step_s,
        plan.certificate.objective,
        plan.certificate.gap,
        os.getloadavg()[0],
    )


def _in_own_process(model: str, layers: int, mesh: str) -> Row:
    command = [sys.executable, __file__, "--model", model, "--layers", str(layers), "--mesh", mesh, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def _table(rows: list[Row]) -> str:
    titles = (
        *("model", "layers", "mesh", "equations", "jax", "graph", "groups, lifetimes", "formulate, solve", "plan"),
        *("after tracing", "processor", "peak memory", "step", "best schedule", "gap", "load"),
    )
    head = f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}\n"
    return head + "\n".join(
        f"| {r.model} | {r.layers} | {r.mesh} | {r.equations:,} | {r.jax_s:.1f} s | {r.graph_s:.1f} s "
        f"| {r.prepare_s:.1f} s | {r.solve_s:.1f} s | {r.finish_s:.1f} s | **{r.total_s:.1f} s** "
        f"| {r.processor_s:.1f} s | {r.peak_rss_bytes / 1e9:.2f} GB | {r.step_s:.4g} s | {r.objective_s:.4g} s "
        f"| {100 * r.gap:.2f} % | {r.load:.1f} |"
        for r in rows
    )


def main() -> None:
    """Prints the table, or one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=BATCH, default="own", help="the zoo's GPT, or one in plain Flax Linen")
    parser.add_argument("--layers", type=int, help="plan this many layers only")
    parser.add_argument(
        "--mesh",
        default="data=128,tensor=8",
        help="with --layers: axis=size,..., all (as by default), or all:2 or all:3 (all of so many axes)",
    )
    usual_s = autoshard.PlanOptions().mesh_limit_s
    parser.add_argument("--time-limit", type=float, default=usual_s, help="with --layers: seconds for each mesh")
    parser.add_argument("--json", action="store_true", help="print the row as JSON")
    arguments = parser.parse_args()
    if arguments.layers is None:
        rows = []
        for model, layers, mesh in ROWS:
            rows.append(_in_own_process(model, layers, mesh))
            print(f"{model}, {layers} layers, {mesh}: {rows[-1].total_s:.1f} s", file=sys.stderr)
        print(_table(rows))
        return
    row = measure(arguments.model, arguments.layers, arguments.mesh, arguments.time_limit)
    print(json.dumps(dataclasses.asdict(row)) if arguments.json else _table([row]))


if __name__ == "__main__":
    main()

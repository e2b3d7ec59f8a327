"""Does the cost model rank plans as XLA:TPU's own estimates do? Compiled for eight TPU v5e, none of them at hand.

    python benchmarks/order_tpu.py                  # goes on where it stopped
    python benchmarks/order_tpu.py --model gpt
    python benchmarks/order_tpu.py --table          # only writes the table of what is there

Needs the extra `verify-tpu`, no TPU. For each of a few models of one layer: the plan and hand-written strategies, each
on several meshes, compiled. The compiler tells the cycles that it expects of each kernel; added to them is the time of
the collectives of the compiled program by the ring formulas. Judged by the rank correlation (Spearman) between that and
the predicted step time, and by how much slower than the best the plan is that is predicted to be fastest. What is
compared is thus compute and the choice of collectives, not the speed of links. One JSON line a plan goes to
results/order-tpu.jsonl, the table to results/order-tpu.md.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from scipy.stats import spearmanr

from autoshard import baselines
from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError
from autoshard.hlo.collectives import compiled_collectives
from autoshard.hlo.compiled_schedule import collective_s
from autoshard.hlo.cycles import estimated_cycles
from autoshard.hlo.module import parse
from autoshard.plans.make import plan_program
from autoshard.plans.options import PlanOptions
from autoshard.train.config import load_config
from autoshard.train.planning import arguments
from autoshard.train.registry import train_functions
from autoshard.verify.compile import compile_step
from autoshard.verify.devices import devices_for
from autoshard.verify.tpus import V5E

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CLUSTER = ROOT / "configs" / "clusters" / "tpu-v5e-x8.yaml"
MODELS: dict[str, tuple[str, ...]] = {
    "dlrm": (
        "dlrm_tiny",
        "model.overrides={table_rows: [65536, 8192, 1024, 64], num_numbers: 16, embed_dim: 64,"
        " bottom_dims: [512, 256], top_dims: [1024, 512, 256]}",
        "data.batch_size=8192",
    ),
    "gpt": ("gpt_125m", "model.overrides.num_layers=1", "data.batch_size=64", "data.sequence_length=512"),
    "recurrent": (
        "recurrent_tiny",
        "model.overrides={embed_dim: 256, state_dim: 256, hidden_dim: 768}",
        "data.batch_size=64",
    ),
}
"""A file of configs/ and what is changed in it."""
MLP = "mlp"
"""A plain function beside them, which compiles in seconds: four layers of width 4,096, trained with momentum."""
MESHES = ({"data": 8}, {"data": 4, "tensor": 2}, {"data": 2, "tensor": 4})
PLAN = "plan"
STRATEGIES = (PLAN, "ddp", "zero1", "zero3", "megatron", "ddp+megatron", "zero3+megatron", "ddp+tables")
OPTIONS = PlanOptions(mesh_limit_s=30, cache=True)


@dataclasses.dataclass(frozen=True)
class Row:
    """A plan: its predicted times, and what the compiled program's cycles and collectives come to; or why none is."""

    model: str
    plan: str
    mesh: str
    reason: str = ""
    predicted_s: float = 0.0
    predicted_compute_s: float = 0.0
    cycles: float = 0.0
    compiled_comm_s: float = 0.0
    predicted_bytes: float = 0.0
    compiled_bytes: float = 0.0
    compile_s: float = 0.0

    @property
    def compiled_s(self) -> float:
        """Seconds of the kernels' cycles, and of the collectives one after another."""
        return self.cycles / (V5E.clock_ghz * 1e9) + self.compiled_comm_s


def mlp_step(state, batch):
    """One step of descent with momentum of a residual multi-layer perceptron."""

    def loss(params):
        hidden = batch
        for layer in params.values():
            hidden = hidden + jax.nn.relu(hidden @ layer["up"]) @ layer["down"]
        return jnp.mean(jnp.square(hidden - batch[::-1]))

    value, gradients = jax.value_and_grad(loss)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.01 * m.astype(p.dtype), state["params"], momentum)
    return {"params": params, "momentum": momentum}, value


def program_of(model: str):
    """The step of a model, and its arguments by shape."""
    if model == MLP:
        shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
        params = {f"layer{k}": {"up": shape(1024, 4096), "down": shape(4096, 1024)} for k in range(4)}
        return mlp_step, ({"params": params, "momentum": params}, shape(8192, 1024))
    name, *overrides = MODELS[model]
    config = load_config(ROOT / "configs" / f"{name}.yaml", overrides)
    functions = train_functions(config)
    return functions.step, arguments(config, functions)


def row_of(model: str, name: str, axes: dict[str, int], step, args, subject) -> Row:
    """Plans and compiles one way to run a model."""
    key = model, name, "x".join(f"{a}={n}" for a, n in axes.items())
    try:
        if name == PLAN:
            plan = plan_program(
                subject.traced, subject.program, subject.cluster, mesh=axes, donate_argnums=(0,), options=OPTIONS
            )
        else:
            strategy = next(s for s in baselines.ALL if s.name == name)
            plan = baselines.plan_baseline(strategy, subject, mesh=axes, options=OPTIONS)
        started = time.perf_counter()
        compiled = compile_step(plan, step, args, devices_for(V5E, plan.axes, None), {})
    except AutoshardError as error:
        return Row(*key, reason=str(error)[:300])
    module = parse(compiled.text)
    found = compiled_collectives(module, plan.axes)
    mesh = subject.cluster.slices()[0].logical_mesh(dict(plan.axes))
    return Row(
        *key,
        predicted_s=plan.estimate.step_s,
        predicted_compute_s=plan.estimate.compute_s,
        cycles=estimated_cycles(module) or 0.0,
        compiled_comm_s=sum(c.times * collective_s(c, mesh) for c in found),
        predicted_bytes=plan.estimate.comm_bytes,
        compiled_bytes=sum(c.wire_bytes for c in found),
        compile_s=round(time.perf_counter() - started, 1),
    )


def read(path: pathlib.Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def distinct(rows: list[Row]) -> list[Row]:
    """Rows with figures; of those of a model that agree in them to three digits, which are one plan, the first."""
    kept: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        if not row.reason:
            kept.setdefault((row.model, f"{row.predicted_s:.3g}", f"{row.compiled_s:.3g}"), row)
    return list(kept.values())


def table(rows: list[Row]) -> str:
    """The verdict for each model, then every plan."""
    versions = f"jax {jax.__version__}"
    lines = [
        "# Order of plans on TPU v5e: predictions against XLA:TPU's own estimates",
        "",
        f"Compiled ahead of time for eight TPU v5e ({versions}, no TPU at hand) by `python benchmarks/order_tpu.py`.",
        "Estimated: the cycles of the kernels at 1.5 GHz, plus the collectives of the compiled program by the ring",
        "formulas. Nothing here was measured on a TPU.",
        "",
        "| model | distinct plans | rank correlation | chosen against best | step, predicted / estimated (median) |",
        "| --- | --- | --- | --- | --- |",
    ]
    kept = distinct(rows)
    for model in dict.fromkeys(r.model for r in kept):
        of_model = [r for r in kept if r.model == model]
        if len(of_model) < 3:
            continue
        rank = spearmanr([r.predicted_s for r in of_model], [r.compiled_s for r in of_model]).statistic
        chosen, best = min(of_model, key=lambda r: r.predicted_s), min(r.compiled_s for r in of_model)
        ratios = sorted(r.predicted_s / r.compiled_s for r in of_model)
        behind = f"{chosen.compiled_s / best - 1:+.1%} ({chosen.plan}, {chosen.mesh})"
        lines.append(f"| {model} | {len(of_model)} | {rank:.3f} | {behind} | {ratios[len(ratios) // 2]:.2f} |")
    columns = ("model", "plan", "mesh", "predicted ms", "estimated ms", "of it collectives", "sent, both sides, MB")
    lines += ["", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for r in sorted(kept, key=lambda r: (r.model, r.compiled_s)):
        lines.append(
            f"| {r.model} | {r.plan} | {r.mesh} | {r.predicted_s * 1e3:.2f} | {r.compiled_s * 1e3:.2f} | "
            f"{r.compiled_comm_s * 1e3:.2f} | {r.predicted_bytes / 1e6:.1f} / {r.compiled_bytes / 1e6:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="only these, with commas between them")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    chosen = parser.parse_args()
    lines = chosen.out / "order-tpu.jsonl"
    known = {(r.model, r.plan, r.mesh) for r in read(lines)}
    cluster = Cluster.from_file(CLUSTER)
    for model in [] if chosen.table else chosen.model.split(",") if chosen.model else (MLP, *MODELS):
        step, args = program_of(model)
        subject = baselines.prepare_subject(step, *args, cluster=cluster, donate_argnums=0)
        for axes in MESHES:
            for plan in STRATEGIES:
                key = model, plan, "x".join(f"{a}={n}" for a, n in axes.items())
                if key in known or ("+" in plan and len(axes) == 1):
                    continue
                row = row_of(model, plan, axes, step, args, subject)
                with lines.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(row)) + "\n")
                times = f"{row.predicted_s * 1e3:.2f} {row.compiled_s * 1e3:.2f} ms {row.compile_s} s"
                print(*key, row.reason[:100] or times, flush=True)
        jax.clear_caches()
    (chosen.out / "order-tpu.md").write_text(table(read(lines)))


if __name__ == "__main__":
    main()

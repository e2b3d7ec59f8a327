"""Every stage program of plans for a mixed A100 + H100 cluster, compiled by XLA:GPU for its own kind of device.

    python benchmarks/mixed_verify.py                      # all models
    python benchmarks/mixed_verify.py --model gpt,llama
    python benchmarks/mixed_verify.py --table              # only writes the table of what is there

Needs the extra `verify-gpu`, no GPU. A stage is planned as one program and run in parts (forward, backward); both are
compiled: the whole as `autoshard verify` does, and the parts as they run. Compared are the bytes that the collectives
of one micro-batch send, the collectives that only one side has, and the memory of the whole. One JSON line a stage goes
to benchmarks/results/mixed-verify.jsonl, the table to mixed-verify.md.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import optax
from autoshard_models.zoo import FAMILIES

import autoshard
from autoshard.execution.jit import device_mesh
from autoshard.hlo.collectives import compiled_collectives
from autoshard.hlo.module import parse
from autoshard.pipelines.cost.stage import TracedStage, check_stage
from autoshard.pipelines.cost.traced_model import trace_model
from autoshard.pipelines.run.phase_functions import phase_functions
from autoshard.pipelines.split.layer_boundaries import LayerBoundaries
from autoshard.verify.devices import devices_for, options_for
from autoshard.verify.targets import target_of
from autoshard.verify.verify import verify

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CLUSTER = ROOT / "configs" / "clusters" / "a100x8_h100x8.yaml"


@dataclasses.dataclass(frozen=True)
class Model:
    """A preset of the zoo, what replaces its fields, and the batch."""

    family: str
    preset: str
    overrides: dict[str, int]
    batch_size: int


MODELS = {
    "gpt": Model("gpt", "1.3b", {"num_layers": 4}, 32),
    "llama": Model("llama", "8b", {"num_layers": 4, "context_length": 2048}, 16),
    "encoder": Model("encoder", "large", {"num_layers": 4}, 128),
    "encoder_decoder": Model("encoder_decoder", "3b", {"num_layers": 2}, 32),
    "moe": Model("moe", "10b", {"num_layers": 4, "num_experts": 16}, 32),
    "vit": Model("vit", "h14", {"num_layers": 4}, 128),
    "wide_resnet": Model("wide_resnet", "1b", {}, 128),
    "recurrent": Model("recurrent", "1b", {"num_layers": 4}, 32),
}
"""Published widths with few layers, since layers repeat."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One distinct stage program; bytes are of one micro-batch and device."""

    model: str
    stage: str
    device: str
    devices: int
    predicted_bytes: float
    whole_bytes: float
    parts_bytes: float
    strays: int
    predicted_peak_bytes: float
    compiled_peak_bytes: float
    compile_s: float


def rows_of(name: str, model: Model) -> list[Row]:
    """Plans a model in two stages or more and compiles each distinct stage."""
    family = FAMILIES[model.family]
    config = dataclasses.replace(family.presets[model.preset], **model.overrides)
    objective = family.objective(config)
    loss = lambda params, mutable, batch, key: objective.loss(
        params, mutable, batch, key if objective.is_random else None
    )
    step = autoshard.TrainStep(loss, optax.adamw(3e-4), has_mutable=True)

    def init():
        params, mutable = objective.init(jax.random.key(0))
        return step.init(params, mutable=mutable)

    state, batch = jax.eval_shape(init), family.batch_shapes(config, model.batch_size)
    share = model.batch_size // 4
    stages = autoshard.StageOptions(num_stages=2, micro_batch_sizes=(share, share // 2))
    plan = autoshard.plan(step, state, batch, cluster=CLUSTER, stages=stages)
    found, seen = [], set()
    for one in plan.stage_ids:
        number = plan.program_of[one.pipeline][one.stage]
        if number in seen:
            continue
        seen.add(number)
        pipeline = plan.pipeline(one.pipeline)
        part = pipeline.stages[one.stage]
        traced = trace_model(
            step, state, batch, pipeline.micro_batch_size, LayerBoundaries(plan.starts, plan.stop, plan.layers.names)
        )
        program = traced.stages.program(part.start, part.stop)
        stage = check_stage(traced.forward, program, part.rematerialise, plan.programs[number])
        found.append(row_of(name, plan.programs[number], stage, plan.mesh_of(one).name))
    return found


def row_of(model: str, plan: autoshard.Plan, stage: TracedStage, submesh: str) -> Row:
    """Compiles a stage as a whole and in parts."""
    started = time.perf_counter()
    verified = verify(plan, stage.function, *stage.arguments)
    first, stop = stage.program.start, stage.program.stop
    return Row(
        model,
        f"layers {first} to {stop - 1} on {submesh}",
        plan.device,
        plan.num_devices,
        sum(f.predicted_bytes for f in verified.flows),
        sum(f.compiled_bytes for f in verified.flows),
        parts_bytes(plan, stage),
        len(verified.strays),
        verified.predicted_memory.peak_bytes,
        verified.compiled_memory.peak_bytes,
        time.perf_counter() - started,
    )


def parts_bytes(plan: autoshard.Plan, stage: TracedStage) -> float:
    """Bytes that the collectives of the parts send as they are compiled for the plan's devices."""
    target = target_of(plan)
    mesh = device_mesh(plan.axes, devices_for(target, plan.axes, plan.devices_per_node))
    parts = phase_functions(stage.trace, plan.interface, mesh, stage.fused_backward, list(stage.slots.sums), "stage")
    arguments = dict(enumerate(jax.tree.leaves(stage.arguments)))
    forward = parts.forward.lower(arguments, ())
    held = jax.tree.leaves(forward.out_info[1])
    total = 0.0
    for lowered in (forward, parts.backward.lower(arguments, held)):
        text = lowered.compile(compiler_options=options_for(target)).as_text()
        for collective in compiled_collectives(parse(text), plan.axes):
            total += collective.wire_bytes
    return total


def table(rows: list[Row]) -> str:
    """The rows for people."""
    off = lambda got, wanted: 0.0 if got == wanted else (got - wanted) / wanted if wanted else float("inf")
    lines = [
        "# Stage programs of mixed plans, compiled for their own kind of device",
        "",
        "`python benchmarks/mixed_verify.py`: cluster `a100x8_h100x8`, XLA:GPU of jax "
        f"{jax.__version__} ahead of time, no GPU. Models of published widths with few layers, AdamW. Bytes that one "
        "device sends in one micro-batch; `parts` are the programs that run (forward and backward), `whole` the stage "
        "as planned. `only one side` counts collectives that were not predicted, or are absent.",
        "",
        "| model | stage | devices | predicted MB | whole | parts | only one side | peak predicted MB | compiled |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        whole, parts = off(r.whole_bytes, r.predicted_bytes), off(r.parts_bytes, r.predicted_bytes)
        lines.append(
            f"| {r.model} | {r.stage} | {r.devices} x {r.device} | {r.predicted_bytes / 1e6:.1f} | "
            f"{whole:+.1%} | {parts:+.1%} | {r.strays} | "
            f"{r.predicted_peak_bytes / 1e6:.0f} | {off(r.compiled_peak_bytes, r.predicted_peak_bytes):+.1%} |"
        )
    whole = [abs(off(r.whole_bytes, r.predicted_bytes)) for r in rows]
    parts = [abs(off(r.parts_bytes, r.predicted_bytes)) for r in rows]
    peaks = [abs(off(r.compiled_peak_bytes, r.predicted_peak_bytes)) for r in rows]
    within = lambda values, share: f"{sum(v <= share for v in values)} of {len(values)}"
    lines += [
        "",
        f"Bytes within 5 %: whole {within(whole, 0.05)}, parts {within(parts, 0.05)} (medians "
        f"{statistics.median(whole):.2%}, {statistics.median(parts):.2%}). Peak memory within 10 %: "
        f"{within(peaks, 0.1)} (median {statistics.median(peaks):.1%}).",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs what is asked for and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=",".join(MODELS))
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    path = RESULTS / "mixed-verify.jsonl"
    known = [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    for name in [] if args.table else args.model.split(","):
        made = rows_of(name, MODELS[name])
        known = [r for r in known if r.model != name] + made
        path.write_text("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in known))
        for r in made:
            print(r, flush=True)
    order = list(MODELS)
    (RESULTS / "mixed-verify.md").write_text(table(sorted(known, key=lambda r: order.index(r.model))))


if __name__ == "__main__":
    main()

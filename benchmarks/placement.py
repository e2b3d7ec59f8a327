"""What it gains to decide which device is where: GPT on an oversubscribed network and on a torus.

    python benchmarks/placement.py             # all: placement.md and .jsonl in benchmarks/results
    python benchmarks/placement.py --table     # the table of what is on file
    python benchmarks/placement.py --compile   # also compiles the plans and recounts what crosses each level; needs the
                                               # extras verify-gpu and verify-tpu

Layers of GPT 1.3B are planned twice on each mesh: with the devices as the cluster lists them, row-major, and in the
order that autoshard finds.
Bytes are recounted from compiled programs: their replica groups are mapped to devices by the plan's order, and to
levels of the hardware by the cluster file. Nothing ran: times are predictions.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
from autoshard_models import optimizers, train_step
from autoshard_models.presets import preset
from autoshard_models.zoo import FAMILIES

import autoshard
from autoshard.cluster import Cluster
from autoshard.compiler.schedule import Schedule
from autoshard.files import write_bytes_atomically
from autoshard.hlo.collectives import compiled_collectives
from autoshard.hlo.module import parse
from autoshard.placement.level_bytes import LevelBytes, level_bytes
from autoshard.plans.placing import flows_of
from autoshard.verify.compile import compile_step
from autoshard.verify.devices import devices_for, options_for
from autoshard.verify.level_traffic import level_traffic
from autoshard.verify.targets import target_named, target_of

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LAYERS = 2
CASES: tuple[tuple[str, int, Mapping[str, int] | None], ...] = (
    ("h100x128-two-spines", 128, {"data": 16, "tensor": 8}),
    ("h100x128-two-spines", 16, {"data": 8, "tensor": 16}),
    ("h100x128-two-spines", 16, {"data": 4, "tensor": 32}),
    ("h100x128-two-spines", 16, None),
    ("tpu-v4-4x4x8", 16, {"data": 8, "tensor": 16}),
    ("tpu-v4-4x4x8", 16, {"data": 4, "tensor": 32}),
    ("tpu-v4-4x4x8", 16, None),
)
"""Clusters, sequences in a batch, and meshes; None: all with one or two axes are searched. With fewer sequences than
devices a weight's axis has traffic of its own."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan's figures: times in seconds, bytes by level as predicted and as recounted from the compiled program."""

    mesh: str
    step_s: float
    exposed_s: float
    comm_s: float
    predicted: tuple[LevelBytes, ...]
    compiled: tuple[LevelBytes, ...] | None
    planned_in_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="store_true", help="write the table of what is on file, and plan nothing")
    parser.add_argument("--compile", action="store_true", help="compile the plans on given meshes, and recount bytes")
    parser.add_argument("--target", default=None, help="compile for these devices, such as cpu, not the cluster's own")
    parser.add_argument("--only", type=int, default=None, help="one case, by its number from 0 on")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 128)
    on_file = RESULTS / "placement.jsonl"
    chosen = [] if options.table else CASES if options.only is None else CASES[options.only : options.only + 1]
    for cluster, batch_size, mesh in chosen:
        name = ", ".join(f"{a}={n}" for a, n in (mesh or {}).items()) or "searched"
        print(f"{cluster}, {name}", file=sys.stderr, flush=True)
        row: dict[str, Any] = {"cluster": cluster, "batch_size": batch_size, "mesh": name}
        for order in ("listed", "sought"):
            row[order] = dataclasses.asdict(
                planned(cluster, batch_size, mesh, order, options.compile and mesh is not None, options.target)
            )
        rows = [r for r in known(on_file) if (r["cluster"], r["mesh"]) != (cluster, name)] + [row]
        write_bytes_atomically(on_file, "".join(json.dumps(r) + "\n" for r in rows).encode())
    rows = known(on_file)
    rank = {
        (c, ", ".join(f"{a}={n}" for a, n in (m or {}).items()) or "searched"): k for k, (c, _, m) in enumerate(CASES)
    }
    rows.sort(key=lambda r: rank[r["cluster"], r["mesh"]])
    write_bytes_atomically(RESULTS / "placement.md", report(rows).encode())
    return 0


def known(on_file: pathlib.Path) -> list[dict[str, Any]]:
    """The rows that are on file."""
    return [json.loads(line) for line in on_file.read_text().splitlines()] if on_file.exists() else []


def planned(
    cluster: str, batch_size: int, mesh: Mapping[str, int] | None, order: str, compiles: bool, named: str | None
) -> Planned:
    """Plans a case with the devices in one order; `named`: the devices to compile for, None for the cluster's own."""
    config = preset("1.3b", num_layers=LAYERS)
    functions = train_step.build(config, optimizers.adamw())
    state, batch = jax.eval_shape(functions.init, 0), FAMILIES["gpt"].batch_shapes(config, batch_size)
    hardware = Cluster.from_file(ROOT / "configs" / "clusters" / f"{cluster}.yaml")
    options = autoshard.PlanOptions(
        cache=False, schedule=Schedule.LEAST_MEMORY, device_order="sought" if order == "sought" else "listed"
    )
    started = time.perf_counter()
    plan = autoshard.plan(functions.step, state, batch, cluster=hardware, mesh=mesh, donate_argnums=0, options=options)
    assert isinstance(plan, autoshard.Plan)
    planned_in_s = time.perf_counter() - started
    flows, e = flows_of(plan.estimate.communication, plan.logical_mesh), plan.estimate
    compiled = None
    if compiles:
        target = target_of(plan) if named is None else target_named(named)
        devices = devices_for(target, plan.axes, plan.devices_per_node, plan.logical_mesh.torus)
        text = compile_step(plan, functions.step, (state, batch), devices, options_for(target)).text
        compiled = level_traffic(compiled_collectives(parse(text), plan.axes), plan.logical_mesh, hardware.slices()[0])
    mesh_text = str(plan.logical_mesh).partition(" as ")[2]
    predicted = level_bytes(flows, plan.logical_mesh.axes)
    return Planned(mesh_text, e.step_s, e.exposed_s, e.comm_s, predicted, compiled, planned_in_s)


def report(rows: list[dict[str, Any]]) -> str:
    """The tables."""
    lines = [
        "# Which device is where",
        "",
        f"{LAYERS} layers of GPT 1.3B, sequences of 2,048 tokens, by",
        "`python benchmarks/placement.py --compile`. Times are predictions, in milliseconds.",
        "",
        "| cluster | sequences | mesh | listed: step | sending | in order: step | sending | step | sending |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    ms = lambda seconds: f"{seconds * 1e3:.2f}"
    for row in rows:
        a, b = row["listed"], row["sought"]
        gains = " | ".join(f"{b[key] / a[key] - 1:+.1%}" for key in ("step_s", "comm_s"))
        own = " | ".join(f"{ms(p['step_s'])} | {ms(p['comm_s'])}" for p in (a, b))
        lines.append(f"| {row['cluster']} | {row['batch_size']} | {row['mesh']} | {own} | {gains} |")
    lines += [
        "",
        "What each device sends over each level: predicted, and recounted from the compiled program.",
        "",
        "| cluster | mesh, with the links that its axes cross | order | level | link | predicted | compiled |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        for order in ("listed", "sought"):
            own = row[order]
            compiled = {(c["level"], c["bandwidth_bytes_per_s"]): c["sent_bytes"] for c in own["compiled"] or ()}
            for level in own["predicted"]:
                key = level["level"], level["bandwidth_bytes_per_s"]
                found = f"{compiled[key] / 1e9:.3f} GB" if key in compiled else "-"
                lines.append(
                    f"| {row['cluster']} | {own['mesh']} | {order} | {level['level']} | {key[1] / 1e9:g} GB/s "
                    f"| {level['sent_bytes'] / 1e9:.3f} GB | {found} |"
                )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

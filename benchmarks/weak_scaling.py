"""Weak scaling of GPT to 4,096 GPUs, by simulation: A100s, H100s, and half of each.

    python benchmarks/weak_scaling.py                  # all: weak-scaling.md, .jsonl and .png in benchmarks/results
    python benchmarks/weak_scaling.py --only 13b       # one model; with the rows of the others as they are on file
    python benchmarks/weak_scaling.py --table          # table and picture of what is on file
    python benchmarks/weak_scaling.py --whole          # how long a whole plan takes: GPT-3 175B, 512 A100 + 512 H100

The model stays, and the batch grows with the devices: GPT 13B with 2 sequences a device from 8 devices on, and GPT-3
175B, which 8 devices could not hold, with 1.5 sequences a device from 512 on. Efficiency is the throughput of one
device as a share of that at the smallest count. Nothing ran on a GPU: layers are priced by autoshard's cost model, and
the stage search predicts the step with the schedule's simulator, memory being a hard limit.

The layers of a model are priced once, on both types of device; a cluster of any size takes the meshes that it has room
for. `searched in` is the stage search of a cluster after that, which is what grows with the devices.
"""

import argparse
import dataclasses
import io
import json
import os
import pathlib
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from autoshard_models import optimizers
from autoshard_models.presets import preset
from autoshard_models.zoo import FAMILIES

import autoshard
from autoshard.cluster import Cluster, NodeGroup
from autoshard.files import write_bytes_atomically
from autoshard.pipelines.cost.pricing import price_layers
from autoshard.pipelines.cost.stage_meshes import usual_devices
from autoshard.pipelines.cost.table import CostKey, CostTable
from autoshard.pipelines.plan.arrange import default_sizes
from autoshard.pipelines.search.options import StageOptions
from autoshard.pipelines.search.search import search
from autoshard.train_step import TrainStep

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MIXED = ROOT / "configs" / "clusters" / "a100x512_h100x512.yaml"
DEVICES_PER_NODE = 8
PRICED_DEVICES = 64
"""Devices of the cluster on which layers are priced: its slices have all meshes that larger ones have."""
PUBLISHED = 0.917
"""Weak scaling of a 260B model on thousands of processors: "End-to-end Adaptive Distributed Training on PaddlePaddle"
(arXiv:2112.02752), section 4.1.2. Measured, on other hardware, and of another model: a reference, not a rival."""


@dataclasses.dataclass(frozen=True)
class Series:
    """A model, its sequences a device, and the device counts."""

    model: str
    sequences_per_device: float
    counts: tuple[int, ...]


SERIES = (Series("13b", 2, (8, 64, 512, 1024, 4096)), Series("175b", 1.5, (512, 1024, 4096)))
KINDS = {"a100": "A100", "h100": "H100", "mixed": "half A100, half H100"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One cluster.

    Attributes:
      model, kind, devices, batch: What was planned.
      step_s: Predicted time of a step. bound_s: No arrangement of the search's space is faster.
      searched_s: Time of the search, on the processor.
      used_devices: Devices that have work. shape: Pipelines, stages and micro-batches.
    """

    model: str
    kind: str
    devices: int
    batch: int
    step_s: float
    bound_s: float
    searched_s: float
    used_devices: int
    shape: str

    @property
    def examples_per_device_s(self) -> float:
        """Throughput of one device."""
        return self.batch / self.step_s / self.devices


def cluster_of(kind: str, devices: int) -> Cluster:
    """So many devices of one kind, or half of each, in nodes of eight or fewer."""
    whole = Cluster.from_file(MIXED)
    groups = [g for g in whole.groups if kind in (g.name, "mixed")]
    sized = tuple(_sized(g, devices // len(groups)) for g in groups)
    return Cluster(f"{kind}x{devices}", sized, whole.between_groups if len(sized) > 1 else None)


def _sized(group: NodeGroup, devices: int) -> NodeGroup:
    per_node = min(DEVICES_PER_NODE, devices)
    return dataclasses.replace(group, num_nodes=devices // per_node, devices_per_node=per_node)


def table_for(table: CostTable, priced_on: Cluster, cluster: Cluster) -> CostTable:
    """The part of a cost table that a cluster has room for, its slices counted as in that cluster."""
    names = [s.name for s in priced_on.slices()]
    number = {names.index(s.name): k for k, s in enumerate(cluster.slices())}
    most = {names.index(s.name): usual_devices(s) for s in cluster.slices()}
    kept = [n for n, o in enumerate(table.options) if o.slice in number and o.num_devices <= most[o.slice]]
    options = tuple(dataclasses.replace(table.options[n], slice=number[table.options[n].slice]) for n in kept)
    position = {n: k for k, n in enumerate(kept)}
    costs = {
        CostKey(key.kind, position[key.option], key.micro_batch_size): cost
        for key, cost in table.costs.items()
        if key.option in position
    }
    return CostTable(options, costs)


def program(model: str, batch: int) -> tuple[TrainStep, Any, Any]:
    """The training step of a GPT with AdamW, and the shapes of its state and its batch."""
    config = preset(model)
    objective = FAMILIES["gpt"].objective(config)

    def loss(params: Any, mutable: Any, batch: Any, rng: Any) -> Any:
        return objective.loss(params, mutable, batch, rng if objective.is_random else None)

    step = TrainStep(loss, optimizers.adamw(), has_mutable=True)

    def make() -> Any:
        params, mutable = objective.init(jax.random.key(0))
        return step.init(params, jax.random.key(1), mutable)

    return step, jax.eval_shape(make), FAMILIES["gpt"].batch_shapes(config, batch)


def measure(series: Series) -> list[Row]:
    """Prices a model and searches all its clusters."""
    priced_on = cluster_of("mixed", PRICED_DEVICES)
    batch = int(series.sequences_per_device * PRICED_DEVICES)
    step, state, shapes = program(series.model, batch)
    began = time.process_time()
    options = autoshard.PlanOptions(cache=False)
    priced = price_layers(step, state, shapes, priced_on, default_sizes(batch, priced_on, StageOptions()), options)
    print(f"{series.model}: priced in {time.process_time() - began:.1f} s of the processor", file=sys.stderr)
    rows = []
    for devices in series.counts:
        for kind in KINDS:
            cluster = cluster_of(kind, devices)
            table = table_for(priced.table, priced_on, cluster)
            batch = int(series.sequences_per_device * devices)
            began = time.process_time()
            found = search(priced.layers, table, cluster, batch)
            searched_s = time.process_time() - began
            pipelines = found.arrangement.pipelines
            used = sum(table.options[submesh.option].num_devices for p in pipelines for submesh in p.submeshes)
            shape = shape_of(cluster, table, pipelines)
            rows.append(Row(series.model, kind, devices, batch, found.step_s, found.bound_s, searched_s, used, shape))
            print(f"{series.model} {kind} {devices}: {searched_s:.1f} s, {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def shape_of(cluster: Cluster, table: CostTable, pipelines: Sequence[Any]) -> str:
    """Pipelines that are alike in submeshes, schedule and micro-batch size told once."""
    alike: dict[tuple[str, str], list[int]] = {}
    for p in pipelines:
        stages: dict[str, int] = {}
        for k in range(len(p.stages)):
            submesh = p.submeshes[k % len(p.submeshes)]
            name = f"{cluster.slices()[submesh.slice].name} x {table.options[submesh.option].num_devices}"
            stages[name] = stages.get(name, 0) + 1
        again = sum(s.rematerialise for s in p.stages)
        text = " + ".join(f"{n} stage{'s' * (n > 1)} of {name}" for name, n in stages.items())
        text += f" ({again} computed again)" if again else ""
        alike.setdefault((text, f"of {p.micro_batch_size}, {p.schedule.value}"), []).append(p.num_micro_batches)
    parts = []
    for (text, rest), numbers in alike.items():
        least, most = min(numbers), max(numbers)
        parts.append(f"{len(numbers)} x [{text}; {least if least == most else f'{least}-{most}'} {rest}]")
    return ", ".join(parts)


def whole_plan() -> str:
    """How long `autoshard.plan` takes for GPT-3 175B on 1,024 devices of two types, with all its parts."""
    step, state, batch = program("175b", 1536)
    load = os.getloadavg()[0]
    marks: list[tuple[str, float]] = []
    options = autoshard.PlanOptions(cache=False, on_progress=lambda p: marks.append((p.stage, time.process_time())))
    began, began_cpu = time.perf_counter(), time.process_time()
    plan = autoshard.plan(step, state, batch, cluster=MIXED, options=options)
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    starts: dict[str, float] = {}
    for stage, at_s in marks:
        starts.setdefault(stage, at_s - began_cpu)
    parts = (
        f"layers priced from {starts['price']:.0f} s, stages searched from {starts['stages']:.0f} s, each planned "
        f"from {starts['plan']:.0f} s"
    )
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (
        f"GPT-3 175B, 96 layers, batch 1,536, on 512 A100 + 512 H100: {cpu_s:.0f} s of the processor ({parts}), "
        f"{wall_s:.0f} s by the clock at a load of {load:.0f}, {peak_bytes / 1e9:.2f} GB of host memory; a step takes "
        f"{plan.step_s:.3f} s, gap of the search {plan.certificate.gap:.0%}."
    )


def efficiency(rows: Sequence[Row], row: Row) -> float:
    """Throughput of a device, of that at the smallest count."""
    least = min((r for r in rows if (r.model, r.kind) == (row.model, row.kind)), key=lambda r: r.devices)
    return row.examples_per_device_s / least.examples_per_device_s


def of_halves(rows: Sequence[Row], row: Row) -> float | None:
    """Throughput of a mixed cluster, of what its halves manage: the mean of clusters of one kind, of its size."""
    alone = [r for r in rows if (r.model, r.devices) == (row.model, row.devices) and r.kind != "mixed"]
    if row.kind != "mixed" or len(alone) != 2:
        return None
    return row.examples_per_device_s / (sum(r.examples_per_device_s for r in alone) / 2)


def markdown(rows: Sequence[Row], whole: str) -> str:
    """The table."""
    lines = [
        "# Weak scaling of GPT, simulated",
        "",
        "`python benchmarks/weak_scaling.py`, which says what is computed.",
        f"Published reference: {PUBLISHED:.1%} of a 260B model on thousands of processors (PaddlePaddle, measured).",
        "",
        "| model | devices | kind | batch | step | efficiency | of its halves | gap of the search | searched in "
        "| plan |",
        "| --- " * 10 + "|",
    ]
    for r in rows:
        halves = of_halves(rows, r)
        lines.append(
            f"| GPT {r.model.upper()} | {r.devices:,} | {KINDS[r.kind]} | {r.batch:,} | {r.step_s:.3f} s | "
            f"{efficiency(rows, r):.1%} | {'' if halves is None else f'{halves:.1%}'} | "
            f"{1 - r.bound_s / r.step_s:.0%} | {r.searched_s:.1f} s | {r.shape}"
            f"{'' if r.used_devices == r.devices else f', {r.devices - r.used_devices} devices left out'} |"
        )
    return "\n".join([*lines, "", whole]).rstrip() + "\n"


def picture(rows: Sequence[Row]) -> bytes:
    """Efficiency against devices, as PNG."""
    import matplotlib.figure

    colours = {"a100": "#0072b2", "h100": "#d55e00", "mixed": "#009e73"}
    figure = matplotlib.figure.Figure(figsize=(9, 5), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for series, style in zip(SERIES, ("-", "--"), strict=True):
        for kind, name in KINDS.items():
            own = sorted((r for r in rows if (r.model, r.kind) == (series.model, kind)), key=lambda r: r.devices)
            if own:
                label = f"GPT {series.model.upper()}, {name}"
                shares = [efficiency(rows, r) for r in own]
                axes.plot([r.devices for r in own], shares, style, marker="o", color=colours[kind], label=label)
    axes.axhline(PUBLISHED, color="#777777", linewidth=1, linestyle=":")
    axes.annotate("published: 91.7 %, 260B, measured", (8, PUBLISHED), xytext=(0, -12), textcoords="offset points")
    axes.set_xscale("log", base=2)
    counts = sorted({n for series in SERIES for n in series.counts})
    axes.set_xticks(counts, [f"{n:,}" for n in counts])
    axes.set_ylim(0, 1.1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("devices; the batch grows with them")
    axes.set_title("throughput of a device, of that at the smallest count (simulated)", loc="left", fontsize=11)
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.legend(frameon=False, loc="lower left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def main() -> None:
    """Measures what is asked, and writes table and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[s.model for s in SERIES], help="this model only")
    parser.add_argument("--table", action="store_true", help="table and picture of what is on file")
    parser.add_argument("--whole", action="store_true", help="time a whole plan")
    arguments = parser.parse_args()
    stem = RESULTS / "weak-scaling"
    file, note = stem.with_suffix(".jsonl"), RESULTS / "weak-scaling-whole-plan.txt"
    if arguments.whole:
        note.write_text(whole_plan() + "\n")
    chosen = (
        [s for s in SERIES if arguments.only in (None, s.model)] if not (arguments.table or arguments.whole) else []
    )
    rows = [Row(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    for series in chosen:
        rows = [r for r in rows if r.model != series.model] + measure(series)
    order = {s.model: n for n, s in enumerate(SERIES)}
    rows.sort(key=lambda r: (order[r.model], r.devices, list(KINDS).index(r.kind)))
    file.write_text("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in rows))
    stem.with_suffix(".md").write_text(markdown(rows, note.read_text() if note.exists() else ""))
    write_bytes_atomically(stem.with_suffix(".png"), picture(rows))


if __name__ == "__main__":
    main()

"""What XLA:TPU runs beside products: weight gathers and sums of plans, and of FSDP written by hand, for TPU v5e.

    python benchmarks/exposed_tpu.py                    # goes on where it stopped
    python benchmarks/exposed_tpu.py --program gpt --layers 2    # a smaller GPT, which compiles in minutes
    python benchmarks/exposed_tpu.py --program llama,moe --chips 8
    python benchmarks/exposed_tpu.py --only fsdp
    python benchmarks/exposed_tpu.py --table            # only writes the table of what is there

Needs the extra `verify-tpu`, no TPU. Models of a few layers, the GPT of `by_hand/gpt.py` and families of the zoo, are
compiled for a slice of 4 x 4 or 2 x 4: FSDP by hand, and plans on the same mesh for both schedules; with `--only` also
without their orders. Of collectives that move more than 2 MB it is
counted how many run beside a product (`autoshard/hlo/beside_products.py`). Each schedule is replayed
(`autoshard/hlo/compiled_schedule.py`): kernels take the cycles that XLA:TPU expects of them, collectives the ring
formulas over the links of configs/clusters/tpu-v5e-x*.yaml. One JSON line a program goes to results/exposed-tpu.jsonl,
the table to results/exposed-tpu.md.
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from by_hand import gpt, strategies
from by_hand.programs import Program

from autoshard import PlanOptions, Schedule, baselines
from autoshard.cluster import Cluster, LogicalMesh
from autoshard.compiler.candidates import Candidate
from autoshard.errors import AutoshardError
from autoshard.execution.compiled_memory import CompiledMemory
from autoshard.execution.jit import device_mesh
from autoshard.hlo.beside_products import beside_products
from autoshard.hlo.collectives import CompiledCollective, compiled_collectives
from autoshard.hlo.compiled_schedule import replay
from autoshard.hlo.module import parse
from autoshard.planner.estimate import CommunicationItem
from autoshard.plans.apply import planned_function
from autoshard.plans.make import homogeneous_slice, plan_program
from autoshard.train.planning import arguments
from autoshard.train.registry import train_functions
from autoshard.verify.devices import devices_for
from autoshard.verify.strays import Origins, strays
from autoshard.verify.tpus import V5E

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TORUS = {16: (4, 4), 8: (2, 4)}
"""The slices, by their chips."""
LARGE_BYTES = 2e6
"""Collectives whose whole array is smaller are left out of the counts."""
PLANS = {"plan": Schedule.LATENCY_HIDING, "plan, least memory": Schedule.LEAST_MEMORY}
ORDERS = {"": Candidate.LEAST_MEMORY, ", without its orders": Candidate.UNORDERED}
"""What a plan's program is compiled with: `Candidate.LEAST_MEMORY` stands for the orders of the plan itself."""
FSDP = strategies.FSDP.name
NAMES = (FSDP, *(f"{name}{orders}" for orders in ORDERS for name in PLANS))
MAIN = (FSDP, *PLANS)
"""What is compiled if nothing else is asked for."""
GPT = "gpt"
_layers = lambda number: f"model.overrides.num_layers={number}"
PROGRAMS = {
    "llama": Program((), 16, "llama_8b", (_layers(2), "data.sequence_length=2048")),
    "encoder": Program((), 64, "encoder_10b", (_layers(2),)),
    "moe": Program((), 64, "moe_10b", (_layers(2), "model.overrides.num_experts=16")),
    "vit": Program((), 256, "vit_h14", (_layers(2),)),
    "encoder_decoder": Program((), 64, "encoder_decoder_3b", (_layers(1),)),
    "gpt_scanned": Program(
        (),
        16,
        "gpt_linen_tiny",
        ("model.preset=6.7b", _layers(4), "model.overrides.scan_layers=true", "data.sequence_length=2048"),
    ),
}
"""Families of the zoo, beside the GPT."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A step, its arguments by shape, and how FSDP by hand lowers it for devices."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    lowered: Callable[[Sequence[Any]], jax.stages.Lowered]


def subject_of(program: str, layers: int, chips: int) -> Subject:
    """The GPT of so many layers, or a family of the zoo."""
    if program == GPT:
        sizes = gpt.Sizes(num_layers=layers)
        lowered = lambda devices: strategies.lowered_gpt(strategies.FSDP, sizes, devices)
        return Subject(gpt.step, gpt.arguments(sizes), lowered)
    config = PROGRAMS[program].loaded(chips)
    functions = train_functions(config)
    lowered = lambda devices: strategies.lowered_zoo(strategies.FSDP, config, devices)
    return Subject(functions.step, arguments(config, functions), lowered)


@dataclasses.dataclass(frozen=True)
class Planned:
    """What a plan has a program send, and what its equations are."""

    sent: Sequence[CommunicationItem]
    origins: Origins


@dataclasses.dataclass(frozen=True)
class Row:
    """A compiled program.

    Attributes:
      layers, name, program, chips: Which; the layers are 0 where the program tells them.
      beside: By kind of collective, how many large ones run beside a product, and how many there are.
      step_s, kernel_s, collective_s, exposed_s: Of its schedule, replayed.
      reserved_bytes: All that must be there for it to run, by XLA. sent_bytes: By a device in a step.
      predicted_...: By the plan; 0.0 by hand.
      missing_bytes, unpredicted_bytes: Of collectives that are predicted and not compiled, and the other way round.
      seconds: What compiling took. reason: Why there is no program.
    """

    layers: int
    name: str
    beside: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    step_s: float = 0.0
    kernel_s: float = 0.0
    collective_s: float = 0.0
    exposed_s: float = 0.0
    reserved_bytes: float = 0.0
    predicted_step_s: float = 0.0
    predicted_exposed_s: float = 0.0
    predicted_reserved_bytes: float = 0.0
    seconds: float = 0.0
    reason: str = ""
    program: str = GPT
    chips: int = 16
    predicted_kernel_s: float = 0.0
    sent_bytes: float = 0.0
    predicted_sent_bytes: float = 0.0
    missing_bytes: float = 0.0
    unpredicted_bytes: float = 0.0

    @property
    def key(self) -> tuple[str, int, int, str]:
        return self.program, self.layers, self.chips, self.name


def measured(
    row: Row, compile_: Callable[[], Any], mesh: LogicalMesh, keep: pathlib.Path | None, plan: Planned | None = None
) -> Row:
    """The row with what `compile_` returns, for a mesh; `plan`: What it was compiled from."""
    started = time.perf_counter()
    try:
        compiled = compile_()
    except (AutoshardError, jax.errors.JaxRuntimeError) as error:
        return dataclasses.replace(row, reason=" ".join(str(error).split())[:300])
    text = compiled.as_text() or ""
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{re.sub(r'[^a-z0-9]+', '-', ' '.join(map(str, row.key)))}.hlo.txt").write_text(text)
    axes = tuple((axis.name, axis.size) for axis in mesh.axes)
    module, counts = parse(text), collections.defaultdict(lambda: [0, 0])
    names, found = beside_products(module, axes), compiled_collectives(module, axes)
    for collective in found:
        if _whole_bytes(collective) > LARGE_BYTES:
            counts[collective.kind][0] += collective.name in names
            counts[collective.kind][1] += 1
    step = replay(module, mesh, V5E.clock_ghz)
    odd = () if plan is None else strays(plan.sent, found, plan.origins, [name for name, _ in axes])
    return dataclasses.replace(
        row,
        beside={kind: (beside, number) for kind, (beside, number) in counts.items()},
        step_s=step.step_s,
        kernel_s=step.kernel_s,
        collective_s=step.collective_s,
        exposed_s=step.exposed_s,
        reserved_bytes=CompiledMemory.of(compiled, "tpu").total_bytes,
        sent_bytes=sum(c.wire_bytes for c in found),
        missing_bytes=sum(s.wire_bytes for s in odd if s.predicted),
        unpredicted_bytes=sum(s.wire_bytes for s in odd if not s.predicted),
        seconds=round(time.perf_counter() - started, 1),
    )


def _whole_bytes(collective: CompiledCollective) -> float:
    """Of what a gather makes, and of what any other collective is given."""
    given_bytes = sum(p.array.size_bytes for p in collective.pieces)
    return given_bytes * (collective.num_devices if collective.kind == "all-gather" else 1)


def rows(
    program: str, layers: int, chips: int, wanted: Callable[[str], bool], keep: pathlib.Path | None
) -> Iterator[Row]:
    """The rows of a program, those whose names are wanted."""
    if not any(map(wanted, NAMES)):
        return
    axes = (("data", chips),)
    cluster = Cluster.from_file(ROOT / "configs" / "clusters" / f"tpu-v5e-x{chips}.yaml")
    mesh, devices = homogeneous_slice(cluster).logical_mesh(dict(axes)), devices_for(V5E, axes, None, TORUS[chips])
    subject, own = subject_of(program, layers, chips), Row(layers, "", program=program, chips=chips)
    planning = None
    for name, schedule in PLANS.items():
        ways = {f"{name}{orders}": candidate for orders, candidate in ORDERS.items() if wanted(f"{name}{orders}")}
        if not ways:
            continue
        planning = planning or baselines.prepare_subject(subject.step, *subject.args, cluster=cluster, donate_argnums=0)
        options = PlanOptions(mesh_limit_s=60, schedule=schedule)
        try:
            plan = plan_program(
                planning.traced, planning.program, cluster, mesh=dict(axes), donate_argnums=(0,), options=options
            )
        except AutoshardError as error:
            yield from (dataclasses.replace(own, name=way, reason=" ".join(str(error).split())[:300]) for way in ways)
            continue
        run = planned_function(plan, subject.step, device_mesh(plan.axes, devices))
        compile_as, e = run.compile_as(subject.args), plan.estimate
        for way, candidate in ways.items():
            row = dataclasses.replace(
                own,
                name=way,
                predicted_step_s=e.step_s,
                predicted_kernel_s=e.compute_s,
                predicted_exposed_s=e.exposed_s,
                predicted_reserved_bytes=e.reserved_bytes or e.peak_bytes,
                predicted_sent_bytes=sum(c.wire_bytes for c in e.collectives),
            )
            compile_ = functools.partial(compile_as, candidate, {})
            yield measured(row, compile_, mesh, keep, Planned(e.collectives, Origins.of(planning.traced)))
    if wanted(FSDP):
        yield measured(dataclasses.replace(own, name=FSDP), lambda: subject.lowered(devices).compile(), mesh, keep)


def table(known: Sequence[Row]) -> str:
    """All rows, as Markdown."""
    ms, gb = (lambda x: f"{x * 1e3:.2f}" if x else "-"), (lambda x: f"{x / 1e9:.2f}" if x else "-")
    per_cent = lambda ours, theirs: f"{100 * (ours / theirs - 1):+.1f}" if ours and theirs else "-"
    head = (
        *("program", "layers", "chips", "by", "beside a product, of those above 2 MB"),
        *("step, ms", "kernels", "collectives", "exposed", "reserved, GB", "sent, GB"),
        *("predicted step, ms", "kernels", "exposed", "reserved, GB", "off, %", "sent, GB", "off, %"),
    )
    lines = [
        f"Schedules of XLA:TPU, compiled for TPU v5e 4 x 4 and 2 x 4 and replayed; jax {jax.__version__}.",
        "Made by `python benchmarks/exposed_tpu.py`; nothing was measured on a TPU.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
    ]
    places = [GPT, *PROGRAMS]
    for r in sorted((r for r in known if not r.reason), key=lambda r: (places.index(r.program), -r.layers, -r.chips)):
        counts = ", ".join(f"{a} of {n} {kind}" for kind, (a, n) in sorted(r.beside.items()))
        times = map(ms, (r.step_s, r.kernel_s, r.collective_s, r.exposed_s))
        told = map(ms, (r.predicted_step_s, r.predicted_kernel_s, r.predicted_exposed_s))
        memory = gb(r.predicted_reserved_bytes), per_cent(r.predicted_reserved_bytes, r.reserved_bytes)
        sent = gb(r.predicted_sent_bytes), per_cent(r.predicted_sent_bytes, r.sent_bytes)
        own = r.program, str(r.layers or "-"), str(r.chips), r.name, counts, *times, gb(r.reserved_bytes)
        lines.append("| " + " | ".join((*own, gb(r.sent_bytes), *told, *memory, *sent)) + " |")
    lines += ["", *(f"- {' '.join(map(str, r.key))}: {r.reason}" for r in known if r.reason)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help=f"only these of {', '.join((GPT, *PROGRAMS))}, with commas between them")
    parser.add_argument("--layers", type=int, default=8, help="of the GPT")
    parser.add_argument("--chips", type=int, default=16, choices=TORUS, help="of the slice")
    parser.add_argument("--only", help=f"only these, with `;` between them: {'; '.join(NAMES)}")
    parser.add_argument("--again", action="store_true", help="also programs that are known")
    parser.add_argument("--keep", type=pathlib.Path, help="keep compiled programs in this folder")
    parser.add_argument("--table", action="store_true", help="compile nothing; write the table of what is known")
    chosen = parser.parse_args()
    lines = RESULTS / "exposed-tpu.jsonl"
    read = [Row(**json.loads(line)) for line in lines.read_text().splitlines()] if lines.exists() else []
    known = {row.key: row for row in read}
    only = set(chosen.only.split(";")) if chosen.only else set(MAIN)
    for program in [] if chosen.table else (chosen.program.split(",") if chosen.program else (GPT, *PROGRAMS)):
        layers = chosen.layers if program == GPT else 0
        is_known = lambda name, program=program, layers=layers: (program, layers, chosen.chips, name) in known
        is_wanted = lambda name, is_known=is_known: name in only and (chosen.again or not is_known(name))
        for row in rows(program, layers, chosen.chips, is_wanted, chosen.keep):
            known[row.key] = row
            with lines.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            told = row.reason or f"{row.beside}, step {row.step_s * 1e3:.2f} ms, {row.seconds} s"
            print(f"{' '.join(map(str, row.key))}: {told}", flush=True)
        jax.clear_caches()
    (RESULTS / "exposed-tpu.md").write_text(table(list(known.values())))


if __name__ == "__main__":
    main()

"""What XLA:TPU runs beside products: weight gathers and sums of plans, and of FSDP written by hand, for TPU v5e.

    python benchmarks/exposed_tpu.py                    # goes on where it stopped
    python benchmarks/exposed_tpu.py --layers 2         # a smaller GPT, which compiles in minutes
    python benchmarks/exposed_tpu.py --only fsdp
    python benchmarks/exposed_tpu.py --table            # only writes the table of what is there

Needs the extra `verify-tpu`, no TPU. The GPT of `by_hand/gpt.py` is compiled for a slice of 4 x 4: FSDP by hand, and
plans on the same mesh for both schedules, each also without its orders. Of collectives that move more than 2 MB it is
counted how many run beside a product (`autoshard/hlo/beside_products.py`). Each schedule is replayed
(`autoshard/hlo/compiled_schedule.py`): kernels take the cycles that XLA:TPU expects of them, collectives the ring
formulas over the links of configs/clusters/tpu-v5e-x16.yaml. One JSON line a program goes to results/exposed-tpu.jsonl,
the table to results/exposed-tpu.md.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from by_hand import gpt, strategies

from autoshard import PlanOptions, Schedule, baselines
from autoshard.cluster import Cluster
from autoshard.compiler.candidates import Candidate
from autoshard.errors import AutoshardError
from autoshard.execution.compiled_memory import CompiledMemory
from autoshard.execution.jit import device_mesh
from autoshard.hlo.beside_products import beside_products
from autoshard.hlo.collectives import CompiledCollective, compiled_collectives
from autoshard.hlo.compiled_schedule import replay
from autoshard.hlo.module import parse
from autoshard.plans.apply import planned_function
from autoshard.plans.make import homogeneous_slice, plan_program
from autoshard.verify.devices import devices_for
from autoshard.verify.tpus import V5E

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CLUSTER = Cluster.from_file(ROOT / "configs" / "clusters" / "tpu-v5e-x16.yaml")
TORUS = (4, 4)
AXES = (("data", 16),)
LARGE_BYTES = 2e6
"""Collectives whose whole array is smaller are left out of the counts."""
PLANS = {"plan": Schedule.LATENCY_HIDING, "plan, least memory": Schedule.LEAST_MEMORY}
ORDERS = {"": Candidate.LEAST_MEMORY, ", without its orders": Candidate.UNORDERED}
"""What a plan's program is compiled with: `Candidate.LEAST_MEMORY` stands for the orders of the plan itself."""
FSDP = strategies.FSDP.name


@dataclasses.dataclass(frozen=True)
class Row:
    """A compiled program.

    Attributes:
      layers, name: Which.
      beside: By kind of collective, how many large ones run beside a product, and how many there are.
      step_s, kernel_s, collective_s, exposed_s: Of its schedule, replayed.
      reserved_bytes: All that must be there for it to run, by XLA. predicted_...: By the plan; 0.0 by hand.
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

    @property
    def key(self) -> tuple[int, str]:
        return self.layers, self.name


def measured(row: Row, compile_: Callable[[], Any], keep: pathlib.Path | None) -> Row:
    """The row with what `compile_` returns."""
    started = time.perf_counter()
    try:
        compiled = compile_()
    except (AutoshardError, jax.errors.JaxRuntimeError) as error:
        return dataclasses.replace(row, reason=" ".join(str(error).split())[:300])
    text = compiled.as_text() or ""
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{re.sub(r'[^a-z0-9]+', '-', f'{row.layers} {row.name}')}.hlo.txt").write_text(text)
    module, mesh = parse(text), homogeneous_slice(CLUSTER).logical_mesh(dict(AXES))
    names, counts = beside_products(module, AXES), collections.defaultdict(lambda: [0, 0])
    for collective in compiled_collectives(module, AXES):
        if _whole_bytes(collective) > LARGE_BYTES:
            counts[collective.kind][0] += collective.name in names
            counts[collective.kind][1] += 1
    step = replay(module, mesh, V5E.clock_ghz)
    return dataclasses.replace(
        row,
        beside={kind: (beside, number) for kind, (beside, number) in counts.items()},
        step_s=step.step_s,
        kernel_s=step.kernel_s,
        collective_s=step.collective_s,
        exposed_s=step.exposed_s,
        reserved_bytes=CompiledMemory.of(compiled, "tpu").total_bytes,
        seconds=round(time.perf_counter() - started, 1),
    )


def _whole_bytes(collective: CompiledCollective) -> float:
    """Of what a gather makes, and of what any other collective is given."""
    given_bytes = sum(p.array.size_bytes for p in collective.pieces)
    return given_bytes * (collective.num_devices if collective.kind == "all-gather" else 1)


def rows(layers: int, wanted: Callable[[str], bool], keep: pathlib.Path | None):
    """The rows of a GPT, those whose names are wanted."""
    sizes, devices = gpt.Sizes(num_layers=layers), devices_for(V5E, AXES, None, TORUS)
    args = gpt.arguments(sizes)
    if wanted(FSDP):
        lowered = strategies.lowered_gpt(strategies.FSDP, sizes, devices)
        yield measured(Row(layers, FSDP), lowered.compile, keep)
    subject = None
    for name, schedule in PLANS.items():
        ways = {f"{name}{orders}": candidate for orders, candidate in ORDERS.items() if wanted(f"{name}{orders}")}
        if not ways:
            continue
        subject = subject or baselines.prepare_subject(gpt.step, *args, cluster=CLUSTER, donate_argnums=0)
        options = PlanOptions(time_limit_s=60, schedule=schedule)
        plan = plan_program(
            subject.traced, subject.program, subject.cluster, mesh=dict(AXES), donate_argnums=(0,), options=options
        )
        compile_as = planned_function(plan, gpt.step, device_mesh(plan.axes, devices)).compile_as(args)
        e = plan.estimate
        for way, candidate in ways.items():
            row = Row(
                layers,
                way,
                predicted_step_s=e.step_s,
                predicted_exposed_s=e.exposed_s,
                predicted_reserved_bytes=e.reserved_bytes or e.peak_bytes,
            )
            yield measured(row, lambda candidate=candidate, compile_as=compile_as: compile_as(candidate, {}), keep)


def table(known: Sequence[Row]) -> str:
    """All rows, as Markdown."""
    ms, gb = (lambda x: f"{x * 1e3:.2f}" if x else "-"), (lambda x: f"{x / 1e9:.2f}" if x else "-")
    head = (
        "layers",
        "program",
        "beside a product, of those above 2 MB",
        "step, ms",
        "kernels",
        "collectives",
        "exposed",
    )
    lines = [
        f"Schedules of XLA:TPU, compiled for TPU v5e 4 x 4 and replayed; jax {jax.__version__}.",
        "Made by `python benchmarks/exposed_tpu.py`; nothing was measured on a TPU.",
        "",
        "| " + " | ".join((*head, "reserved, GB", "predicted step, ms", "exposed", "reserved, GB")) + " |",
        "|" + " --- |" * 11,
    ]
    for r in sorted((r for r in known if not r.reason), key=lambda r: -r.layers):
        counts = ", ".join(f"{a} of {n} {kind}" for kind, (a, n) in sorted(r.beside.items()))
        times = map(ms, (r.step_s, r.kernel_s, r.collective_s, r.exposed_s))
        told = ms(r.predicted_step_s), ms(r.predicted_exposed_s), gb(r.predicted_reserved_bytes)
        lines.append("| " + " | ".join((str(r.layers), r.name, counts, *times, gb(r.reserved_bytes), *told)) + " |")
    lines += ["", *(f"- {r.layers} layers, {r.name}: {r.reason}" for r in known if r.reason)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="of the GPT")
    names = [FSDP, *(f"{name}{orders}" for name in PLANS for orders in ORDERS)]
    parser.add_argument("--only", help=f"only these programs, with `;` between them: {'; '.join(names)}")
    parser.add_argument("--again", action="store_true", help="also programs that are known")
    parser.add_argument("--keep", type=pathlib.Path, help="keep compiled programs in this folder")
    parser.add_argument("--table", action="store_true", help="compile nothing; write the table of what is known")
    chosen = parser.parse_args()
    lines = RESULTS / "exposed-tpu.jsonl"
    read = [Row(**json.loads(line)) for line in lines.read_text().splitlines()] if lines.exists() else []
    known = {row.key: row for row in read}
    only = set(chosen.only.split(";")) if chosen.only else set(names)
    is_wanted = lambda name: name in only and (chosen.again or (chosen.layers, name) not in known)
    for row in [] if chosen.table else rows(chosen.layers, is_wanted, chosen.keep):
        known[row.key] = row
        with lines.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        print(f"{row.name}: {row.reason or row.beside}, step {row.step_s * 1e3:.2f} ms, {row.seconds} s", flush=True)
    (RESULTS / "exposed-tpu.md").write_text(table(list(known.values())))


if __name__ == "__main__":
    main()

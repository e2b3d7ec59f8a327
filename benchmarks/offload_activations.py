"""Residuals in host memory: what plans predict that have some there, and what XLA:GPU makes of them.

    python benchmarks/offload_activations.py                       # every model; those that are there are kept
    python benchmarks/offload_activations.py --model gpt,llama --share 0.8 --again

Needs the extra `verify-gpu`, no GPU. Eight layers of each model at its published width, on eight H100 with their host,
data=8, are planned without a limit, with the products of layers kept and all else computed again; then with a share of
that memory, and residuals on hosts where nothing fits otherwise. That plan is compiled as `Plan.jit` does, and its
schedule replayed, host copies on a link of their own. One JSON line a case goes to
benchmarks/results/offload-activations.jsonl, the table to offload-activations.md.
"""

import argparse
import dataclasses
import json
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from verify_matrix import MODELS, ROOT

import autoshard
from autoshard import PlanOptions
from autoshard.errors import AutoshardError
from autoshard.remat.policy import Keep, uniform
from autoshard.remat.rewrite import layers_of, rematerialised
from autoshard.train.config import load_config
from autoshard.train.planning import arguments
from autoshard.train.registry import train_functions

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
CLUSTER = str(ROOT / "configs" / "clusters" / "h100x8_cpu.yaml")
LAYERS, MESH = 8, {"data": 8}
DEFAULT_MODELS = ("gpt", "gpt_linen", "llama", "encoder", "encoder_decoder", "vit", "moe")
OPTIONS = PlanOptions(
    cache=False, time_limit_s=60, least_memory_s=0, remat="as_written", micro_batches="as_written", relative_gap=0.01
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One case; bytes and seconds of one device. `share`: Of the memory that the plan without a limit reserves.

    Attributes:
      without: What becomes of the same budget with all on the devices: a step in seconds; None if nothing fits.
      host_bytes, host_s, exposed_s: On the host, copied, and waited for, as predicted; `compiled_`: as compiled.
      reason: Why there is no plan.
    """

    model: str
    share: float
    free_s: float
    without: float | None
    step_s: float = 0.0
    compiled_step_s: float = 0.0
    reserved_bytes: float = 0.0
    compiled_reserved_bytes: float = 0.0
    host_bytes: float = 0.0
    compiled_host_bytes: float = 0.0
    host_s: float = 0.0
    exposed_s: float = 0.0
    compiled_exposed_s: float = 0.0
    reason: str = ""


def case(name: str, share: float) -> Row:
    model = MODELS[name]
    overrides = [o for o in model.overrides if "num_layers" not in o]
    config = load_config(
        ROOT / "configs" / f"{model.config}.yaml",
        [*overrides, f"model.overrides.num_layers={LAYERS}", "plan.remat=search"],
    )
    functions = train_functions(config)
    args = arguments(config, functions)
    runs = layers_of(functions.step, *args).runs
    step = rematerialised(functions.step, uniform(runs, Keep.WEIGHT_PRODUCTS))

    def planned(budget_bytes: float | None, offload: str) -> autoshard.Plan:
        return autoshard.plan(
            step,
            *args,
            cluster=CLUSTER,
            mesh=MESH,
            donate_argnums=0,
            memory_budget_bytes=budget_bytes,
            options=dataclasses.replace(OPTIONS, offload=offload),
        )

    free = planned(None, "never").estimate
    budget_bytes, without = share * (free.reserved_bytes or free.peak_bytes), None
    try:
        without = planned(budget_bytes, "never").estimate.step_s
    except AutoshardError:
        pass
    row = Row(name, share, free.step_s, without)
    try:
        plan = planned(budget_bytes, "activations")
    except AutoshardError as error:
        return dataclasses.replace(row, reason=str(error)[:120])
    e, found = plan.estimate, plan.verify(step)
    compiled = found.schedule.compiled
    return dataclasses.replace(
        row,
        step_s=e.step_s,
        compiled_step_s=compiled.step_s if compiled else 0.0,
        reserved_bytes=e.reserved_bytes or 0.0,
        compiled_reserved_bytes=found.reserved_bytes,
        host_bytes=sum(c.held_bytes for c in e.residual_copies),
        compiled_host_bytes=found.compiled_memory.host_bytes,
        host_s=sum(c.time_s for c in e.residual_copies),
        exposed_s=e.host_exposed_s,
        compiled_exposed_s=compiled.host_s if compiled else 0.0,
    )


def table(rows: list[Row]) -> str:
    lines = [
        "# Residuals in host memory\n",
        f"`python benchmarks/offload_activations.py`: {LAYERS} layers, eight H100 with their host, data=8, products of "
        "layers kept. Memory: what the plan without a limit reserves, times the share. GB and ms of one device; "
        "predicted / compiled by XLA:GPU ahead of time and replayed, never run.\n",
        "| model | memory | step in any memory | all on the devices | step | reserved | on the host | copied | "
        "waited for |",
        "| --- " * 9 + "|",
    ]
    for r in rows:
        if r.reason:
            lines.append(f"| {r.model} | {r.share:.0%} | {r.free_s * 1e3:.1f} | | {r.reason} | | | | |")
            continue
        pair = lambda a, b, unit: f"{a * unit:.4g} / {b * unit:.4g}"
        cells = [r.model, f"{r.share:.0%}", f"{r.free_s * 1e3:.1f}"]
        cells += [f"{r.without * 1e3:.1f}" if r.without else "nothing fits", pair(r.step_s, r.compiled_step_s, 1e3)]
        cells += [pair(r.reserved_bytes, r.compiled_reserved_bytes, 1e-9)]
        cells += [pair(r.host_bytes, r.compiled_host_bytes, 1e-9), f"{r.host_s * 1e3:.1f}"]
        lines.append("| " + " | ".join([*cells, pair(r.exposed_s, r.compiled_exposed_s, 1e3)]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=",".join(DEFAULT_MODELS))
    parser.add_argument("--share", default="0.8,0.7", help="of the memory of the plan without a limit")
    parser.add_argument("--again", action="store_true", help="also cases that are there")
    own = parser.parse_args()
    file = RESULTS / "offload-activations.jsonl"
    rows = {
        (r.model, r.share): r
        for r in (Row(**json.loads(l)) for l in (file.read_text().splitlines() if file.exists() else ()))
    }
    for name in own.model.split(","):
        for share in map(float, own.share.split(",")):
            if own.again or (name, share) not in rows:
                rows[name, share] = case(name, share)
                print(rows[name, share], flush=True)
                file.write_text("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in rows.values()))
    file.with_suffix(".md").write_text(table(list(rows.values())))


if __name__ == "__main__":
    main()

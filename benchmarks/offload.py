"""State in host memory: what plans under a tight budget predict, and what XLA:GPU makes of them.

    python benchmarks/offload.py                          # one JSON line a case, on the terminal
    python benchmarks/offload.py --model gpt --schedule "least memory"

Needs the extra `verify-gpu`, no GPU. Each model, two layers of its published width with Adam, is planned for eight H100
with their host: without a limit, then with less and less memory until nothing fits without offload. The plan with
offload for that budget is compiled.
"""

import argparse
import dataclasses
import json
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from verify_matrix import MODELS, ROOT

from autoshard import Plan, PlanOptions
from autoshard.api import plan_on_devices
from autoshard.compiler.schedule import Schedule
from autoshard.errors import MemoryBudgetError
from autoshard.train.config import load_config
from autoshard.train.planning import arguments
from autoshard.train.registry import train_functions

LEAST, WITHIN = 0.2, 0.02
"""Shares of what the plan without a limit reserves: the least that is tried, and how closely it is sought."""
CLUSTER = str(ROOT / "configs" / "clusters" / "h100x8_cpu.yaml")


def case(name: str, mesh: dict[str, int], schedule: Schedule | None, below: float) -> dict[str, object]:
    model = MODELS[name]
    config = load_config(ROOT / "configs" / f"{model.config}.yaml", model.overrides)
    functions = train_functions(config)
    args = arguments(config, functions)
    options = PlanOptions(
        cache=False,
        schedule=schedule,
        time_limit_s=30,
        least_memory_s=0,
        remat="as_written",
        micro_batches="as_written",
    )

    def planned(budget_bytes: float | None, offload: str) -> Plan:
        chosen = dataclasses.replace(options, offload=offload)
        plan = plan_on_devices(
            functions.step,
            *args,
            cluster=CLUSTER,
            mesh=mesh,
            donate_argnums=0,
            memory_budget_bytes=budget_bytes,
            options=chosen,
        )
        assert isinstance(plan, Plan)
        return plan

    free = planned(None, "state")
    free_bytes = free.estimate.reserved_bytes or free.estimate.peak_bytes
    share, enough = LEAST, 1.0
    while enough - share > WITHIN:
        middle = (share + enough) / 2
        try:
            planned(middle * free_bytes, "never")
            enough = middle
        except MemoryBudgetError:
            share = middle
    share *= below
    plan = planned(share * free_bytes, "state")
    e, found = plan.estimate, plan.verify(functions.step)
    hosted = [a for a in plan.arguments if a.in_host]
    return {
        "model": name,
        "mesh": mesh,
        "schedule": plan.schedule.value,
        "free_bytes": free_bytes,
        "share": share,
        "budget_bytes": plan.budget_bytes,
        "in_host": len(hosted),
        "free_in_host": sum(a.in_host for a in free.arguments),
        "free_step_s": free.estimate.step_s,
        "step_s": e.step_s,
        "host_s": sum(c.time_s for c in e.host_copies),
        "gap": plan.certificate.gap,
        "host_bytes": sum(c.wire_bytes for c in e.host_copies) / 2,
        "compiled_host_bytes": found.compiled_memory.host_bytes,
        "peak_bytes": e.peak_bytes,
        "compiled_peak_bytes": found.compiled_memory.peak_bytes,
        "reserved_bytes": e.reserved_bytes,
        "compiled_reserved_bytes": found.reserved_bytes,
        "ways": [str(c) for c in found.schedule.candidates],
        "disagreements": found.disagreements,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt,llama,encoder")
    parser.add_argument("--mesh", default="data=8", help="such as data=2,tensor=4")
    parser.add_argument("--below", type=float, default=1.0, help="share of the budget in which nothing fits")
    parser.add_argument("--schedule", choices=[s.value for s in Schedule])
    own = parser.parse_args()
    mesh = {name: int(size) for name, size in (axis.split("=") for axis in own.mesh.split(","))}
    schedule = None if own.schedule is None else Schedule(own.schedule)
    for name in own.model.split(","):
        print(json.dumps(case(name, mesh, schedule, own.below)), flush=True)


if __name__ == "__main__":
    main()

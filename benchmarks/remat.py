"""What is recomputed, chosen with the shardings, beside one policy for all layers: predicted steps, planning times.

    python benchmarks/remat.py --case gpt_1.3b:a100-80x8:64:data=8

A case is a configuration of `configs/`, a cluster of `configs/clusters/`, sequences a batch, and a mesh. Each is
planned with `PlanOptions(remat="search")`, with every policy for all layers, and as it is written (every block under
`jax.checkpoint`), without a cache of solutions. Nothing is compiled and no device is needed. The table goes to
benchmarks/results/remat.md, figures to remat.jsonl; rows of cases that are not run again stay.
"""

import argparse
import json
import math
import os
import pathlib
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import autoshard
from autoshard.errors import SolverError
from autoshard.plans.options import PlanOptions
from autoshard.remat.policy import Keep, uniform
from autoshard.remat.rewrite import layers_of, rematerialised
from autoshard.train.config import load_config
from autoshard.train.planning import arguments
from autoshard.train.registry import train_functions

ROOT = pathlib.Path(__file__).parent
CONFIGS, RESULTS = ROOT.parent / "configs", ROOT / "results"
CASES = (
    "gpt_1.3b:a100-40x8:64:data=8",
    "gpt_1.3b:a100-80x8:64:data=8",
    "gpt_6.7b:a100-40x16:64:data=16",
    "gpt_6.7b:a100-80x16:64:data=16",
    "gpt_6.7b:a100-40x64:256:data=64",
    "gpt_6.7b:h100x64:256:data=64",
)
TIME_LIMIT_S = 60.0
HEAD = (
    "# What layers recompute\n\n`python benchmarks/remat.py`: predicted steps in ms; `-`: no plan fits. As written: "
    "every block under `jax.checkpoint`, which keeps its input. Gain: over the best policy that is one for all layers. "
    "Times are those of planning, in s, tracing included, at whatever load the machine had.\n\n"
    "| case | as written | all | all but the largest | weight products | products | inputs | search | gain | "
    "it keeps | time as written | time of the search | ratio |\n|" + "---|" * 13 + "\n"
)


def run(case: str) -> dict:
    """The figures of one case."""
    config_name, cluster_name, batch_size, mesh_text = case.split(":")
    overrides = [f"data.batch_size={batch_size}", "plan.remat=search", "plan.cache=false"]
    config = load_config(CONFIGS / f"{config_name}.yaml", overrides)
    functions = train_functions(config)
    args = arguments(config, functions)
    request = {
        "cluster": CONFIGS / "clusters" / f"{cluster_name}.yaml",
        "mesh": {name: int(size) for name, size in (axis.split("=") for axis in mesh_text.split(","))},
        "donate_argnums": 0,
    }

    def planned(step, remat: str) -> tuple[autoshard.Plan | None, float]:
        started_s = time.perf_counter()
        options = PlanOptions(time_limit_s=TIME_LIMIT_S, cache=False, remat=remat, least_memory_s=0.0)
        try:
            plan = autoshard.plan(step, *args, options=options, **request)
        except SolverError as error:
            print(f"{case}: {str(error).partition('.')[0]}", flush=True)
            plan = None
        return plan, time.perf_counter() - started_s

    found: dict = {"case": case, "steps_s": {}}
    plan, found["search_time_s"] = planned(functions.step, "search")
    if plan is not None:
        found["steps_s"]["search"] = plan.estimate.step_s
        found |= {"keeps": str(plan.remat), "gap": plan.certificate.gap, "budget_bytes": plan.budget_bytes}
        found["needed_bytes"] = plan.estimate.reserved_bytes or plan.estimate.peak_bytes
        print(plan.explain()[-3000:], flush=True)
    plan, found["as_written_time_s"] = planned(functions.step, "as_written")
    found["steps_s"]["as written"] = None if plan is None else plan.estimate.step_s
    runs = layers_of(functions.step, *args).runs
    for keep in Keep:
        plan, _ = planned(rematerialised(functions.step, uniform(runs, keep)), "as_written")
        found["steps_s"][keep.value] = None if plan is None else plan.estimate.step_s
    return found


def line(found: dict) -> str:
    """One row of the table."""
    steps = found["steps_s"]
    ms = lambda name: "-" if steps.get(name) is None else f"{steps[name] * 1e3:.1f}"
    best = min((steps[k.value] for k in Keep if steps.get(k.value) is not None), default=math.nan)
    order = (Keep.ALL, Keep.ALL_BUT_LARGEST, Keep.WEIGHT_PRODUCTS, Keep.PRODUCTS, Keep.INPUTS)
    gain = f"{best / steps['search'] - 1:.1%}" if steps.get("search") else "-"
    cells = [found["case"], ms("as written"), *(ms(k.value) for k in order), ms("search"), gain]
    cells.append(found.get("keeps", "-"))
    cells += [f"{found[t]:.0f}" for t in ("as_written_time_s", "search_time_s")]
    cells.append(f"{found['search_time_s'] / found['as_written_time_s']:.1f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="configuration:cluster:batch:mesh; all of CASES by default")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    chosen = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1)
    path = chosen.out / "remat.jsonl"
    known = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    for case in chosen.case or CASES:
        found = run(case)
        known = [*(k for k in known if k["case"] != case), found]
        print(line(found), flush=True)
        path.write_text("".join(json.dumps(k) + "\n" for k in known))
        (chosen.out / "remat.md").write_text(HEAD + "\n".join(map(line, known)) + "\n")


if __name__ == "__main__":
    main()

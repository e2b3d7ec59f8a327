"""Plans under less and less memory, compiled for H100s: does a plan that claims to fit, fit?

    python benchmarks/memory_budgets.py --model gpt,llama

Needs the extra `verify-gpu`, no GPU. Each model is planned on data=2, tensor=4 with the memory that it reserves without
a limit, then with shares of it, down to the first for which there is no plan. The table goes to
benchmarks/results/memory-budgets.md; rows of models that are not run again stay. A plan fits if what XLA reserves is no
more than its budget.
"""

import argparse
import dataclasses
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from verify_matrix import COMPILER_OPTIONS, CONFIGS, MODELS, OPTIONS, RESULTS, subject_of

from autoshard.cluster import Cluster
from autoshard.errors import MemoryBudgetError
from autoshard.execution.compiled_memory import CompiledMemory
from autoshard.plans.make import plan_program
from autoshard.plans.program_plan import ProgramPlan
from autoshard.verify.compile import compile_step
from autoshard.verify.devices import gpu_devices
from autoshard.verify.gpus import H100

MESH = {"data": 2, "tensor": 4}
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
HEAD = (
    "# Plans under less and less memory\n\n`python benchmarks/memory_budgets.py`: eight H100s, data=2, tensor=4, "
    "compiled ahead of time by XLA:GPU; GB of one device. Peak: the most alive at once. Reserved: all that must be "
    "there, with the gaps between buffers. Over: by how much what is compiled exceeds the budget.\n\n"
    "| model | budget | peak: predicted | compiled | ratio | reserved: predicted | compiled | ratio | over | "
    "step, ms |\n|" + "---|" * 10 + "\n"
)


def rows(name: str) -> list[str]:
    """Lines of the table for one model."""
    cluster = Cluster.from_file(CONFIGS / "clusters" / "h100x8.yaml")
    step, args, subject = subject_of(MODELS[name], cluster)
    devices = gpu_devices(H100, 8, 8)
    most_bytes, lines = None, []
    for share in SHARES:
        budget = None if most_bytes is None else share * most_bytes
        try:
            plan = plan_program(
                subject.traced,
                subject.program,
                subject.cluster,
                mesh=MESH,
                donate_argnums=(0,),
                memory_budget_bytes=budget,
                options=dataclasses.replace(OPTIONS, cache=False),
            )
        except MemoryBudgetError:
            lines.append(f"| {name} | {budget / 1e9:.2f} | no plan |" + " |" * 7)
            break
        most_bytes = most_bytes or plan.estimate.reserved_bytes
        compiled = compile_step(plan, step, args, devices, COMPILER_OPTIONS).memory
        lines.append(_line(name, share * most_bytes, plan, compiled))
        print(lines[-1], flush=True)
    return lines


def _line(name: str, budget_bytes: float, plan: ProgramPlan, compiled: CompiledMemory) -> str:
    """One row of the table."""
    pairs = (plan.estimate.peak_bytes, compiled.peak_bytes), (plan.estimate.reserved_bytes, compiled.total_bytes)
    figures = [f"{ours / 1e9:.2f} | {theirs / 1e9:.2f} | {ours / theirs:.3f}" for ours, theirs in pairs]
    figures += [f"{max(compiled.total_bytes / budget_bytes - 1, 0.0):.1%}", f"{plan.estimate.step_s * 1e3:.1f}"]
    return f"| {name} | {budget_bytes / 1e9:.2f} | {' | '.join(figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt,llama", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    chosen = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1)
    names = chosen.model.split(",")
    path = chosen.out / "memory-budgets.md"
    known = path.read_text().splitlines() if path.exists() else []
    kept = [
        line for line in known if line.startswith("| ") and line.split()[1] in MODELS and line.split()[1] not in names
    ]
    path.write_text(HEAD + "\n".join([*kept, *(line for name in names for line in rows(name))]) + "\n")


if __name__ == "__main__":
    main()

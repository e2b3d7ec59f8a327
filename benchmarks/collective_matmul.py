"""Products in pieces (collective matmul) against whole ones, as XLA:GPU schedules them.

    python benchmarks/collective_matmul.py                 # all cases
    python benchmarks/collective_matmul.py --case plan-8   # one of them

Needs the extra `verify-gpu`, no GPU. The GPT of `by_hand/gpt.py` is planned with `PlanOptions.decompose` "never" and
"faster", compiled for H100s in each way that `Plan.jit` tries, and each schedule replayed on two streams. Rates are
those of `exposed.py`. One line a program goes to benchmarks/results/collective-matmul.md.
"""

import argparse
import dataclasses
import time

import exposed
import jax
from by_hand import gpt

from autoshard import Plan, PlanOptions, baselines
from autoshard.compiler.schedule import Schedule
from autoshard.execution.candidates import compile_candidates
from autoshard.execution.jit import device_mesh
from autoshard.hlo.compiled_schedule import replay
from autoshard.hlo.module import parse
from autoshard.plans.apply import planned_function
from autoshard.plans.make import plan_program
from autoshard.verify.devices import gpu_devices
from autoshard.verify.gpus import COMPILER_OPTIONS, H100
from autoshard.verify.kept_kernels import kernels_kept


@dataclasses.dataclass(frozen=True)
class Case:
    """A program, and what is planned: any plan, or Megatron with sequence parallelism over all devices.

    `batch`: Sequences of 2,048. `num_layers`: Of width 4,096.
    """

    num_devices: int
    batch: int
    num_layers: int
    is_megatron: bool


CASES = {
    "megatron-sp-8": Case(8, 8, 2, is_megatron=True),
    "plan-8": Case(8, 2, 2, is_megatron=False),
}
RESULTS = exposed.RESULTS / "collective-matmul.md"
_HEAD = (
    "| case | decompose | mesh | products in pieces | way | step, ms | kernels | collectives | exposed | peak, GB "
    "| predicted step, ms | exposed | peak, GB | planned in, s |\n|" + " --- |" * 14
)


def rows(name: str, case: Case) -> list[str]:
    """A line for each way in which the plans of a case are compiled."""
    args = gpt.arguments(gpt.Sizes(batch=case.batch, num_layers=case.num_layers))
    cluster = exposed.cluster_of(case.num_devices)
    subject = baselines.prepare_subject(gpt.step, *args, cluster=cluster, donate_argnums=0)
    found = []
    for decompose in ("never", "faster"):
        started = time.perf_counter()
        options = PlanOptions(mesh_limit_s=30, schedule=Schedule.LATENCY_HIDING, decompose=decompose, cache=False)
        if case.is_megatron:
            strategy = baselines.Strategy(None, baselines.TensorRule.SEQUENCE)
            plan = baselines.plan_baseline(strategy, subject, mesh={"tensor": case.num_devices}, options=options)
        else:
            plan = Plan.of(plan_program(subject.traced, subject.program, cluster, donate_argnums=(0,), options=options))
        planned_s, e = time.perf_counter() - started, plan.estimate
        devices, choosing = gpu_devices(H100, case.num_devices, exposed.PER_NODE), plan.interface.choosing
        run = planned_function(plan, gpt.step, device_mesh(plan.axes, devices, plan.logical_mesh.order))
        pieces = sum(shardings.pieces is not None for _, shardings in plan.shardings)
        mesh = " x ".join(f"{axis}={size}" for axis, size in plan.axes)
        with kernels_kept("cuda") as kept:
            compiled = compile_candidates(run.compile_as(args), "cuda", choosing, {**COMPILER_OPTIONS, **kept})
        for one in compiled:
            step = replay(parse(one.text), choosing.mesh)
            times = (step.step_s, step.kernel_s, step.collective_s, step.exposed_s)
            entries = (
                *(name, decompose, mesh, pieces, one.figures.candidate.value),
                *(f"{s * 1e3:.2f}" for s in times),
                f"{one.memory.peak_bytes / 1e9:.2f}",
                *(f"{e.step_s * 1e3:.2f}", f"{(e.step_s - e.compute_s) * 1e3:.2f}", f"{e.peak_bytes / 1e9:.2f}"),
                f"{planned_s:.0f}",
            )
            found.append("| " + " | ".join(map(str, entries)) + " |")
            print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="only these")
    chosen = parser.parse_args().case or list(CASES)
    jax.config.update("jax_num_cpu_devices", 1)
    known = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    lines = {name: [line for line in known if line.startswith(f"| {name} |")] for name in CASES}
    for name in chosen:
        lines[name] = rows(name, CASES[name])
        text = "\n".join(line for own in lines.values() for line in own)
        head = f"Products in pieces against whole ones, for H100s, replayed; jax {jax.__version__}."
        RESULTS.write_text(f"{head}\n\n{_HEAD}\n{text}\n")
        jax.clear_caches()


if __name__ == "__main__":
    main()

"""Plans of programs that are not in the zoo, compiled for H100s and corrected until the compiler confirms them.

    python benchmarks/closed_loop.py                    # goes on where it stopped
    python benchmarks/closed_loop.py --only gpt8,bert
    python benchmarks/closed_loop.py --table            # only writes the table of what is there

Needs the extra `verify-gpu`, no GPU. Every program of `foreign/` is planned without a limit of memory, and with 75 % of
what that plan was predicted to reserve; the GPT of eight layers with 8 and 12.5 GB, on all meshes of sixteen GPUs. A
process for each case. One JSON line a case goes to benchmarks/results/closed-loop.jsonl as soon as it is known, the
table to closed-loop.md.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from foreign.table import PROGRAMS

import autoshard
from autoshard.errors import AutoshardError
from autoshard.plans.gaps import NEGLIGIBLE_BYTES
from autoshard.plans.options import PlanOptions
from autoshard.verify.verification import Verification
from autoshard.verify.verify import verify

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SHARE = 0.75
"""Of what the plan without a limit reserves."""
BUDGETS_GB = {"gpt8": (8.0, 12.5)}
"""Budgets of programs that have their own."""
EVERY_MESH = ("gpt8",)
"""Programs that are planned on all meshes."""
UNLIMITED = "none"


@dataclasses.dataclass(frozen=True)
class Figures:
    """A plan as it was predicted and as it was compiled; bytes of one device.

    Attributes:
      step_s: Predicted. reserved: (predicted, compiled). sent: (predicted, compiled).
      off: The largest difference of bytes over one set of mesh axes, as a share of all bytes.
    """

    step_s: float
    reserved: tuple[float, float]
    sent: tuple[float, float]
    off: float


@dataclasses.dataclass(frozen=True)
class Case:
    """A program under a budget.

    Attributes:
      budget: `none`, a share (`75%`) or gigabytes (`8GB`). budget_bytes: The same; None for none.
      mesh: That of the final plan.
      first, final: The plan before and after correction; None if there is no plan.
      is_confirmed: Whether the compiler confirms the final plan. reason: Why not, or why there is no plan.
      otherwise: What it did otherwise. forbidden: Choices that were forbidden.
      num_compilations: Plans that were compiled. gap: Of the final plan, to the bound before anything was corrected.
      seconds: What all of it took.
    """

    program: str
    budget: str
    budget_bytes: float | None = None
    mesh: str = ""
    first: Figures | None = None
    final: Figures | None = None
    is_confirmed: bool = False
    reason: str = ""
    otherwise: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    num_compilations: int = 0
    gap: float = 0.0
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        return self.program, self.budget


def read(path: pathlib.Path) -> dict[tuple[str, str], Case]:
    """The cases that are known already."""
    cases = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        fields = json.loads(line)
        for name in ("first", "final"):
            if fields[name] is not None:
                own = {k: tuple(v) if isinstance(v, list) else v for k, v in fields[name].items()}
                fields[name] = Figures(**own)
        case = Case(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
        cases[case.key] = case
    return cases


def figures(plan, found: Verification) -> Figures:
    """What is predicted and what is compiled of a plan."""
    most = max(found.predicted_bytes, found.compiled_bytes)
    off = 0.0
    for axes in {f.axes for f in found.flows}:
        own = [f for f in found.flows if f.axes == axes]
        off = max(off, abs(sum(f.predicted_bytes - f.compiled_bytes for f in own)) / most)
    return Figures(
        plan.estimate.step_s,
        (plan.estimate.reserved_bytes or plan.estimate.peak_bytes, found.reserved_bytes),
        (found.predicted_bytes, found.compiled_bytes),
        off,
    )


def measured(name: str, budget: str, budget_bytes: float | None, time_limit_s: float) -> Case:
    """Plans a program with and without the compiler in the loop."""
    program, started = PROGRAMS[name], time.perf_counter()
    subject = program.make()
    num_devices = math.prod(size for _, size in program.mesh)
    make = lambda options: autoshard.plan(
        subject.step,
        subject.state,
        subject.batch,
        cluster=ROOT / "configs" / "clusters" / f"h100x{num_devices}.yaml",
        mesh=None if name in EVERY_MESH else dict(program.mesh),
        donate_argnums=0,
        memory_budget_bytes=math.inf if budget_bytes is None else budget_bytes,
        options=options,
    )
    options = PlanOptions(mesh_limit_s=time_limit_s, least_memory_s=0.0)
    try:
        first = make(options)
        found = verify(first, subject.step, subject.state, subject.batch)
        before, mesh = figures(first, found), _axes_text(first)
        fits = budget_bytes is None or found.reserved_bytes <= budget_bytes + NEGLIGIBLE_BYTES
        if fits and not found.traffic_disagreements:  # then the loop ends with its first plan
            seconds = round(time.perf_counter() - started, 1)
            gap = first.certificate.gap
            return Case(
                name, budget, budget_bytes, mesh, before, before, True, num_compilations=1, gap=gap, seconds=seconds
            )
        plan = make(dataclasses.replace(options, compile_check=True))
        after = figures(plan, verify(plan, subject.step, subject.state, subject.batch))
    except (AutoshardError, jax.errors.JaxRuntimeError) as error:
        return Case(name, budget, budget_bytes, reason=" ".join(str(error).split())[:300])
    told = plan.confirmation
    return Case(
        name,
        budget,
        budget_bytes,
        _axes_text(plan),
        before,
        after,
        told.is_confirmed,
        told.reason,
        tuple(map(str, told.otherwise)),
        told.forbidden,
        told.num_compilations,
        plan.certificate.gap,
        round(time.perf_counter() - started, 1),
    )


def _axes_text(plan) -> str:
    return ",".join(f"{axis}={size}" for axis, size in plan.axes)


def budgets(name: str, known: dict[tuple[str, str], Case]):
    """(name, bytes) of the budgets of a program that limit it."""
    if name in BUDGETS_GB:
        yield from ((f"{size:g}GB", size * 1e9) for size in BUDGETS_GB[name])
        return
    unlimited = known.get((name, UNLIMITED))
    if unlimited is not None and unlimited.first is not None:
        yield f"{SHARE:.0%}", SHARE * unlimited.first.reserved[0]


def table(cases: list[Case]) -> str:
    """What the cases say, as Markdown."""
    done = [c for c in cases if c.final is not None]
    confirmed = [c for c in done if c.is_confirmed]
    corrected = [c for c in confirmed if c.num_compilations > 1]
    lines = [
        f"{len({c.program for c in done})} programs, {len(done)} cases with a plan: {len(confirmed)} confirmed, "
        f"{len(corrected)} of them after a correction; {len(done) - len(confirmed)} not confirmed, and the plan says "
        "why.",
        "",
        "Confirmed: over every set of mesh axes the bytes sent differ by no more than 5 % of all bytes, and what XLA "
        "reserves is within the budget. Off: the largest such difference. Step: predicted, of the first and of the "
        "final plan. Gap: what a better plan could still gain, by the bound before anything was corrected.",
        "",
        "| program | mesh | budget, GB | first: reserved, GB | compiled | off | plans compiled | final: reserved, GB | "
        "compiled | off | confirmed | step, ms | final | gap |",
        "|" + " --- |" * 14,
    ]
    for c in done:
        budget = f"{c.budget_bytes / 1e9:.2f}" if c.budget_bytes else "-"
        sides = [f"{x.reserved[0] / 1e9:.2f} | {x.reserved[1] / 1e9:.2f} | {x.off:.1%}" for x in (c.first, c.final)]
        answer = "yes" if c.is_confirmed else "no"
        steps = f"{c.first.step_s * 1e3:.2f} | {c.final.step_s * 1e3:.2f} | {c.gap:.2%}"
        cells = c.program, c.mesh, budget, sides[0], c.num_compilations, sides[1], answer, steps
        lines.append(f"| {' | '.join(map(str, cells))} |")
    notes = [c for c in done if c.forbidden or not c.is_confirmed]
    if notes:
        lines += ["", "What was corrected, and what the compiler did otherwise:", ""]
        for c in notes:
            said = [c.reason, *c.otherwise] if not c.is_confirmed else []
            said += [f"forbidden: {'; '.join(c.forbidden)}"] if c.forbidden else []
            lines.append(f"- {c.program}, {c.budget}: {'. '.join(filter(None, said))}")
    if len(done) < len(cases):
        lines += ["", "Without a plan:", "", *(f"- {c.program}, {c.budget}: {c.reason}" for c in cases if not c.final)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="only these programs, with commas between them")
    parser.add_argument("--unlimited", action="store_true", help="only without a limit of memory")
    parser.add_argument("--table", action="store_true", help="compile nothing; write the table of what is known")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of each solve")
    parser.add_argument("--case", nargs=2, metavar=("PROGRAM", "BUDGET"), help="one case, printed as JSON")
    parser.add_argument("--budget-bytes", type=float, help="of --case")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    chosen = parser.parse_args()
    if chosen.case:
        print(json.dumps(dataclasses.asdict(measured(*chosen.case, chosen.budget_bytes, chosen.time_limit))))
        return
    lines = chosen.out / "closed-loop.jsonl"
    known = read(lines)
    names = [] if chosen.table else (chosen.only.split(",") if chosen.only else PROGRAMS)
    unlimited = ((name, UNLIMITED, None) for name in names)
    limited = ((name, *budget) for name in names for budget in budgets(name, known))
    for name, budget, budget_bytes in itertools.chain(unlimited, () if chosen.unlimited else limited):
        if (name, budget) in known:
            continue
        limit = [] if budget_bytes is None else ["--budget-bytes", str(budget_bytes)]
        command = [sys.executable, __file__, "--case", name, budget, *limit, "--time-limit", str(chosen.time_limit)]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if run.returncode:
            print(f"{name} {budget}: the process ended with {run.returncode}", flush=True)
            continue
        with lines.open("a") as file:
            file.write(run.stdout.strip().rpartition("\n")[2] + "\n")
        known.update(read(lines))
        case = known[name, budget]
        print(f"{name:18s} {budget:6s} {case.num_compilations} plans, {case.seconds} s: ", end="")
        print("confirmed" if case.is_confirmed else case.reason, flush=True)
    places = list(PROGRAMS)
    ordered = sorted(known.values(), key=lambda c: (places.index(c.program), c.budget_bytes or math.inf))
    head = (
        "# The compiler in the loop\n\n`python benchmarks/closed_loop.py`: H100s, compiled ahead of time by XLA:GPU; "
        f"jax {jax.__version__}, {datetime.date.today().isoformat()}."
    )
    (chosen.out / "closed-loop.md").write_text(head + "\n\n" + table(ordered))


if __name__ == "__main__":
    main()

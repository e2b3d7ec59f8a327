"""Every law of the compiler on trial: what does a prediction lose, or a compiled program, without it?

    python benchmarks/laws.py                                   # goes on where it stopped
    python benchmarks/laws.py --share 0/2 & python benchmarks/laws.py --share 1/2   # on two CPUs
    python benchmarks/laws.py --program gpt,click_model --law "fusion: tanh" --again
    python benchmarks/laws.py --together                        # afterwards: all at once that no case misses alone
    python benchmarks/laws.py --recorded                        # on what `verify_matrix.py` compiled for four meshes
    python benchmarks/laws.py --table                           # only writes the table of what is there

Needs the extra `verify-gpu`, no GPU. A case is a program under a plan or a strategy and one of XLA:GPU's two schedules:
the zoo's models of `verify_matrix.py` and the programs of `foreign/`, which no law was fitted to. Each is planned and
compiled once with all laws. Then each law is switched off alone, by putting what says nothing in its place:

- one that only predicts is judged by the same layouts, estimated without it, beside the program that is compiled;
- one that orders or keeps something is judged by the program that is compiled without it, beside the same prediction.

What a plan would become without the law is not asked. One JSON line each goes to benchmarks/results/laws.jsonl (2 MB,
not kept) as soon as it is known, the table to laws.md; with --recorded to laws-recorded.jsonl and .md. A law may go if
without it no peak that was within 10 % of the compiled one and not more than 3 % under leaves that range, no traffic
that was within 5 % leaves that, and no step as scheduled takes more than 1 % longer.
"""

import argparse
import collections
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from foreign.table import PROGRAMS, Program
from verify_matrix import (
    BUDGET_BYTES,
    CONFIGS,
    MESHES,
    MODELS,
    PER_NODE,
    PLAN,
    RESULTS,
    Cell,
    Model,
    deviation,
    subject_of,
)
from verify_matrix import read as read_matrix

from autoshard.cluster import Cluster
from autoshard.compiler.dimension_orders import OrderCopies
from autoshard.compiler.emitted_collectives import _Merged
from autoshard.compiler.list_scheduler import FreeingFirst
from autoshard.compiler.schedule import Schedule
from autoshard.errors import AutoshardError
from autoshard.hlo.collectives import compiled_collectives
from autoshard.hlo.compiled_schedule import replay
from autoshard.hlo.module import parse
from autoshard.planner.build import Formulation
from autoshard.planner.decode import evaluate
from autoshard.planner.program import prepare
from autoshard.plans.make import best_of, plan_of_choices, pose
from autoshard.plans.options import PlanOptions
from autoshard.plans.program_plan import ProgramPlan
from autoshard.strategies.make import restriction
from autoshard.strategies.strategies import ALL
from autoshard.verify.compile import compile_step
from autoshard.verify.devices import gpu_devices
from autoshard.verify.gpus import COMPILER_OPTIONS, H100

TOGETHER = "together: all that only predict and that are not missed alone"
MESH = "2x4"
SLOW = frozenset({"moe", "unet"})
"""Compile for minutes: with one strategy alone."""


@dataclasses.dataclass(frozen=True)
class Law:
    """Something that `autoshard/compiler/` says of XLA.

    Attributes:
      name: Its file there, and what it says in a word.
      off: What to put in which place so that nothing is said.
      orders: Whether it changes the program that is compiled, and not only what is predicted of it.
    """

    name: str
    off: Mapping[str, Any]
    orders: bool = False

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        """While the law does not hold."""
        with contextlib.ExitStack() as stack:
            for place, instead in self.off.items():
                stack.enter_context(mock.patch(f"autoshard.{place}", instead))
            yield


class _NoPrefetches:
    """What `Prefetches` is of a program without gathered copies."""

    def __init__(self, *_: Any):
        self.held, self.moved = {}, {}


def _itself(value: Any) -> Any:
    """A function that returns `value` whatever it is asked."""
    return lambda *_, **__: value


def _fresh(kind: type) -> Any:
    """A function that returns a new, empty collection whatever it is asked."""
    return lambda *_, **__: kind()


def _never(amount: Any) -> Any:
    """`is_reduced_alone`, of nothing."""
    return np.zeros_like(amount, bool) if isinstance(amount, np.ndarray) else False


LAWS = (
    Law("aliasing: sums in a product's buffer", {"compiler.live_ranges.sums_in_place": _fresh(dict)}),
    Law("aliasing: scattered into what it is added to", {"compiler.live_ranges.scattered_into": _fresh(dict)}),
    Law("fusion: tanh is costly", {"compiler.fusion.COSTLY_BYTES": {}}),
    Law("fusion: a kernel for each order of dimensions", {"compiler.fusion.read_orders": _fresh(dict)}),
    Law("fusion: added reductions are one kernel", {"compiler.fusion._summed": _fresh(list)}),
    Law("fusion: barriers of checkpoints", {"compiler.fusion._held_by_barriers": _itself(frozenset())}),
    Law("fusion: looked-up rows", {"compiler.fusion._fusible": lambda graph, pointwise: [bool(p) for p in pointwise]}),
    Law("multi_output_fusion: made together", {"compiler.live_ranges.made_together": _fresh(dict)}),
    Law("multi_output_fusion: delayed products", {"compiler.live_ranges.delayed_products": _fresh(dict)}),
    Law("constant_fills: when zeros are filled", {"compiler.live_ranges.constant_fills": _fresh(dict)}),
    Law(
        "dimension_orders: copies in other orders",
        {"compiler.live_ranges.copies_in_other_orders": _itself(OrderCopies({}, ()))},
    ),
    Law("memory_orders: what is turned around", {"compiler.fusion.turned_values": _fresh(dict)}),
    Law("list_scheduler: freeing first", {"compiler.live_ranges.freeing_first": _itself(FreeingFirst({}, {}))}),
    Law("softmax: stored exponentials", {"compiler.backends.stored_exponentials": _itself(())}),
    Law("normalized_rows: kept for their scales", {"compiler.backends.normalized_rows": _itself(())}),
    Law("workspaces: of products", {"compiler.backends.product_workspaces": _itself(())}),
    Law(
        "collective_combiner: large sums are reduced alone",
        {f"compiler.{room}.is_reduced_alone": _never for room in ("operand_copies", "partial_sums")},
    ),
    Law(
        "collective_combiner: statistics share latencies",
        {"compiler.collective_combiner._awaited_shares": _fresh(dict)},
    ),
    Law("reduce_scatter_combiner: sums wait for each other", {"compiler.partial_sums.combined_until": _fresh(dict)}),
    Law("early_products: sums that are waited for", {"compiler.analysis.awaited_sums": _fresh(dict)}),
    Law("live_buffers: slices outlive the whole", {"compiler.live_buffers._Shortening._shorten": _itself(None)}),
    Law("made_first: what others wait for", {"compiler.backends.made_first": _fresh(dict)}),
    Law("live_buffers: long reductions are apart", {"compiler.live_buffers._Shortening._is_apart": _itself(False)}),
    Law("operand_copies: tables whose ids are there", {"compiler.operand_copies._there_at_once": _itself(frozenset())}),
    Law(
        "hiding_spans: copies behind the product before",
        {"compiler.hiding_spans.HidingSpans.gathered_from": lambda self, reader, *_: reader},
    ),
    Law(
        "hiding_spans: sums behind the products after",
        {"compiler.hiding_spans.HidingSpans.reduced_until": _itself(None)},
    ),
    Law("put_off: what is computed again", {"compiler.live_ranges.put_off": _fresh(dict)}),
    Law("read_in_turn: added reductions are apart", {"compiler.analysis.summed_in_turn": _itself(frozenset())}),
    Law("queued_gathers", {"compiler.backends.queued": lambda solved, uses, spans, times: spans}),
    Law("scanned_inputs", {"planner.build.given_bytes": _itself(None)}),
    Law("widened", {"compiler.backends.widened": _itself(frozenset())}),
    Law("kept_arguments", {"compiler.backends.keeping_arguments": _itself(frozenset())}),
    Law(
        "buffer_assignment: buffers in outputs",
        {"compiler.buffer_assignment.in_rooms": lambda starts, *_: np.zeros(len(starts), bool)},
    ),
    Law(
        "emitted_collectives: gathered last",
        {"compiler.emitted_collectives._gathered_last": _itself(_Merged(frozenset(), frozenset()))},
    ),
    Law("emitted_collectives: added first", {"compiler.emitted_collectives._added_first": _itself((frozenset(), {}))}),
    Law(
        "emitted_collectives: sliced at once",
        {"compiler.emitted_collectives._sliced_at_once": lambda c, value, steps, readers: steps},
    ),
    Law(
        "emitted_collectives: accumulated in loops",
        {"compiler.emitted_collectives._Loops.trips": lambda self, group, steps: group.trips},
    ),
    Law(
        "collective_dtypes: moved before it is widened",
        {"compiler.analysis.moved_itemsizes": lambda graph: tuple(v.itemsize_bytes for v in graph.values)},
    ),
    Law("constant_fills: late fills", {"compiler.live_ranges.late_fills": _fresh(dict)}, orders=True),
    Law("tied_copies", {"planner.decode.tied_copies": _fresh(list)}, orders=True),
    Law("materialized", {"compiler.ordering.materialized": _fresh(dict)}, orders=True),
    Law("row_major", {"compiler.ordering.row_major": _fresh(dict)}, orders=True),
    Law("transposed_products", {"compiler.ordering.transposed_at_once": _itself(frozenset())}, orders=True),
    Law("smaller_first", {"compiler.ordering.smaller_first": _fresh(dict)}, orders=True),
    Law("prefetches", {"compiler.ordering.Prefetches": _NoPrefetches}, orders=True),
    Law("read_in_turn: operands", {"compiler.read_in_turn.Turns.operands": _fresh(dict)}, orders=True),
    Law("read_in_turn: sums", {"compiler.read_in_turn.Turns.sums": _fresh(list)}, orders=True),
    Law("read_in_turn: reduced alone", {"compiler.read_in_turn.Turns.reduced": _fresh(list)}, orders=True),
    Law("reused_operands", {"compiler.ordering.used_up_first": lambda *_: collections.defaultdict(list)}, orders=True),
    Law("early_products: products first", {"compiler.ordering.products_first": _fresh(dict)}, orders=True),
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One case with one law switched off, or with none ("").

    Attributes:
      reason: Why there is no figure.
      changes: Whether the law changes anything in this case.
      sent, peak, reserved: Bytes as predicted. compiled_sent, compiled_peak, compiled_total: As compiled.
      step_s: Of the compiled schedule, replayed.
    """

    program: str
    strategy: str
    schedule: str
    mesh: str = MESH
    law: str = ""
    reason: str = ""
    changes: bool = False
    sent_bytes: float = 0.0
    peak_bytes: float = 0.0
    reserved_bytes: float = 0.0
    compiled_sent_bytes: float = 0.0
    compiled_peak_bytes: float = 0.0
    compiled_total_bytes: float = 0.0
    step_s: float = 0.0
    seconds: float = 0.0

    @property
    def case(self) -> tuple[str, ...]:
        return self.program, self.strategy, self.schedule, self.mesh

    @property
    def key(self) -> tuple[str, ...]:
        return *self.case, self.law


def recorded_cases(matrix: Iterable[Cell]) -> list[tuple[str, ...]]:
    """Those of the matrix that were compiled."""
    return [(c.model, c.strategy, Schedule.LEAST_MEMORY.value, c.mesh) for c in matrix if not c.reason]


def cases() -> list[tuple[str, ...]]:
    """Programs, how they are split, and what the compiler is asked for; what tells most comes first."""
    hiding, least = Schedule.LATENCY_HIDING.value, Schedule.LEAST_MEMORY.value
    quick = [name for name in MODELS if name not in SLOW]
    chosen = [
        *((name, PLAN, hiding) for name in PROGRAMS),
        *((name, PLAN, hiding) for name in quick),
        *((name, "zero3", hiding) for name in quick),
        *((name, PLAN, least) for name in quick),
        *((name, PLAN, least) for name in PROGRAMS),
        *((name, "megatron", hiding) for name in quick),
        ("moe", "megatron", hiding),
        ("unet", PLAN, hiding),
    ]
    return [(*case, MESH) for case in chosen]


class Case:
    """A program that is planned and compiled with all laws."""

    def __init__(self, key: tuple[str, ...]):
        name, strategy_name, schedule, mesh = key
        model: Model | Program = PROGRAMS[name] if name in PROGRAMS else MODELS[name]
        self.axes = dict(model.mesh if isinstance(model, Program) else MESHES[mesh])
        self.num_devices = int(np.prod(list(self.axes.values())))
        cluster = Cluster.from_file(CONFIGS / "clusters" / f"h100x{self.num_devices}.yaml")
        self.step, self.args, self.subject = subject_of(model, cluster)
        restrict = None
        if strategy_name != PLAN:
            strategy = next(s for s in ALL if s.name == strategy_name)
            restrict = restriction(strategy, self.subject, tuple(self.axes), "tensor")
        self.posed = pose(
            self.subject.traced,
            self.subject.program,
            self.subject.cluster,
            mesh=self.axes,
            donate_argnums=(0,),
            memory_budget_bytes=BUDGET_BYTES,
            options=PlanOptions(mesh_limit_s=20, cache=True, schedule=Schedule(schedule)),
            restrict=restrict,
        )
        self.formulation, self.solution = best_of(self.posed).winner

    def plan(self, formulation: Formulation) -> ProgramPlan:
        """What is executed, under the laws that hold now."""
        return plan_of_choices(
            self.subject.traced,
            formulation,
            self.solution.chosen,
            origin=self.posed.origin,
            certificate=self.solution.certificate,
        )

    def again(self) -> Formulation:
        """The problem under the laws that hold now; its choices have the same numbers.

        Raises:
          ValueError: They do not.
        """
        question = dataclasses.replace(
            self.posed.question, program=prepare(self.subject.traced.graph), schedule=self.formulation.schedule
        )
        found = question.formulation(self.formulation.mesh, weights=self.formulation.overlap.weights)
        alike = lambda f: ([d.rows for d in f.decisions], [(t.reads, t.writes) for t in f.tables], f.argument_layouts)
        if alike(found) != alike(self.formulation):
            raise ValueError("other choices without the law")
        return found

    def compiled(self, plan: ProgramPlan) -> dict[str, float]:
        """Figures of the program that is compiled."""
        devices = gpu_devices(H100, self.num_devices, min(PER_NODE, self.num_devices))
        found = compile_step(plan, self.step, self.args, devices, COMPILER_OPTIONS)
        module = parse(found.text)
        return {
            "compiled_sent_bytes": sum(c.wire_bytes for c in compiled_collectives(module, plan.axes)),
            "compiled_peak_bytes": found.memory.peak_bytes,
            "compiled_total_bytes": found.memory.total_bytes,
            "step_s": replay(module, self.formulation.mesh).step_s,
        }

    def predicted(self, formulation: Formulation) -> dict[str, float]:
        """Figures of the estimate."""
        figures = evaluate(formulation, self.solution.chosen).estimate
        return {
            "sent_bytes": sum(c.wire_bytes for c in figures.communication),
            "peak_bytes": figures.peak_bytes,
            "reserved_bytes": figures.reserved_bytes or 0.0,
        }


def _recorded(cell: Cell | None, predicted: Mapping[str, float]) -> dict[str, float]:
    """What was compiled of this cell of the matrix; nothing if another plan was compiled."""
    if cell is None or cell.reason or abs(deviation(predicted["peak_bytes"], cell.predicted_peak_bytes)) > 1e-6:
        return {}
    if abs(deviation(predicted["sent_bytes"], cell.predicted_bytes)) > 1e-6:
        return {}
    return {
        "compiled_sent_bytes": cell.compiled_bytes,
        "compiled_peak_bytes": cell.compiled_peak_bytes,
        "compiled_total_bytes": cell.compiled_total_bytes,
    }


def tried(
    key: tuple[str, ...], laws: Sequence[Law], known: Mapping[tuple[str, ...], Trial], cell: Cell | None
) -> Iterator[Trial]:
    """The trials of one case that are not known. What is recorded of it is not compiled again."""
    base = known.get((*key, ""))
    left = [law for law in laws if (*key, law.name) not in known]
    if (base is not None and base.reason) or (base is not None and not left):
        return
    started = time.perf_counter()
    passed = lambda: round(time.perf_counter() - started, 1)
    try:
        case = Case(key)
        plan = case.plan(case.formulation)
        if base is None:
            predicted = case.predicted(case.formulation)
            figures = predicted | (_recorded(cell, predicted) or case.compiled(plan))
            base = dataclasses.replace(Trial(*key, changes=True, seconds=passed()), **figures)
            yield base
    except (AutoshardError, jax.errors.JaxRuntimeError) as error:
        yield Trial(*key, reason=" ".join(str(error).split())[:200], seconds=passed())
        return
    for law in left:
        started = time.perf_counter()
        one = dataclasses.replace(base, law=law.name)
        try:
            with law.switched_off():
                if law.orders:
                    without = case.plan(case.again())
                    changes = without.shardings != plan.shardings
                    figures = case.compiled(without) if changes else {}
                else:
                    figures = case.predicted(case.again())
                    changes = any(abs(x / max(getattr(base, f), 1) - 1) > 1e-6 for f, x in figures.items() if x)
            yield dataclasses.replace(one, changes=changes, seconds=passed(), **figures)
        except (AutoshardError, jax.errors.JaxRuntimeError, ValueError) as error:
            yield dataclasses.replace(one, reason=" ".join(str(error).split())[:200], seconds=passed())


# ---- the table


def off_by(trial: Trial) -> float:
    """How far the predicted peak is above the compiled one, as a share of the latter."""
    return deviation(trial.peak_bytes, trial.compiled_peak_bytes)


def sent_off_by(trial: Trial) -> float:
    """How far the predicted traffic is off, as a share of what is compiled."""
    return abs(deviation(trial.sent_bytes, trial.compiled_sent_bytes))


def is_held(trial: Trial) -> bool:
    """Whether the peak is within 10 % of the compiled one, and not more than 3 % under."""
    return -0.03 <= off_by(trial) <= 0.1


def is_peak_lost(trial: Trial, base: Trial) -> bool:
    """Whether a peak that holds with the law, as in `base`, does not without."""
    return is_held(base) and not is_held(trial)


def is_traffic_lost(trial: Trial, base: Trial) -> bool:
    """Whether traffic that is within 5 % with the law, as in `base`, is not without."""
    return sent_off_by(base) <= 0.05 < sent_off_by(trial)


def is_missed(trial: Trial, base: Trial) -> bool:
    """Whether something that was right with the law, as in `base`, is so no longer, or the step takes longer."""
    is_slower = trial.step_s > 1.01 * base.step_s > 0
    return bool(trial.reason) or is_peak_lost(trial, base) or is_traffic_lost(trial, base) or is_slower


def together(trials: Sequence[Trial]) -> Law:
    """All laws that only predict and that no case misses alone, as one."""
    bases = {t.case: t for t in trials if not t.law and not t.reason}
    missed = {t.law for t in trials if t.case in bases and is_missed(t, bases[t.case])}
    idle = [law for law in LAWS if not law.orders and law.name not in missed]
    return Law(TOGETHER, {place: instead for law in idle for place, instead in law.off.items()})


def table(trials: Sequence[Trial]) -> str:
    """One line for each law."""
    bases = {t.case: t for t in trials if not t.law and not t.reason}
    of_law = collections.defaultdict(list)
    for t in trials:
        if t.law and t.case in bases:
            of_law[t.law].append(t)
    lines = [
        f"{len(bases)} cases compiled. With all laws:",
        "",
        "| programs | number | peak within 10 % | more than 3 % under | range | median deviation | traffic within "
        "5 % | sent at least, of what is predicted |",
        "|" + " --- |" * 8,
        *(_held_by(*kind, own) for kind, own in sorted(_kinds(bases.values()).items())),
        "",
        "| law | cases that it changes | peak there, with | without | median deviation, with | without | peaks lost | "
        "traffic lost | step without, over with: mean, most | verdict |",
        "|" + " --- |" * 10,
    ]
    for law in (*LAWS, Law(TOGETHER, {})):
        own = [t for t in of_law[law.name] if not t.reason and t.changes]
        others = [t for t in of_law[law.name] if t.reason]
        if not of_law[law.name]:
            continue
        with_it = [bases[t.case] for t in own]
        lost = [t for t in own if is_peak_lost(t, bases[t.case])]
        unsent = [t for t in own if is_traffic_lost(t, bases[t.case])]
        steps = [t.step_s / bases[t.case].step_s for t in own if bases[t.case].step_s]
        verdict = "stays" if others or any(is_missed(t, bases[t.case]) for t in own) else "goes"
        span = lambda ts: f"{100 * min(map(off_by, ts)):+.1f} to {100 * max(map(off_by, ts)):+.1f} %" if ts else "-"
        median = lambda ts: f"{100 * statistics.median(abs(off_by(t)) for t in ts):.2f} %" if ts else "-"
        pace = f"{statistics.geometric_mean(steps):.3f}, {max(steps):.3f}" if law.orders and steps else "-"
        not_told = f" ({len(others)} with other choices)" if others else ""
        cells = [law.name, f"{len(own)} of {len(of_law[law.name])}{not_told}", span(with_it), span(own)]
        cells += [median(with_it), median(own), str(len(lost)), str(len(unsent)), pace, verdict]
        lines.append("| " + " | ".join(cells) + " |")
    failed = [t for t in trials if not t.law and t.reason]
    if failed:
        lines += ["", "Without a program:", "", *(f"- {' '.join(t.case)}: {t.reason}" for t in failed)]
    return "\n".join(lines) + "\n"


def _kinds(bases: Iterable[Trial]) -> dict[tuple[str, str], list[Trial]]:
    """By schedule, and by where a program is from and how it is split."""
    found = collections.defaultdict(list)
    for t in bases:
        whose = "other programs" if t.program in PROGRAMS else "zoo"
        found[t.schedule, f"{whose}, {'plans' if t.strategy == PLAN else 'strategies'}"].append(t)
    return found


def _held_by(schedule: str, what: str, own: Sequence[Trial]) -> str:
    """How well the predictions of these cases hold, as a row."""
    errors = [off_by(t) for t in own]
    sent = [t.compiled_sent_bytes / t.sent_bytes for t in own if t.sent_bytes]
    near, under = sum(abs(e) <= 0.1 for e in errors), sum(e < -0.03 for e in errors)
    cells = [f"{what}, {schedule}", str(len(own)), str(near), str(under)]
    cells += [f"{100 * min(errors):+.1f} to {100 * max(errors):+.1f} %"]
    cells += [f"{100 * statistics.median(map(abs, errors)):.1f} %", str(sum(sent_off_by(t) <= 0.05 for t in own))]
    return "| " + " | ".join([*cells, f"{100 * min(sent):.0f} %"]) + " |"


def read(path: pathlib.Path) -> dict[tuple[str, ...], Trial]:
    """The trials that are known already."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {trial.key: trial for trial in (Trial(**json.loads(line)) for line in lines)}


def _told(trial: Trial) -> str:
    """One line on the terminal."""
    head = f"{' '.join(trial.case):44s} {trial.law or 'all laws':52s}"
    if trial.reason:
        return f"{head} {trial.reason[:100]}"
    if not trial.changes:
        return f"{head} changes nothing   {trial.seconds} s"
    return f"{head} peak {100 * off_by(trial):+6.1f} %   step {trial.step_s * 1e3:8.2f} ms   {trial.seconds} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help="only these, with commas between them")
    parser.add_argument("--law", help="only those whose names begin so, with commas between them")
    parser.add_argument("--recorded", action="store_true", help="on the cells of the matrix, by what is recorded there")
    parser.add_argument("--together", action="store_true", help="all that are not missed alone, switched off at once")
    parser.add_argument("--share", default="0/1", help="K/N: every N-th case, from the K-th on")
    parser.add_argument("--again", action="store_true", help="also what is known")
    parser.add_argument("--table", action="store_true", help="compile nothing; write the table of what is known")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    chosen = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1)
    name = "laws-recorded" if chosen.recorded else "laws"
    chosen.out.mkdir(parents=True, exist_ok=True)
    lines = chosen.out / f"{name}.jsonl"
    known = read(lines)
    matrix = read_matrix(RESULTS / "verify-matrix.jsonl").values() if chosen.recorded else ()
    cells = dict(zip(recorded_cases(matrix), (c for c in matrix if not c.reason), strict=True))
    share, shares = map(int, chosen.share.split("/"))
    laws = [law for law in LAWS if law.name.startswith(tuple((chosen.law or "").split(",")))]
    if chosen.together:
        laws = [together(list(known.values()))]
    for key in [] if chosen.table else (list(cells) or cases())[share::shares]:
        if chosen.program and key[0] not in chosen.program.split(","):
            continue
        for trial in tried(key, laws, {} if chosen.again else known, cells.get(key)):
            known[trial.key] = trial
            with lines.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(trial)) + "\n")
            print(_told(trial), flush=True)
        jax.clear_caches()
    head = f"Laws of XLA:GPU switched off one by one; jax {jax.__version__}, {datetime.date.today().isoformat()}."
    (chosen.out / f"{name}.md").write_text(head + "\n\n" + table(list(read(lines).values())))


if __name__ == "__main__":
    main()

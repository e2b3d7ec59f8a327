"""Plans that the compiler confirms: plan, compile, compare; what differs is corrected in the problem, which is solved
again.

Predictions of memory and of collectives follow laws of XLA that need not hold for every program. Compiling tells:

    the program reserves more than the budget      the budget is lowered by the excess
    collectives are compiled otherwise             the choices that they belong to are forbidden

A program that is to hide collectives is scheduled in several ways, of which the fastest that fits is taken; it exceeds
the budget only if every way does. Where only far slower ways fit than one that does not, the budget is lowered by the
excess of that one, too: of the plans that are confirmed, the one whose program is fastest by replay is taken.

Both hold for the mesh of the plan that was compiled; plans on other meshes stay as they are, until one of them is the
best. The bound in the certificate stays that of the problem as it was, before anything was forbidden or lowered: no
plan whose prediction fits costs less, confirmed or not.
"""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from autoshard.cluster import LogicalMesh
from autoshard.compiler.candidates import Candidate
from autoshard.errors import MissingExtraError, VerificationError
from autoshard.graph.groups import Group
from autoshard.graph.layout import spec_entries
from autoshard.interrupts import stop_on_signals
from autoshard.planner.allowed import Restrictions
from autoshard.planner.build import Formulation
from autoshard.planner.choices import Choice
from autoshard.planner.program import Program
from autoshard.plans.as_scheduled import as_scheduled
from autoshard.plans.confirmation import CompiledOtherwise, Confirmation
from autoshard.plans.found import Found
from autoshard.plans.gaps import NEGLIGIBLE_BYTES
from autoshard.plans.make import Posed, best_of, plan_found
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.question import Axes, Question, Restrict, axes_of, report
from autoshard.plans.search import search
from autoshard.plans.text import layout_text
from autoshard.printing import amount
from autoshard.solver.options import ROUNDING
from autoshard.solver.problem import Certificate
from autoshard.verify.devices import platform_of
from autoshard.verify.figures import ScheduleFigures
from autoshard.verify.targets import target_of
from autoshard.verify.verification import NEGLIGIBLE, Stray, Verification
from autoshard.verify.verify import verify

FAR_FASTER = 0.1
"""By which share of its step a schedule is faster that makes it worth another plan, of less memory."""

Forbidden = Mapping[tuple[Axes, int, Choice], str]
"""The choices of groups, by mesh and index, that may not be taken, and what they are, for people."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Compiled:
    """A plan, what it was found as, and what the compiler made of it.

    Attributes:
      question: Under which it was found. forbidden: What was forbidden then.
      excess_bytes: By how much it exceeds the user's budget; 0.0 if it fits.
      faster_bytes: By how much a far faster way to schedule it does that was left for one that fits; 0.0 for none.
    """

    plan: ProgramPlan
    found: Found
    verification: Verification
    question: Question
    forbidden: Forbidden
    excess_bytes: float
    faster_bytes: float

    @property
    def is_confirmed(self) -> bool:
        return not self.excess_bytes and not self.verification.traffic_disagreements

    @property
    def rank(self) -> tuple:
        """Those that fit come first, then those that send what was predicted, then the fastest."""
        off_bytes = sum(abs(ours - theirs) for _, ours, theirs in self.verification.traffic_disagreements)
        compiled = self.verification.schedule.compiled
        return self.excess_bytes, off_bytes, self.found.cost_s if compiled is None else compiled.step_s


def plan_confirmed(posed: Posed, fn: Callable[..., Any], args: Sequence[Any]) -> ProgramPlan:
    """The best plan that the compiler of the plan's own devices confirms, or the one that comes nearest.

    It is compiled up to `PlanOptions.compile_check_rounds` times; Ctrl-C ends this with the best plan so far.

    Args:
      posed: What is to be planned. fn, args: The function and its arguments, by shape.

    Raises:
      As `autoshard.plan`. That a compiler is not installed is no error: `ProgramPlan.confirmation` says so.
    """
    question = posed.question
    options, restrict = question.options, question.restrict
    found = first = best_of(posed)
    forbidden: Forbidden = {}
    tried: list[_Compiled] = []
    stopped = ""
    for n in range(1, options.compile_check_rounds + 1):
        plan = plan_found(posed, found)
        report(options, question.started, f"compile {n}", f"for {plan.device}, ahead of time")
        try:
            verification = verify(plan, fn, *args, candidates=tuple(Candidate))
        except KeyboardInterrupt:
            stopped = "stopped while compiling"
        except (MissingExtraError, VerificationError) as error:
            stopped = str(error)
        if stopped:
            break
        excess_bytes = _excess_bytes(posed.question, verification)
        faster_bytes = 0.0 if excess_bytes else excess_of_faster(posed.question.budget_bytes, verification.schedule)
        now = _Compiled(plan, found, verification, question, forbidden, excess_bytes, faster_bytes)
        tried.append(now)
        if now.is_confirmed and not faster_bytes:
            break
        said = _reason(now, posed.question) or f"a far faster schedule takes {amount(faster_bytes)} more than allowed"
        report(options, question.started, f"compile {n}", f"not confirmed: {said}")
        if n == options.compile_check_rounds:
            break
        forbidden, excess_bytes = {**forbidden, **_to_forbid(now)}, excess_bytes or faster_bytes
        question = _with_excess(question, plan, excess_bytes)
        if not excess_bytes and len(forbidden) == len(now.forbidden):
            stopped = "the choice that was compiled otherwise is not known, or is the only one"
            break
        question = dataclasses.replace(question, restrict=_without(restrict, forbidden), start=None)
        found = _found_again(posed, question)
        if found.best is None and excess_bytes:  # the next plan may come nearer to its prediction than this one
            question = _with_excess(now.question, plan, excess_bytes / 2)
            question = dataclasses.replace(question, restrict=_without(restrict, forbidden), start=None)
            found = _found_again(posed, question)
        if found.best is None:
            stopped = f"no other plan of at most {amount(question.budget_on(plan.axes))} was found"
            break
    if not tried:
        return dataclasses.replace(plan, confirmation=Confirmation("", False, stopped))
    return _told(min(tried, key=lambda t: t.rank), first, posed.question, len(tried), stopped)


def _excess_bytes(question: Question, verification: Verification) -> float:
    """What the compiled program needs beyond the budget."""
    excess_bytes = verification.reserved_bytes - question.budget_bytes
    return excess_bytes if excess_bytes > NEGLIGIBLE_BYTES else 0.0


def excess_of_faster(budget_bytes: float, schedule: ScheduleFigures) -> float:
    """What a way to schedule a program needs beyond the budget that is faster by `FAR_FASTER` than the one that was
    chosen, since that fits; the least of several, 0.0 if there is none."""
    if schedule.chosen is None:
        return 0.0
    limit_s = (1 - FAR_FASTER) * schedule.chosen.step_s
    faster = [c.reserved_bytes - budget_bytes for c in schedule.candidates if c.step_s <= limit_s]
    return min((excess_bytes for excess_bytes in faster if excess_bytes > NEGLIGIBLE_BYTES), default=0.0)


def _with_excess(question: Question, plan: ProgramPlan, excess_bytes: float) -> Question:
    """The question with the budget of the plan's mesh lowered, so that plans are predicted to take so much less."""
    if not excess_bytes:
        return question
    predicted_bytes = plan.estimate.reserved_bytes or plan.estimate.peak_bytes
    question = dataclasses.replace(question, schedule=plan.schedule)
    limit_bytes = max(min(question.budget_on(plan.axes), predicted_bytes) - excess_bytes, 1.0)
    return dataclasses.replace(
        question, lowered_bytes={**question.lowered_bytes, (plan.schedule, plan.axes): limit_bytes}
    )


def _found_again(posed: Posed, question: Question) -> Found:
    """The outcome of the search with what was corrected, which has as much time as the first."""
    with stop_on_signals() as stop:
        return search(question.renewed(), posed.meshes, None, stop, posed.further)


def _without(restrict: Restrict | None, forbidden: Forbidden) -> Restrict:
    """Restrictions that also forbid some choices of groups."""

    def restricted(program: Program, mesh: LogicalMesh) -> Restrictions:
        own = restrict(program, mesh) if restrict else Restrictions()

        axes = axes_of(mesh)

        def group(index: int, choice: Choice) -> bool:
            is_allowed = own.group is None or own.group(index, choice)
            return is_allowed and (axes, index, choice) not in forbidden

        return dataclasses.replace(own, group=group)

    return restricted


def _offending(verification: Verification) -> list[Stray]:
    """The strays, not negligible, over the axes where bytes differ beyond tolerance."""
    axes = {axes for axes, _, _ in verification.traffic_disagreements}
    least_bytes = NEGLIGIBLE * max(verification.predicted_bytes, verification.compiled_bytes)
    return [s for s in verification.strays if s.axes in axes and s.wire_bytes > least_bytes]


def _to_forbid(now: _Compiled) -> Forbidden:
    """The choices that collectives which were compiled otherwise belong to: those that the program lacks; if it only
    has some besides, those of the equations that these serve.
    """
    formulation, solution = now.found.winner
    groups = _groups_of(formulation)
    strays = _offending(now.verification)
    found: dict[tuple[Axes, int, Choice], str] = {}
    for stray in [s for s in strays if s.predicted] or strays:
        for group in {g.index: g for e in stray.equations for g in groups[e]}.values():
            found.update(_choices_with(formulation, solution.chosen, group, stray, now.forbidden))
    return found


def _groups_of(formulation: Formulation) -> Mapping[int, Sequence[Group]]:
    """The groups of each equation."""
    found: dict[int, list[Group]] = collections.defaultdict(list)
    operations = formulation.program.graph.operations
    for group in formulation.program.groups:
        for equation in dict.fromkeys(operations[o].equation for o in group.operations):
            found[equation].append(group)
    return found


def _choices_with(
    formulation: Formulation, picks: Sequence[int], group: Group, stray: Stray, forbidden: Forbidden
) -> Forbidden:
    """The choices of `group` that make the collective `stray`: its own choice, or all that read the same operand in the
    same layout where that is moved to it. Some choice is always left.
    """
    node = len(formulation.program.graph.arguments) + group.index
    table, rows = formulation.tables[group.index], formulation.decisions[node].rows
    own = rows[picks[node]]
    axes = {formulation.mesh.axis_names.index(a) for a in stray.axes}
    key = lambda row: (axes_of(formulation.mesh), group.index, table.choices[row])
    is_sum = any(c.kind.value == stray.kind and set(c.axes) == set(stray.axes) for c in table.collectives[own])
    chosen = {own}
    for flow in formulation.flows:
        if is_sum or flow.target != node or flow.read is None:
            continue
        source = flow.defined_as.layouts[flow.defined_as.of_choice[picks[flow.source]]]
        target = flow.read_as.layouts[flow.read_as.of_choice[picks[node]]]
        if {a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s != t} & axes:
            chosen |= {row for row in rows if table.reads[flow.read][row] == target}
    for candidates in (chosen, {own}):
        if any(r not in candidates and key(r) not in forbidden for r in rows):
            return {key(r): _text(formulation, group, own) for r in candidates}
    return {}


def _text(formulation: Formulation, group: Group, row: int) -> str:
    """A choice of a group, for people: what it makes, where, and in which layout."""
    graph, access = formulation.program.graph, group.writes[-1]
    operation = graph.operations[access.operations[0]]
    layout = formulation.tables[group.index].writes[-1][row]
    entries = spec_entries(layout, len(graph.values[access.value].shape), formulation.mesh.axis_names)
    return f"{operation.name} at {operation.source or 'an unknown line'} in {layout_text(entries)}"


def _otherwise(strays: Iterable[Stray]) -> tuple[CompiledOtherwise, ...]:
    """What was predicted beside what was compiled, by line and axes."""
    rows: dict[tuple, list[Stray]] = collections.defaultdict(list)
    for stray in strays:
        rows[stray.source, stray.axes].append(stray)
    found = []
    for (source, axes), both in rows.items():
        kinds, sizes = [], []
        for is_predicted in (True, False):
            side = [s for s in both if s.predicted == is_predicted]
            kinds.append("+".join(dict.fromkeys(s.kind for s in side)))
            sizes.append(sum(s.wire_bytes for s in side))
        tensor = f"{both[0].tensor} {'x'.join(map(str, both[0].shape))}".strip()
        found.append(CompiledOtherwise(tensor, source, axes, *kinds, *sizes))
    return tuple(sorted(found, key=lambda c: -max(c.predicted_bytes, c.compiled_bytes)))


def _reason(now: _Compiled, question: Question) -> str:
    """In which respects a plan is not confirmed."""
    estimate = now.plan.estimate
    found = [d for d in now.verification.disagreements if d.startswith(("over", "no collective"))]
    if now.excess_bytes:
        predicted_bytes = estimate.reserved_bytes or estimate.peak_bytes
        found.append(
            f"the program reserves {amount(now.verification.reserved_bytes)} of {amount(question.budget_bytes)} "
            f"allowed, {amount(predicted_bytes)} predicted"
        )
    return "; ".join(found)


def _told(best: _Compiled, first: Found, question: Question, num_compilations: int, stopped: str) -> ProgramPlan:
    """The plan with what the compiler says of it, and with the certificate of the problem as it was."""
    v, limit_bytes = best.verification, best.question.budget_on(best.plan.axes)
    confirmation = Confirmation(
        compiler=f"XLA:{platform_of(target_of(best.plan)).replace('cuda', 'gpu').upper()} of jax {jax.__version__}",
        is_confirmed=best.is_confirmed,
        reason="; ".join(filter(None, [_reason(best, question), "" if best.is_confirmed else stopped])),
        num_compilations=num_compilations,
        solved_budget_bytes=None if math.isinf(limit_bytes) else limit_bytes,
        compiled_reserved_bytes=v.reserved_bytes,
        predicted_sent_bytes=v.predicted_bytes,
        compiled_sent_bytes=v.compiled_bytes,
        otherwise=() if best.is_confirmed else _otherwise(_offending(v)),
        forbidden=tuple(dict.fromkeys(best.forbidden.values())),
        first_step_s=first.cost_s,
        candidates=v.schedule.candidates,
        chosen=v.schedule.chosen,
    )
    all_meshes = first.certificate(question.options, time.perf_counter() - question.started)
    certificate = proven_of(all_meshes, best.found.cost_s, question)
    candidates = [
        dataclasses.replace(c, step_s=best.found.cost_s) if c.axes == best.plan.axes else c for c in first.candidates
    ]
    return dataclasses.replace(
        best.plan, certificate=certificate, candidates=tuple(candidates), confirmation=confirmation
    )


def proven_of(certificate: Certificate, cost_s: float, question: Question) -> Certificate:
    """What the bound of a certificate proves of a plan that costs `cost_s`."""
    elapsed_s = time.perf_counter() - question.started
    own = dataclasses.replace(certificate, bound=min(certificate.bound, cost_s), solve_s=elapsed_s)
    return as_scheduled(own, cost_s, max(question.options.relative_gap, ROUNDING))

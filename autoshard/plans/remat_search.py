"""The search for what the layers of a training step recompute: one program a policy, each with the best to beat.

Policies that are the same for all layers come first. Where none that fits is as fast as keeping everything in unlimited
memory would be, mixtures of two policies follow: the first k layers recompute more, the others less, with k halved in.

The proof: the bound of a plan is the least of all policies that were considered. A policy whose bound shows that it
cannot beat the best plan so far by more than the wanted gap is not solved to the end.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from jax.sharding import PartitionSpec

from autoshard.cluster import Cluster, LogicalMesh
from autoshard.errors import ConfigError
from autoshard.interrupts import StopRequest, stop_on_signals
from autoshard.plans.gaps import fits
from autoshard.plans.make import Posed, Request, plan_found, plan_posed, pose, starting_layouts, traced_program
from autoshard.plans.no_plan import no_plan_error
from autoshard.plans.options import PlanOptions
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.question import axes_of, report
from autoshard.plans.remat_choice import RematCandidate, RematChoice
from autoshard.plans.search import NO_MEMORY, Found, search, search_meshes
from autoshard.remat.policy import RECOMPUTING, Keep, RematPolicy, first_layers, uniform
from autoshard.remat.rewrite import Layers, layers_of, rematerialised
from autoshard.solver.options import ROUNDING
from autoshard.solver.problem import Status
from autoshard.train_step import TrainStep

MOST_MIXTURES, FINEST = 8, 16
"""How many mixtures are tried, and to which part of all layers their number is halved in."""

Make = Callable[[Posed], ProgramPlan]


@dataclasses.dataclass(frozen=True, slots=True)
class _Attempt:
    """A policy, the question that it poses, and its answer.

    Attributes:
      policy: None for what the step says itself. keep: Of all layers, in a policy that is the same for all; else None.
      to_beat_s: What it had to beat. plan: The best one; None if there is none, or none that can win.
      is_fit: Whether that fits the memory with its gaps.
    """

    policy: RematPolicy | None
    keep: Keep | None
    step: TrainStep
    posed: Posed
    found: Found
    to_beat_s: float
    plan: ProgramPlan | None
    is_fit: bool

    @property
    def cost_s(self) -> float:
        """Of its plan, as the solver counts it; +inf without one that fits."""
        return self.found.cost_s if self.plan is not None and self.is_fit else math.inf

    @property
    def bound_s(self) -> float:
        """No plan with the policy costs less; +inf if none fits."""
        open_bounds = [c.bound_s for c in self.found.candidates if c.verdict != NO_MEMORY]
        if self.plan is None and math.isfinite(self.to_beat_s):
            open_bounds.append(self.to_beat_s)  # an earlier schedule may have been ruled out there
        return min(open_bounds, default=math.inf)

    @property
    def candidate(self) -> RematCandidate:
        """For people."""
        name = "as written" if self.policy is None else str(self.policy)
        if self.plan is None:
            verdicts = [c.verdict for c in self.found.candidates]
            verdict = next((v for v in verdicts if v != NO_MEMORY), NO_MEMORY)
            return RematCandidate(name, None, max(self.bound_s, 0.0), None, verdict)
        e = self.plan.estimate
        verdict = self.plan.certificate.status.value if self.is_fit else "exceeds the memory with its gaps"
        return RematCandidate(name, self.found.cost_s, self.bound_s, e.reserved_bytes or e.peak_bytes, verdict)


def plan_rematerialised(
    step: TrainStep,
    args: Sequence[Any],
    cluster: Cluster,
    *,
    options: PlanOptions,
    start: ProgramPlan | Mapping[str, PartitionSpec] | None = None,
    donate_argnums: tuple[int, ...] = (),
    answer: Callable[[TrainStep], Make] = lambda step: plan_posed,
    **request: Unpack[Request],
) -> ProgramPlan:
    """Plans a training step as one program, with what its layers recompute chosen too.

    Args:
      step: The step. args: State and batch, arrays or shapes.
      answer: What makes the plan of the chosen step; it may ask more than the solver, such as a compiler.
      All others as for `autoshard.plan`.

    Returns:
      The plan, whose `remat` tells the choice. Its certificate speaks of all policies that were considered.

    Raises:
      ConfigError: A solution is given, which belongs to one program.
      As `autoshard.plan`.
    """
    if request.get("solution") is not None:
        raise ConfigError(
            'PlanOptions.remat="search" (plan.remat) plans several programs, and a solution belongs to one; received '
            'both. Leave the solution out, or plan with remat="as_written".'
        )
    started = time.perf_counter()
    report(options, started, "layers", step.__name__)
    layers = layers_of(step, *args)
    task = _Task(step, tuple(args), cluster, options, donate_argnums, starting_layouts(start), request, started)
    with stop_on_signals() as stop:
        tried, note = _tried(task, layers, stop)
    best = min(tried, key=lambda a: (a.cost_s, a.plan is None))
    if best.plan is None:
        if stop.requested:
            raise KeyboardInterrupt
        last = tried[-1].posed
        schedule = last.question.schedules(last.meshes[0].device_type)[-1]
        question = dataclasses.replace(last.question, schedule=schedule, to_beat_s=math.inf)
        raise no_plan_error(question, last.meshes)
    plan = best.plan
    if answer is not plan_posed and options.compile_check:
        unbeaten = dataclasses.replace(best.posed.question, to_beat_s=math.inf)
        plan = answer(best.step)(dataclasses.replace(best.posed, question=unbeaten))
    return _told(plan, best, tried, note, options, time.perf_counter() - started)


def _told(
    plan: ProgramPlan, best: _Attempt, tried: Sequence[_Attempt], note: str, options: PlanOptions, elapsed_s: float
) -> ProgramPlan:
    """The plan with the choice, and a certificate over all policies that were considered."""
    own = plan.certificate
    bound = min(own.bound, *(a.bound_s for a in tried))
    gap = (own.objective - bound) / own.objective if own.objective else 0.0
    status = Status.OPTIMAL if gap <= max(options.relative_gap, ROUNDING) else Status.FEASIBLE
    certificate = dataclasses.replace(own, status=status, bound=bound, gap=gap, solve_s=elapsed_s)
    choice = RematChoice(best.policy, tuple(a.candidate for a in tried), note)
    warnings = plan.warnings if best.policy is not None or not note else (*plan.warnings, note)
    return dataclasses.replace(plan, certificate=certificate, remat=choice, warnings=warnings)


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    """What is planned for every policy."""

    step: TrainStep
    args: tuple[Any, ...]
    cluster: Cluster
    options: PlanOptions
    donate_argnums: tuple[int, ...]
    start: Mapping[str, PartitionSpec] | None
    request: Request
    started: float

    def attempt(
        self,
        policy: RematPolicy | None,
        keep: Keep | None,
        stop: StopRequest,
        best: _Attempt | None,
        mesh: LogicalMesh | None = None,
    ) -> _Attempt:
        """The best plan with a policy, if it can beat `best` by more than the wanted gap; on `mesh` only, if given."""
        step = self.step if policy is None else rematerialised(self.step, policy)
        report(self.options, self.started, "recompute", "as written" if policy is None else f"keep {policy}")
        traced, program = traced_program(step, self.args, self.donate_argnums, self.options, self.started)
        request = Request(**self.request)
        if mesh is not None:
            request["mesh"] = dict(axes_of(mesh))
        posed = pose(
            traced,
            program,
            self.cluster,
            options=self.options,
            started=self.started,
            start=self.start,
            donate_argnums=self.donate_argnums,
            **request,
        )
        to_beat_s = math.inf if best is None else best.cost_s * (1 - self.options.relative_gap)
        posed = dataclasses.replace(posed, question=dataclasses.replace(posed.question, to_beat_s=to_beat_s))
        found = search(posed.question, posed.meshes, None, stop)
        plan = None if found.best is None else plan_found(posed, found)
        is_fit = plan is not None and fits(plan.estimate, posed.question.budget_bytes)
        return _Attempt(policy, keep, step, posed, found, to_beat_s, plan, is_fit)


def _tried(task: _Task, layers: Layers, stop: StopRequest) -> tuple[list[_Attempt], str]:
    """All that was tried, and why no more was."""
    if not layers.runs:
        note = (
            "Nothing was chosen to be recomputed: no repeated layers were found in the loss (equal sequences of "
            "equations with products, each of which reads what the one before made, or a scan over them)."
        )
        return [task.attempt(None, None, stop, None)], note
    tried: list[_Attempt] = []
    best: _Attempt | None = None
    reach_s: float | None = None  # with everything kept, in memory without limit

    def is_settled() -> bool:
        return best is not None and reach_s is not None and best.cost_s * (1 - task.options.relative_gap) <= reach_s

    def take(policy: RematPolicy | None, keep: Keep | None, mesh: LogicalMesh | None = None) -> bool:
        """Tries a policy; whether it is the best so far."""
        nonlocal best
        own = task.attempt(policy, keep, stop, best, mesh)
        tried.append(own)
        if own.cost_s < (math.inf if best is None else best.cost_s):
            best = own
            return True
        return False

    take(uniform(layers.runs, Keep.ALL), Keep.ALL)
    reach_s = _reach_s(tried[0], stop)
    if is_settled():
        return tried, "Keeping everything fits the memory, and no more memory would make it faster."
    for keep in RECOMPUTING:
        if stop.requested or is_settled():
            break
        if keep is not Keep.PRODUCTS or layers.has_batched_products:  # else all products are with weights
            take(uniform(layers.runs, keep), keep)
    if layers.has_checkpoints and not stop.requested and not is_settled():
        take(None, None)
    same = min((a for a in tried if a.keep is not None), key=lambda a: a.cost_s)
    if same.plan is not None and not stop.requested and not is_settled():
        _mix(layers, same, take, lambda: stop.requested or is_settled())
    if stop.requested:
        return tried, "Stopped before all policies were tried."
    if is_settled():
        return tried, "The best is as fast as keeping everything would be in memory without limit."
    return tried, "No policy that was tried is faster."


def _mix(
    layers: Layers,
    best: _Attempt,
    take: Callable[[RematPolicy | None, Keep | None, LogicalMesh | None], bool],
    is_over: Callable[[], bool],
) -> None:
    """Tries policies that recompute more in the first k layers and less in the others, on the mesh of the best plan.

    `best` is the best policy that is the same for all layers. Mixtures of it and those that recompute less come first,
    then that with the next one that recomputes more. Of a pair that gains, k is halved in from there.
    """
    runs = layers.runs
    if best.keep is None or any(r.is_loop for r in runs):
        return
    order = [Keep.ALL, *(k for k in RECOMPUTING if k is not Keep.PRODUCTS or best.keep is Keep.PRODUCTS)]
    at, total, mesh = order.index(best.keep), sum(r.count for r in runs), best.found.winner[0].mesh
    pairs = [(best.keep, order[k], total) for k in (at - 1, at - 2) if k >= 0]
    pairs += [(keep, best.keep, 0) for keep in order[at + 1 : at + 2]]
    left = MOST_MIXTURES
    for first, rest, count in pairs:
        before, step = count, (total + 1) // 2
        while step >= max(1, total // FINEST):
            for other in (count - step, count + step):
                if not 0 < other < total or not left or is_over():
                    continue
                left -= 1
                if take(first_layers(runs, first, rest, other), None, mesh):
                    count = other
                    break
            step //= 2
        if count != before:
            return


def _reach_s(kept: _Attempt, stop: StopRequest) -> float | None:
    """No plan that keeps everything takes less, whatever the memory; recomputing only adds to that."""
    question, meshes = kept.posed.question, kept.posed.meshes
    if math.isinf(question.budget_bytes):
        return kept.bound_s
    schedule = question.schedules(meshes[0].device_type)[0]
    if kept.is_fit and len(meshes) == 1 and kept.found.winner[0].schedule is schedule:
        price = kept.found.winner[1].certificate.capacity_price
        if price is not None and price.per_unit == 0:
            return price.bound
    free = dataclasses.replace(question, budget_bytes=math.inf, schedule=schedule)
    found = search_meshes(free, meshes, None, stop)
    return min((c.bound_s for c in found.candidates), default=None)

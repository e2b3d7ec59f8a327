"""The search for the form of a training step: what its layers recompute, and in how many micro-batches it runs.

Each form is a program of its own, planned with the best plan so far to beat. In each number of micro-batches those come
first whose kernels take least of all that may fit the memory, as `form_bounds.py` tells without tracing them; then, in
the best number, policies that are the same for all layers, and the step as it is written. The search ends where a plan
is as fast as keeping everything would be in unlimited memory; where layers have loops with products, or kernels take
less in another policy, as any of these policies would be.

Where nothing is asked of it (`PlanOptions`, None), the step is planned as it is written, and other forms are tried only
where that does not fit, where it recomputes something, or where its certificate tells that more memory would gain; in
micro-batches, only where the loss is known to be a plain mean over examples (`plans/mean_loss.py`).

The proof: the bound of a plan is the least of all forms that were considered. A form whose bound shows that it cannot
beat the best plan so far by more than the wanted gap is not solved to the end. Micro-batches only add to the kernels of
a form.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from jax.sharding import PartitionSpec

from autoshard.cluster import Cluster
from autoshard.errors import ConfigError
from autoshard.interrupts import StopRequest, stop_on_signals
from autoshard.plans.form_attempts import WORTH, Attempt, Form, Passed, Task, Tries
from autoshard.plans.form_bounds import FormBounds
from autoshard.plans.found import NOT_FASTER
from autoshard.plans.make import Posed, Request, plan_found, plan_posed, starting_layouts
from autoshard.plans.mesh_search import search_meshes
from autoshard.plans.no_plan import looks_up, no_plan_error
from autoshard.plans.options import PlanOptions
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.step_variant import VariantChoice
from autoshard.plans.variant_space import Space
from autoshard.remat.policy import Keep, RematPolicy, uniform
from autoshard.remat.rewrite import Layers, has_checkpoints
from autoshard.solver.options import ROUNDING
from autoshard.solver.problem import Status
from autoshard.trace.trace import KeptTrace
from autoshard.train_step import TrainStep

_REACH_GAP = 0.5 * WORTH
"""How exactly it is known what keeping everything would take in memory without limit."""

_HARDLY_MORE, MOST_UNFIT = 0.1, 6
"""By which share kernels may take longer in the number of micro-batches that is tried first than in any, for what is
recomputed; and how many numbers are tried in vain."""

_MOST_HALVINGS = 3
"""How often the memory between what fits and what does not is halved, where that promises more than the wanted gap."""

Make = Callable[[Posed], ProgramPlan]


def plan_variants(
    step: TrainStep,
    args: Sequence[Any],
    cluster: Cluster,
    space: Space,
    *,
    options: PlanOptions,
    start: ProgramPlan | Mapping[str, PartitionSpec] | None = None,
    donate_argnums: tuple[int, ...] = (),
    answer: Callable[[TrainStep], Make] = lambda step: plan_posed,
    **request: Unpack[Request],
) -> ProgramPlan:
    """Plans a training step as one program, with its form chosen too.

    Args:
      step: The step. args: State and batch, arrays or shapes.
      space: The forms that may be tried.
      answer: What makes the plan of the chosen step; it may ask more than the solver, such as a compiler.
      All others as for `autoshard.plan`.

    Returns:
      The plan, whose `choice` tells the form. Its certificate speaks of all forms that were considered.

    Raises:
      ConfigError: A solution is given, which belongs to one program.
      As `autoshard.plan`.
    """
    if request.get("solution") is not None:
        raise ConfigError(
            'PlanOptions.remat="search" (plan.remat) and PlanOptions.micro_batches (plan.micro_batches) plan several '
            'programs, and a solution belongs to one; received both. Leave the solution out, or plan with "as_written".'
        )
    started = time.perf_counter()
    task = Task(step, tuple(args), cluster, options, donate_argnums, starting_layouts(start), request, started)
    with stop_on_signals() as stop:
        tries, note = _tried(task, space, stop)
        if not (options.compile_check or options.adaptive):  # else the best form is searched again
            tries.go_on()
    tried = tries.attempts
    best = min(tried, key=lambda a: (a.step_s, not a.has_plan))
    if not best.has_plan:
        if stop.requested:
            raise KeyboardInterrupt
        last = tried[-1].posed
        schedule = last.question.schedules(last.meshes[0])[-1]
        question = dataclasses.replace(last.question, schedule=schedule, to_beat_s=math.inf)
        error = no_plan_error(question, last.meshes, any(looks_up(a.posed.question) for a in tried))
        of_last = (
            f"These figures are of the form that was tried last: {tried[-1].variant}." if len(tries.all) > 1 else ""
        )
        raise type(error)(" ".join(part for part in (str(error), of_last, tries.uncut) if part))
    if options.compile_check or options.adaptive:
        unbeaten = dataclasses.replace(best.posed.question, to_beat_s=math.inf).renewed()
        plan = answer(best.step)(dataclasses.replace(best.posed, question=unbeaten))
    else:
        plan = plan_found(best.posed, best.found)
    kept = KeptTrace(best.step, args, best.posed.question.traced)
    plan = dataclasses.replace(plan, kept_trace=kept)
    if len(tries.all) == 1 and not space.is_asked:
        return plan
    return _told(plan, best, tries.all, note, task, space)


def _told(
    plan: ProgramPlan,
    best: Attempt,
    tried: Sequence[Attempt | Passed],
    note: str,
    task: Task,
    space: Space,
) -> ProgramPlan:
    """The plan with the choice, and a certificate over all forms that were considered."""
    own = plan.certificate
    bound = min(own.bound, *(a.bound_s for a in tried))
    gap = (own.objective - bound) / own.objective if own.objective else 0.0
    status = Status.OPTIMAL if gap <= max(task.options.relative_gap, ROUNDING) else Status.FEASIBLE
    elapsed_s = time.perf_counter() - task.started
    certificate = dataclasses.replace(own, status=status, bound=bound, gap=gap, solve_s=elapsed_s)
    choice = VariantChoice(best.variant, tuple(a.candidate for a in tried), note)
    warnings = plan.warnings if not best.variant.is_as_written or not note else (*plan.warnings, note)
    if best.count is not None and not space.is_cut_asked:
        warnings += (
            f"The batch is run in {best.count} micro-batches, since the step as it is written needs more memory than "
            "there is or takes longer. The loss is a plain mean over examples, so that this is the same step but for "
            'random numbers, which each micro-batch draws anew. Forbid it by PlanOptions(micro_batches="as_written").',
        )
    elif best.count is not None and (why := task.why_no_mean()) is not None:
        warnings += (
            f"The batch is run in {best.count} micro-batches, as asked for, but the loss is not known to be a plain "
            f"mean over examples, because of {why}: the mean over micro-batches may be another loss.",
        )
    return dataclasses.replace(plan, certificate=certificate, choice=choice, warnings=warnings)


def _tried(task: Task, space: Space, stop: StopRequest) -> tuple[Tries, str]:
    """All that was tried, and why no more was."""
    gap = task.options.relative_gap
    tries = Tries(task, stop, gap if space.is_asked else max(gap, WORTH))
    is_only = len(space.counts) == 1 and not space.with_policies
    if is_only or not space.is_asked:
        as_written = tries.take(None, space.counts[0])
        assert isinstance(as_written, Attempt)  # no bounds are known yet
        recomputes = space.with_policies and has_checkpoints(as_written.posed.question.traced.jaxpr)
        if stop.requested or is_only or not (as_written.needs_memory or recomputes):
            return tries, ""
    why = None if space.is_cut_asked or len(space.counts) == 1 else task.why_no_mean()
    if why is None:
        return tries, _search_forms(tries, space)
    tries.uncut = (
        f"Micro-batches were not tried: the loss is not known to be a plain mean over examples, because of {why}. "
        'Where the mean over micro-batches will do, allow it: PlanOptions(micro_batches="search").'
    )
    space = dataclasses.replace(space, counts=space.counts[:1])
    return tries, f"{_search_forms(tries, space)} {tries.uncut}" if space.with_policies else tries.uncut


def _search_forms(tries: Tries, space: Space) -> str:
    """Tries the forms beside the one that is written; returns why no more were tried."""
    first = space.counts[0]
    forms = _Forms(tries.task, space)
    if not (tries.all and forms.keeps_all_as_written):
        tries.bounds = forms.bounds
        tries.take(forms.policy(Keep.ALL, first), first)
    tries.bounds = forms.bounds
    tries.reach_s = _reach_s(tries, forms, space.is_asked)
    if tries.is_settled:
        share = f"by more than {tries.enough:.0%}" if tries.enough >= WORTH else "by more than the wanted gap"
        return forms.note or f"Keeping everything fits the memory, and no more memory would make it faster {share}."
    if tries.bounds is None:
        _cut_further(tries, space)
    else:
        _fill_memory(tries, space, forms, tries.bounds)
        if forms.has_checkpoints and space.is_asked and not tries.is_over:
            tries.take(None, first)
        if not tries.attempts and not tries.stop.requested:  # for an error that tells what would do
            tries.take(forms.policy(tries.bounds.leanest, first), first, is_passed=False)
    if tries.stop.requested:
        return "Stopped before all forms were tried."
    if tries.is_settled:
        return forms.note or "The best is as fast as keeping everything would be in memory without limit."
    return forms.note or "No form that was tried is faster."


class _Forms:
    """The forms of a step that come into question.

    Attributes:
      note: Why there are no policies, where they are wanted. has_checkpoints: Whether the step says what is recomputed.
      has_loops: Whether recomputing can be faster than keeping, in any memory (`Layers.has_loops`).
      bounds: What forms take at least; None where there are no policies.
    """

    def __init__(self, task: Task, space: Space):
        self._task = task
        first = task.layers(space.counts[0]) if space.with_policies else None
        self._layers = {} if first is None else {space.counts[0]: first}
        self._has_layers = first is not None and bool(first.runs)
        self.has_checkpoints = first is not None and self._has_layers and first.has_checkpoints
        self.has_loops = self._has_layers and first is not None and first.has_loops
        self.note, self.bounds = "", None
        if first is not None and not first.runs:
            self.note = (
                "Nothing was chosen to be recomputed: no repeated layers were found in the loss (equal sequences of "
                "equations with products, each of which reads what the one before made, or a scan over them)."
            )
        if first is not None and first.runs:
            # without batched products all are with weights
            keeps = [k for k in Keep if k is not Keep.PRODUCTS or first.has_batched_products]
            self.bounds = task.bounds(keeps)

    @property
    def keeps_all_as_written(self) -> bool:
        """Whether a step that keeps everything is the step as it is written."""
        return not self.has_checkpoints

    def policy(self, keep: Keep, count: int | None) -> RematPolicy | None:
        """That all layers keep the same; None where there are none, or none may be changed."""
        return uniform(self._layers_of(count).runs, keep) if self._has_layers else None

    def in_parts(self, policy: RematPolicy, count: int | None) -> RematPolicy | None:
        """A policy for the layers of the loss in so many micro-batches, which may lie elsewhere in it; None where they
        are others."""
        runs = self._layers_of(count).runs
        if [run.count for run in runs] != [own.run.count for own in policy.runs]:
            return None
        return RematPolicy(tuple(dataclasses.replace(p, run=run) for p, run in zip(policy.runs, runs, strict=True)))

    def _layers_of(self, count: int | None) -> Layers:
        if count not in self._layers:
            self._layers[count] = self._task.layers(count)
        return self._layers[count]


def _fill_memory(tries: Tries, space: Space, forms: _Forms, bounds: FormBounds) -> None:
    """Tries, in each number of micro-batches, the policies with the least kernels that may fit the memory.

    More micro-batches leave room for more, but reduce gradients more often and run smaller kernels. So the search
    begins with the fewest in which hardly more is recomputed than in any, goes on to more as long as that is faster,
    and then to fewer. In the best number policies that are the same for all layers are tried too: they may send less.
    """
    budget_bytes = tries.task.budget_bytes
    best = {count: bounds.best(count, budget_bytes) for count in space.counts}
    least_s = {count: bounds.kernels_s(policy) for count, policy in best.items() if policy is not None}
    if not least_s:
        return
    counts = list(least_s)
    begin = next(n for n, c in enumerate(counts) if least_s[c] <= (1 + _HARDLY_MORE) * min(least_s.values()))
    tried: set[tuple[RematPolicy, int | None]] = set()

    def take(policy: RematPolicy, count: int | None) -> Attempt | Passed | None:
        if (policy, count) in tried or tries.is_over:
            return None
        tried.add((policy, count))
        own = forms.in_parts(policy, count)
        return None if own is None else tries.take(own, count)

    def is_best(count: int | None) -> bool:
        """Whether the best form so far is one in `count` micro-batches."""
        before, fit, unfit, kept = tries.best, None, 1.0, bounds.uniform(Keep.ALL)
        for share, policy in bounds.offers(count, budget_bytes):
            own = take(policy, count)
            if own is not None and not own.lacks_memory:
                fit, kept = share, policy
                break
            unfit = share
        for _ in range(_MOST_HALVINGS if fit is not None and tries.best is not before else 0):
            assert fit is not None and tries.best is not None
            share = (fit + unfit) / 2
            own, policy = None, bounds.best(count, share * budget_bytes)
            worth_s = tries.best.cost_s * tries.task.options.relative_gap
            if policy is not None and bounds.kernels_s(kept) - bounds.kernels_s(policy) > worth_s:
                own = take(policy, count)
            if own is not None and own.lacks_memory:
                unfit = share
            else:
                fit, kept = share, policy or kept
        return tries.best is not before or before is not None and before.count == count

    if tries.all:  # layers that keep all were tried already
        tried.add((bounds.uniform(Keep.ALL), space.counts[0]))
    for unfit, count in enumerate(counts[begin:]):
        if not is_best(count) and (tries.best is not None or unfit >= MOST_UNFIT) or tries.is_over:
            break
        is_all_kept = least_s[count] <= bounds.least_s
        if is_all_kept and tries.best is not None and tries.best.count == count and not tries.best.needs_memory:
            break
    for count in reversed(counts[:begin]):
        if not is_best(count) and tries.best is not None or tries.is_over:
            break
    if tries.best is not None:
        for keep in bounds.fastest_first:
            take(bounds.uniform(keep), tries.best.count)


def _cut_further(tries: Tries, space: Space) -> None:
    """Tries more and more micro-batches, until they fit, and then as long as that is faster."""
    is_fitting = tries.best is not None
    for unfit, count in enumerate(space.counts[1:]):
        if tries.is_over:
            break
        own = tries.take(None, count)
        if not isinstance(own, Attempt) or is_fitting and own is not tries.best or _is_hopeless(own, tries.stop):
            break
        is_fitting = is_fitting or own.is_fit
        if is_fitting and not own.needs_memory or not is_fitting and unfit + 1 >= MOST_UNFIT:
            break


def _is_hopeless(kept: Attempt, stop: StopRequest) -> bool:
    """Whether no form in as many micro-batches, or in twice as many and so on, can win, whatever the memory: such as
    where so few examples are left in each that mesh axes cannot divide them.

    Args:
      kept: A form that keeps everything. stop: Asks to end.
    """
    if kept.has_plan or all(c.verdict != NOT_FASTER for c in kept.found.candidates):
        return False
    return Form(kept.variant, kept.step, kept.posed).ruled_out(stop) is not None


def _reach_s(tries: Tries, forms: _Forms, is_asked: bool) -> float | None:
    """No form takes less, whatever the memory: none less than one that keeps everything, unless layers have loops or
    other kernels take less, and micro-batches only add to that."""
    kept, bounds = tries.all[-1], forms.bounds
    if not isinstance(kept, Attempt):
        return None if bounds is None else bounds.least_s
    reach_s = _kept_reach_s(kept, tries.stop)
    if reach_s is None or bounds is None:
        return reach_s
    may_be_faster = forms.has_loops or is_asked and bounds.least_s < bounds.kernels_s(bounds.uniform(Keep.ALL))
    return min(reach_s, bounds.least_s) if may_be_faster else reach_s


def _kept_reach_s(kept: Attempt, stop: StopRequest) -> float | None:
    """No plan of a form takes less, whatever the memory."""
    question, meshes = kept.posed.question, kept.posed.meshes
    if math.isinf(question.budget_bytes):
        return kept.bound_s
    schedule = question.schedules(meshes[0])[0]
    if kept.is_fit and len(meshes) == 1 and kept.found.winner[0].schedule is schedule:
        price = kept.found.winner[1].certificate.capacity_price
        if price is not None and price.per_unit == 0:
            return price.bound
    return _free_bound_s(kept.posed, stop)


def _free_bound_s(posed: Posed, stop: StopRequest) -> float | None:
    """No plan of a form takes less, whatever the memory."""
    question, meshes = posed.question, posed.meshes
    options = dataclasses.replace(question.options, relative_gap=max(question.options.relative_gap, _REACH_GAP))
    free = dataclasses.replace(
        question,
        budget_bytes=math.inf,
        schedule=question.schedules(meshes[0])[0],
        to_beat_s=math.inf,
        options=options,
    )
    found = search_meshes(free, meshes, None, stop)
    return min((c.bound_s for c in found.candidates), default=None)

"""The search for the form of a training step: what its layers recompute, and in how many micro-batches it runs.

Each form is a program of its own, planned with the best plan so far to beat. Keeping everything comes first, then
keeping everything in more and more micro-batches until that fits the memory: these keep fewer residuals at a time, for
gathers and reductions that run once in each and mostly hide. Policies that are the same for all layers follow, each in
as many micro-batches as come into question, and mixtures of two policies, of which the first k layers recompute more
than the others, with k halved in. The search ends where a plan is as fast as keeping everything would be in unlimited
memory; where layers have loops with products, as any of these policies would be, since these can be faster there.

Where nothing is asked of it (`PlanOptions`, None), the step is planned as it is written, and other forms are tried only
where that does not fit, where it recomputes something, or where its certificate tells that more memory would gain; in
micro-batches, only where the loss is known to be a plain mean over examples (`graph/example_mean.py`).

The proof: the bound of a plan is the least of all forms that were considered. A form whose bound shows that it cannot
beat the best plan so far by more than the wanted gap is not solved to the end. Micro-batches only add to what a form
takes where memory does not count: one that cannot win in any memory rules itself out in twice as many, and so on.
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
from autoshard.planner.mesh_prices import PricesOfMeshes
from autoshard.plans.found import NO_MEMORY, NOT_FASTER, Found, open_bounds_s
from autoshard.plans.gaps import are_within
from autoshard.plans.make import Posed, Request, plan_found, plan_posed, pose, starting_layouts, traced_program
from autoshard.plans.mesh_search import ruled_out, search_meshes
from autoshard.plans.no_plan import looks_up, no_plan_error
from autoshard.plans.options import PlanOptions
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.question import axes_of, report
from autoshard.plans.search import gone_on, search
from autoshard.plans.step_variant import StepVariant, VariantCandidate, VariantChoice
from autoshard.plans.variant_space import Space, why_no_mean_of
from autoshard.remat.policy import RECOMPUTING, Keep, RematPolicy, first_layers, uniform
from autoshard.remat.rewrite import Layers, has_checkpoints, layers_of
from autoshard.solver.options import ROUNDING
from autoshard.solver.problem import Status
from autoshard.trace.trace import KeptTrace
from autoshard.train_step import TrainStep, batch_size

MOST_MIXTURES, FINEST = 8, 16
"""How many mixtures are tried, and to which part of all layers their number is halved in."""

WORTH = 0.02
"""Where nothing is asked for, other forms are tried if twice the memory could shorten the step by more than this share,
as the price of memory tells; and no more of them once memory without limit could not shorten it by more."""

_REACH_GAP = 0.5 * WORTH
"""How exactly it is known what keeping everything would take in memory without limit."""

MOST_COUNTS, MOST_UNFIT = 3, 6
"""With how many numbers of micro-batches policies are tried; and with how many keeping everything is, if in vain."""

Make = Callable[[Posed], ProgramPlan]


@dataclasses.dataclass(frozen=True, slots=True)
class _Attempt:
    """A form, the question that it poses, and its answer.

    Attributes:
      keep: Of all layers, in a policy that is the same for all; else None. count: Of micro-batches.
      to_beat_s: What it had to beat.
      needed_bytes: Of memory of a device, for the best plan with its gaps; None if there is none, or none that can win.
      is_fit: Whether there is one that fits.
    """

    variant: StepVariant
    keep: Keep | None
    count: int | None
    step: TrainStep
    posed: Posed
    found: Found
    to_beat_s: float
    needed_bytes: float | None
    is_fit: bool

    @property
    def has_plan(self) -> bool:
        """Whether there is a plan, be it one that does not fit."""
        return self.found.best is not None

    @property
    def cost_s(self) -> float:
        """Of its plan, as the solver counts it; +inf without one that fits."""
        return self.found.cost_s if self.is_fit else math.inf

    @property
    def bound_s(self) -> float:
        """No plan of the form costs less; +inf if none fits."""
        open_bounds = open_bounds_s(self.found.candidates)
        if not self.has_plan and math.isfinite(self.to_beat_s):
            open_bounds.append(self.to_beat_s)  # an earlier schedule may have been ruled out there
        return min(open_bounds, default=math.inf)

    @property
    def needs_memory(self) -> bool:
        """Whether it does not fit, or twice the memory could shorten the step by more than `WORTH`, to first order."""
        if not self.is_fit:
            return True
        price, budget_bytes = self.found.winner[1].certificate.capacity_price, self.posed.question.budget_bytes
        return price is not None and price.per_unit > 0 and price.per_unit * budget_bytes > WORTH * self.cost_s

    @property
    def lacks_memory(self) -> bool:
        """Whether it does not fit on any mesh, whatever it takes."""
        return not self.is_fit and (self.has_plan or all(c.verdict == NO_MEMORY for c in self.found.candidates))

    @property
    def candidate(self) -> VariantCandidate:
        """For people."""
        name = str(self.variant)
        if not self.has_plan:
            verdicts = [c.verdict for c in self.found.candidates]
            verdict = next((v for v in verdicts if v != NO_MEMORY), NO_MEMORY)
            return VariantCandidate(name, None, max(self.bound_s, 0.0), None, verdict)
        certificate = self.found.certificate(self.posed.question.options, 0.0)
        verdict = certificate.status.value if self.is_fit else "exceeds the memory with its gaps"
        return VariantCandidate(name, self.found.cost_s, self.bound_s, self.needed_bytes, verdict)


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
    task = _Task(step, tuple(args), cluster, options, donate_argnums, starting_layouts(start), request, started)
    with stop_on_signals() as stop:
        tries, note = _tried(task, space, stop)
        if not (options.compile_check or options.adaptive):  # else the best form is searched again
            tries.go_on()
    tried = tries.all
    best = min(tried, key=lambda a: (a.cost_s, not a.has_plan))
    if not best.has_plan:
        if stop.requested:
            raise KeyboardInterrupt
        last = tried[-1].posed
        schedule = last.question.schedules(last.meshes[0].device_type)[-1]
        question = dataclasses.replace(last.question, schedule=schedule, to_beat_s=math.inf)
        error = no_plan_error(question, last.meshes, any(looks_up(a.posed.question) for a in tried))
        of_last = f"These figures are of the form that was tried last: {tried[-1].variant}." if len(tried) > 1 else ""
        raise type(error)(" ".join(part for part in (str(error), of_last, tries.uncut) if part))
    if options.compile_check or options.adaptive:
        unbeaten = dataclasses.replace(best.posed.question, to_beat_s=math.inf)
        plan = answer(best.step)(dataclasses.replace(best.posed, question=unbeaten))
    else:
        plan = plan_found(best.posed, best.found)
    kept = KeptTrace(best.step, args, best.posed.question.traced)
    plan = dataclasses.replace(plan, kept_trace=kept)
    if len(tried) == 1 and not space.is_asked:
        return plan
    return _told(plan, best, tried, note, task, space)


def _told(
    plan: ProgramPlan,
    best: _Attempt,
    tried: Sequence[_Attempt],
    note: str,
    task: "_Task",
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    """What is planned in every form."""

    step: TrainStep
    args: tuple[Any, ...]
    cluster: Cluster
    options: PlanOptions
    donate_argnums: tuple[int, ...]
    start: Mapping[str, PartitionSpec] | None
    request: Request
    started: float
    prices: PricesOfMeshes = dataclasses.field(default_factory=PricesOfMeshes)

    def parts(self, count: int | None) -> tuple[int, ...] | None:
        """The micro-batches of the batch, equal in size."""
        return None if count is None else (batch_size(self.args[1]) // count,) * count

    def why_no_mean(self) -> str | None:
        """Why the loss is not known to be the same in micro-batches; see `why_no_mean_of`."""
        report(self.options, self.started, "mean", self.step.__name__)
        return why_no_mean_of(self.step, *self.args)

    def layers(self, count: int | None) -> Layers:
        """The layers of the loss of a micro-batch."""
        report(self.options, self.started, "layers", self.step.__name__)
        parts = self.parts(count)
        return layers_of(self.step if parts is None else self.step.in_parts(parts), *self.args)

    def pose(
        self, policy: RematPolicy | None, count: int | None, best: _Attempt | None, mesh: LogicalMesh | None = None
    ) -> "_Form":
        """The question of a form: the plan that beats `best` by more than the wanted gap; on `mesh` only, if given."""
        variant = StepVariant(policy, self.parts(count))
        step = variant.of(self.step)
        report(self.options, self.started, "form", str(variant))
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
        posed = dataclasses.replace(posed, question=dataclasses.replace(posed.question, prices=self.prices))
        return _Form(variant, step, posed).to_beat(best)


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """A form of the step, and the question that it poses."""

    variant: StepVariant
    step: TrainStep
    posed: Posed

    def to_beat(self, best: _Attempt | None) -> "_Form":
        """The same, with another plan to beat by more than the wanted gap."""
        question = self.posed.question
        to_beat_s = math.inf if best is None else best.cost_s * (1 - question.options.relative_gap)
        question = dataclasses.replace(question, to_beat_s=to_beat_s)
        return dataclasses.replace(self, posed=dataclasses.replace(self.posed, question=question))

    def ruled_out(self, stop: StopRequest) -> Found | None:
        """The outcome if its first bounds rule it out, whatever the memory; None if not."""
        question, meshes = self.posed.question, self.posed.meshes
        schedule = question.schedules(meshes[0].device_type)[0]
        return ruled_out(dataclasses.replace(question, schedule=schedule), meshes, stop)

    def attempted(self, keep: Keep | None, count: int | None, found: Found) -> _Attempt:
        """The attempt of which this is the outcome."""
        question = self.posed.question
        needed_bytes, is_fit = None, False
        if found.best is not None:
            found = dataclasses.replace(found, evaluation=found.evaluated)
            needed_bytes = found.evaluated.reserved_bytes
            is_fit = are_within(found.evaluated.peak[0], needed_bytes, question.budget_bytes)
        return _Attempt(
            self.variant, keep, count, self.step, self.posed, found, question.to_beat_s, needed_bytes, is_fit
        )


@dataclasses.dataclass
class _Tries:
    """What has been tried so far."""

    task: _Task
    stop: StopRequest
    enough: float  # a plan is good enough that could be faster by this share at most
    all: list[_Attempt] = dataclasses.field(default_factory=list)
    best: _Attempt | None = None
    reach_s: float | None = None  # with everything kept, in memory without limit
    # questions of forms that are still to be tried
    posed: dict[tuple[RematPolicy | None, int | None], "_Form"] = dataclasses.field(default_factory=dict)
    out: set[Keep] = dataclasses.field(default_factory=set)  # policies that cannot win, whatever the memory
    uncut: str = ""  # why no micro-batches were tried, where the loss may be another one in them

    @property
    def is_settled(self) -> bool:
        """Whether no form that comes into question can be faster by more than what is worth a search."""
        if self.best is None or self.reach_s is None:
            return False
        return self.best.cost_s * (1 - self.enough) <= self.reach_s

    @property
    def is_over(self) -> bool:
        """Whether the search ends here."""
        return self.stop.requested or self.is_settled

    def lacks_memory(self, keep: Keep, count: int | None) -> bool:
        """Whether layers that all keep this are known not to fit in `count` micro-batches, since they did not in more,
        which take less."""
        return any(a.keep is keep and a.lacks_memory and (a.count or 1) >= (count or 1) for a in self.all)

    def take(
        self, policy: RematPolicy | None, keep: Keep | None, count: int | None, mesh: LogicalMesh | None = None
    ) -> _Attempt:
        """Tries a form, which becomes the best if it is."""
        form = self.posed.pop((policy, count), None) if mesh is None else None
        form = self.task.pose(policy, count, self.best, mesh) if form is None else form.to_beat(self.best)
        found = search(form.posed.question, form.posed.meshes, None, self.stop)
        return self._add(form.attempted(keep, count, found))

    def rules_out(self, policy: RematPolicy | None, keep: Keep, count: int | None) -> bool:
        """Whether a form cannot win, whatever the memory; then neither can it in more micro-batches, which only add to
        what it takes. Where not, what is known of it is kept until it is tried."""
        if self.best is None:
            return False
        form = self.posed.get((policy, count))
        form = self.task.pose(policy, count, self.best) if form is None else form.to_beat(self.best)
        found = form.ruled_out(self.stop)
        if found is None:
            self.posed[policy, count] = form
            return False
        self.posed.pop((policy, count), None)
        self._add(form.attempted(keep, count, found))
        return True

    def go_on(self) -> None:
        """Searches further meshes for the best form; all forms are tried on the same few."""
        own = self.best
        if own is None or not own.has_plan or self.stop.requested:
            return
        posed, schedule = own.posed, own.found.winner[0].schedule
        question = dataclasses.replace(posed.question, schedule=schedule, prices=None)  # of more axes, each asked once
        found = gone_on(question, posed.meshes, own.found, posed.further, self.stop)
        if found is not own.found:
            self.best = _Form(own.variant, own.step, posed).attempted(own.keep, own.count, found)
            self.all[self.all.index(own)] = self.best

    def _add(self, own: _Attempt) -> _Attempt:
        self.all.append(own)
        if own.cost_s < (math.inf if self.best is None else self.best.cost_s):
            self.best = own
        return own


def _tried(task: _Task, space: Space, stop: StopRequest) -> tuple[_Tries, str]:
    """All that was tried, and why no more was."""
    gap = task.options.relative_gap
    tries = _Tries(task, stop, gap if space.is_asked else max(gap, WORTH))
    is_only = len(space.counts) == 1 and not space.with_policies
    if is_only or not space.is_asked:
        as_written = tries.take(None, Keep.ALL, space.counts[0])
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


def _search_forms(tries: "_Tries", space: Space) -> str:
    """Tries the forms beside the one that is written; returns why no more were tried."""
    task, stop, first = tries.task, tries.stop, space.counts[0]
    forms = _Forms(task, space)
    if not (tries.all and forms.keeps_all_as_written):
        tries.take(forms.policy(Keep.ALL, first), Keep.ALL, first)
    tries.reach_s = _reach_s(tries.all[-1], stop)
    if forms.has_loops:
        tries.reach_s = _reach_of_all_s(tries, forms, first)
    if tries.is_settled:
        return forms.note or "Keeping everything fits the memory, and no more memory would make it faster."
    counts = _until_all_is_kept(tries, space, forms)
    _try_policies(tries, forms, counts, first)
    if forms.has_checkpoints and space.is_asked and not tries.is_over:
        tries.take(None, None, first)
    same = min((a for a in tries.all if a.variant.policy is not None), key=lambda a: a.cost_s, default=None)
    if same is not None and same.has_plan and same.keep is not None and not tries.is_over:
        count = counts[0] if same.keep is Keep.ALL else same.count  # in fewer micro-batches some layers must recompute
        _mix(forms.layers(count), same.keep, count, same.found.winner[0].mesh, tries)
    if stop.requested:
        return "Stopped before all forms were tried."
    if tries.is_settled:
        return forms.note or "The best is as fast as keeping everything would be in memory without limit."
    return forms.note or "No form that was tried is faster."


def _reach_of_all_s(tries: "_Tries", forms: "_Forms", count: int | None) -> float | None:
    """No form in `count` micro-batches takes less, whatever the memory, be it one that recomputes."""
    reach_s = tries.reach_s
    for keep in forms.recomputing:
        if tries.stop.requested or reach_s is None:
            return reach_s
        policy = forms.policy(keep, count)
        form = tries.task.pose(policy, count, None)
        bound_s = _free_bound_s(form.posed, reach_s, tries.stop)
        reach_s = reach_s if bound_s is None else min(reach_s, bound_s)
        tries.posed[policy, count] = form
    return reach_s


def _try_policies(tries: "_Tries", forms: "_Forms", counts: Sequence[int | None], first: int | None) -> None:
    """Tries policies that are the same for all layers and recompute, each in these numbers of micro-batches.

    Each is asked in the least number, `first`, whether it could win in any memory, again whenever the best plan is
    faster than when that was asked last.
    """
    asked_s: dict[Keep, float] = {}
    for count in counts:
        for keep in forms.recomputing:
            if tries.is_over or keep in tries.out or tries.lacks_memory(keep, count):
                continue
            if tries.best is not None and tries.best.cost_s < asked_s.get(keep, math.inf):
                asked_s[keep] = tries.best.cost_s
                if tries.rules_out(forms.policy(keep, first), keep, first):
                    tries.out.add(keep)
                    continue
            tries.take(forms.policy(keep, count), keep, count)


class _Forms:
    """The forms of a step that come into question.

    Attributes:
      note: Why there are no policies, where they are wanted. has_checkpoints: Whether the step says what is recomputed.
      has_loops: Whether recomputing can be faster than keeping, in any memory (`Layers.has_loops`).
      recomputing: The policies that recompute.
    """

    def __init__(self, task: _Task, space: Space):
        self._task = task
        first = task.layers(space.counts[0]) if space.with_policies else None
        self._layers = {} if first is None else {space.counts[0]: first}
        self._has_layers = first is not None and bool(first.runs)
        self.has_checkpoints = first is not None and self._has_layers and first.has_checkpoints
        self.has_loops = self._has_layers and first is not None and first.has_loops
        self.note = ""
        if first is not None and not first.runs:
            self.note = (
                "Nothing was chosen to be recomputed: no repeated layers were found in the loss (equal sequences of "
                "equations with products, each of which reads what the one before made, or a scan over them)."
            )
        are_alike = first is None or not first.has_batched_products  # then all products are with weights
        keeps = [k for k in RECOMPUTING if k is not Keep.PRODUCTS or not are_alike]
        self.recomputing = keeps if self._has_layers else []

    @property
    def keeps_all_as_written(self) -> bool:
        """Whether a step that keeps everything is the step as it is written."""
        return not self.has_checkpoints

    def layers(self, count: int | None) -> Layers:
        """The layers of the loss in so many micro-batches."""
        if count not in self._layers:
            self._layers[count] = self._task.layers(count)
        return self._layers[count]

    def policy(self, keep: Keep, count: int | None) -> RematPolicy | None:
        """That all layers keep the same; None where there are none, or none may be changed."""
        return uniform(self.layers(count).runs, keep) if self._has_layers else None


def _until_all_is_kept(tries: _Tries, space: Space, forms: _Forms) -> list[int | None]:
    """Tries keeping everything in more and more micro-batches, until that fits, and then as long as that is faster.

    Returns:
      The numbers of micro-batches with which recomputing may be faster, since not everything fits: the most first.
    """
    first = tries.all[-1]
    is_fitting = first.is_fit
    counts = [space.counts[0]]
    for count in space.counts[1:]:
        if tries.is_over:
            break
        own = tries.take(forms.policy(Keep.ALL, count), Keep.ALL, count)
        if is_fitting and own is not tries.best or _is_hopeless(own, tries.stop):
            break
        is_fitting = is_fitting or own.is_fit
        if is_fitting and not own.needs_memory:
            break
        if not is_fitting:
            counts.append(count)
            if len(counts) > MOST_UNFIT:
                break
    return counts[::-1][:MOST_COUNTS]


def _mix(layers: Layers, keep: Keep, count: int | None, mesh: LogicalMesh, tries: _Tries) -> None:
    """Tries policies that recompute more in the first k layers and less in the others.

    Mixtures of the policy and those that recompute less come first, then that with the next one that recomputes more.
    Of a pair that gains, k is halved in from there.

    Args:
      layers: Of the loss. keep: The best policy that is the same for all layers.
      count: Micro-batches. mesh: Of the best plan.
    """
    runs = layers.runs
    if any(r.is_loop for r in runs):
        return
    order = [Keep.ALL, *(k for k in RECOMPUTING if k is not Keep.PRODUCTS or keep is Keep.PRODUCTS)]
    is_best = keep is not Keep.ALL
    keep = keep if is_best else order[1]
    at, total = order.index(keep), sum(r.count for r in runs)
    pairs = [(keep, order[k], total) for k in (at - 1, at - 2) if k >= 0]
    pairs += [(more, keep, 0) for more in order[at + 1 : at + 2]]
    until = len(tries.all) + MOST_MIXTURES
    for first, rest, number in pairs:
        if tries.lacks_memory(first, count) or tries.out.issuperset((first, rest)):
            continue  # what keeps more fits even less; and what is between two that cannot win cannot
        take = lambda k, first=first, rest=rest: tries.take(first_layers(runs, first, rest, k), None, count, mesh)
        if _halve(take, number, total, is_best, until, tries):
            return


def _halve(take: Callable[[int], _Attempt], number: int, total: int, is_best: bool, until: int, tries: _Tries) -> bool:
    """Seeks in how many layers to recompute more, by halves; returns whether the best form is such a mixture.

    Args:
      take: Tries a mixture. number: Where to begin: at 0 or `total` layers. is_best: Whether that is the best form.
      until: As many forms may be tried in all.
    """
    gains, too_few, too_many, step = False, 0, total, (total + 1) // 2
    while step >= max(1, total // FINEST):
        for other in (number - step, number + step):
            if not too_few < other < too_many or len(tries.all) >= until or tries.is_over:
                continue
            own = take(other)
            if own is tries.best:
                number, gains = other, True
                break
            if own.lacks_memory:
                too_few = max(too_few, other)
                number = max(number, other)
            elif other > number:
                too_many = other
            elif not (is_best or gains):  # nothing is gained from `number` on
                number = too_many = other
        step //= 2
    return gains


def _is_hopeless(kept: _Attempt, stop: StopRequest) -> bool:
    """Whether no form in as many micro-batches, or in twice as many and so on, can win, whatever the memory: such as
    where so few examples are left in each that mesh axes cannot divide them.

    Args:
      kept: A form that keeps everything. stop: Asks to end.
    """
    if kept.has_plan or all(c.verdict != NOT_FASTER for c in kept.found.candidates):
        return False
    return _Form(kept.variant, kept.step, kept.posed).ruled_out(stop) is not None


def _reach_s(kept: _Attempt, stop: StopRequest) -> float | None:
    """No plan that keeps everything takes less, whatever the memory; recomputing only adds to that, unless layers have
    loops, and so do micro-batches."""
    question, meshes = kept.posed.question, kept.posed.meshes
    if math.isinf(question.budget_bytes):
        return kept.bound_s
    schedule = question.schedules(meshes[0].device_type)[0]
    if kept.is_fit and len(meshes) == 1 and kept.found.winner[0].schedule is schedule:
        price = kept.found.winner[1].certificate.capacity_price
        if price is not None and price.per_unit == 0:
            return price.bound
    return _free_bound_s(kept.posed, None, stop)


def _free_bound_s(posed: Posed, to_beat_s: float | None, stop: StopRequest) -> float | None:
    """No plan of a form takes less, whatever the memory; no more than what it has to beat is of interest."""
    question, meshes = posed.question, posed.meshes
    options = dataclasses.replace(question.options, relative_gap=max(question.options.relative_gap, _REACH_GAP))
    free = dataclasses.replace(
        question,
        budget_bytes=math.inf,
        schedule=question.schedules(meshes[0].device_type)[0],
        to_beat_s=math.inf if to_beat_s is None else to_beat_s,
        options=options,
    )
    found = search_meshes(free, meshes, None, stop)
    return min((c.bound_s for c in found.candidates), default=None)

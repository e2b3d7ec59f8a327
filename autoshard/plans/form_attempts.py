"""Forms of a training step, the questions that they pose, and what became of those that were tried."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.cluster import Cluster
from autoshard.interrupts import StopRequest
from autoshard.planner.mesh_prices import PricesOfMeshes
from autoshard.plans.effort import Effort
from autoshard.plans.form_bounds import FormBounds
from autoshard.plans.found import NO_MEMORY, NOT_FASTER, Found, open_bounds_s
from autoshard.plans.gaps import are_within
from autoshard.plans.logical_meshes import logical_meshes, searched_and_further
from autoshard.plans.make import Posed, Request, budget_of, homogeneous_slice, pose, traced_program
from autoshard.plans.mean_loss import why_no_mean_of
from autoshard.plans.mesh_search import ruled_out
from autoshard.plans.options import PlanOptions
from autoshard.plans.question import report
from autoshard.plans.search import gone_on, search
from autoshard.plans.step_variant import StepVariant, VariantCandidate
from autoshard.remat.few_layers import few_layers_of
from autoshard.remat.policy import Keep, RematPolicy
from autoshard.remat.rewrite import Layers, layers_of
from autoshard.trace.trace import trace
from autoshard.train_step import TrainStep, batch_size

WORTH = 0.02
"""Where nothing is asked for, other forms are tried if twice the memory could shorten the step by more than this share,
as the price of memory tells; and no more of them once memory without limit could not shorten it by more."""

_LEAST_S, _SHARE_OF_TIME = 10.0, 0.25
"""Once there is a plan, a form has this share of the time that passed for each mesh, and so many seconds at least."""


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """A form, the question that it poses, and its answer.

    Attributes:
      count: Of micro-batches; None for what the step says itself.
      to_beat_s: What it had to beat.
      needed_bytes: Of memory of a device, for the best plan with its gaps; None if there is none, or none that can win.
      is_fit: Whether there is one that fits.
    """

    variant: StepVariant
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
    def step_s(self) -> float:
        """Of its plan, by which it is compared with others; +inf without one that fits."""
        return self.found.step_s if self.is_fit else math.inf

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
        return VariantCandidate(name, self.found.step_s, self.bound_s, self.needed_bytes, verdict)


@dataclasses.dataclass(frozen=True, slots=True)
class Passed:
    """A form that is out of the question as its bounds tell, so that it was not even traced.

    Attributes:
      bound_s: No plan of it takes less; +inf if none fits the memory.
    """

    variant: StepVariant
    bound_s: float

    @property
    def lacks_memory(self) -> bool:
        """Whether no plan of it fits."""
        return math.isinf(self.bound_s)

    @property
    def candidate(self) -> VariantCandidate:
        """For people."""
        return VariantCandidate(
            str(self.variant), None, self.bound_s, None, NO_MEMORY if self.lacks_memory else NOT_FASTER
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
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
    effort: Effort = dataclasses.field(default_factory=Effort)

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

    @property
    def budget_bytes(self) -> float:
        """The memory limit per device."""
        device = homogeneous_slice(self.cluster).device_type
        return budget_of(device, self.request.get("memory_budget_bytes"), self.options)

    def bounds(self, keeps: Sequence[Keep]) -> FormBounds:
        """What forms of the step take at least, told from a loss of the whole batch with few layers; `keeps`: the
        policies."""
        state, batch = self.args
        whole = dataclasses.replace(self.step, parts=None)
        few = few_layers_of(whole, state, batch, layers_of(whole, state, batch).runs)
        ask = lambda keep: report(self.options, self.started, "bounds", keep.value)
        hardware, mesh, pins = homogeneous_slice(self.cluster), self.request.get("mesh"), self.request.get("pins")
        graph = trace(self.step.of_arrays(state.params).loss_fn, few.args).graph
        meshes, _ = searched_and_further(logical_meshes(graph, hardware, mesh, pins, self.options), self.options)
        parts = len(self.step.parts or (1,))
        return FormBounds(few, keeps, state, meshes, self.prices, self.options, parts, ask)

    def pose(self, policy: RematPolicy | None, count: int | None, best: Attempt | None) -> "Form":
        """The question of a form: the plan that beats `best` by more than the wanted gap."""
        variant = StepVariant(policy, self.parts(count))
        step = variant.of(self.step)
        report(self.options, self.started, "form", str(variant))
        traced, program = traced_program(step, self.args, self.donate_argnums, self.options, self.started)
        posed = pose(
            traced,
            program,
            self.cluster,
            options=self.options,
            started=self.started,
            start=self.start,
            donate_argnums=self.donate_argnums,
            **self.request,
        )
        question = dataclasses.replace(posed.question, prices=self.prices, effort=self.effort)
        posed = dataclasses.replace(posed, question=question)
        return Form(variant, step, posed).to_beat(best)


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """A form of the step, and the question that it poses."""

    variant: StepVariant
    step: TrainStep
    posed: Posed

    def to_beat(self, best: Attempt | None) -> "Form":
        """The same, with another plan to beat by more than the wanted gap."""
        question = self.posed.question
        to_beat_s = math.inf if best is None else best.cost_s * (1 - question.options.relative_gap)
        question = dataclasses.replace(question, to_beat_s=to_beat_s)
        return dataclasses.replace(self, posed=dataclasses.replace(self.posed, question=question))

    def ruled_out(self, stop: StopRequest) -> Found | None:
        """The outcome if its first bounds rule it out, whatever the memory; None if not."""
        question, meshes = self.posed.question, self.posed.meshes
        schedule = question.schedules(meshes[0])[0]
        return ruled_out(dataclasses.replace(question, schedule=schedule), meshes, stop)

    def attempted(self, count: int | None, found: Found) -> Attempt:
        """The attempt of which this is the outcome."""
        question = self.posed.question
        needed_bytes, is_fit = None, False
        if found.best is not None:
            found = dataclasses.replace(found, evaluation=found.evaluated)
            needed_bytes = found.evaluated.reserved_bytes
            is_fit = are_within(found.evaluated.peak[0], needed_bytes, question.budget_bytes)
        return Attempt(self.variant, count, self.step, self.posed, found, question.to_beat_s, needed_bytes, is_fit)


@dataclasses.dataclass
class Tries:
    """What has been tried so far.

    Attributes:
      asked: Asks to end.
      enough: A plan is good enough that could be faster by this share at most.
      all: What became of each form, in turn. best: The best so far.
      bounds: Of forms; None where layers keep what they are written to keep.
      reach_s: No form takes less, whatever the memory; None where that is not known.
      uncut: Why no micro-batches were tried, where the loss may be another one in them.
    """

    task: Task
    asked: StopRequest
    enough: float
    all: list[Attempt | Passed] = dataclasses.field(default_factory=list)
    best: Attempt | None = None
    bounds: FormBounds | None = None
    reach_s: float | None = None
    uncut: str = ""

    @property
    def stop(self) -> StopRequest:
        """Asks to end; so does the time, once there is a plan."""
        return self.asked if self.best is None else self.asked.until(self.best.posed.question.until_s)

    @property
    def attempts(self) -> list[Attempt]:
        """Those that were searched."""
        return [own for own in self.all if isinstance(own, Attempt)]

    @property
    def is_settled(self) -> bool:
        """Whether no form that comes into question can be faster by more than what is worth a search."""
        if self.best is None or self.reach_s is None:
            return False
        return min(own.cost_s for own in self.attempts) * (1 - self.enough) <= self.reach_s

    @property
    def is_over(self) -> bool:
        """Whether the search ends here."""
        return self.stop.requested or self.is_settled

    def take(self, policy: RematPolicy | None, count: int | None, is_passed: bool = True) -> Attempt | Passed:
        """Tries a form, which becomes the best if it is.

        Args:
          policy, count: The form. is_passed: Whether it is passed over if its bounds put it out of the question.
        """
        if is_passed and (passed := self._passed(policy, count)) is not None:
            self.all.append(passed)
            return passed
        form = self.task.pose(policy, count, self.best)
        question = form.posed.question
        if self.best is not None and question.options.work_limit is None:
            until_now_s = time.perf_counter() - question.started
            limit_s = min(question.options.mesh_limit_s, max(_LEAST_S, _SHARE_OF_TIME * until_now_s))
            limited = dataclasses.replace(question.options, mesh_limit_s=limit_s)
            question = dataclasses.replace(question, options=limited)
        own = form.attempted(count, search(question, form.posed.meshes, None, self.asked))
        self.all.append(own)
        if own.step_s < (math.inf if self.best is None else self.best.step_s):
            self.best = own
        return own

    def go_on(self) -> None:
        """Searches further meshes for the best form; all forms are tried on the same few."""
        own = self.best
        if own is None or not own.has_plan or self.stop.requested:
            return
        posed, schedule = own.posed, own.found.winner[0].schedule
        question = dataclasses.replace(posed.question, schedule=schedule, prices=None)  # of more axes, each asked once
        found = gone_on(question, posed.meshes, own.found, posed.further, self.asked)
        if found is not own.found:
            self.best = Form(own.variant, own.step, posed).attempted(own.count, found)
            self.all[self.all.index(own)] = self.best

    def _passed(self, policy: RematPolicy | None, count: int | None) -> Passed | None:
        """What bounds tell of a form that they put out of the question; None of another one."""
        if self.bounds is None or policy is None:
            return None
        variant = StepVariant(policy, self.task.parts(count))
        if self.bounds.least_bytes(policy, count) > self.task.budget_bytes:
            return Passed(variant, math.inf)
        to_beat_s = math.inf if self.best is None else self.best.cost_s * (1 - self.task.options.relative_gap)
        kernels_s = self.bounds.kernels_s(policy)
        return Passed(variant, kernels_s) if kernels_s >= to_beat_s else None

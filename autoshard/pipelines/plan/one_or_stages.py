"""One program or stages: a training step on one kind of device is planned both ways, and the faster plan is taken.

The one program comes first. Its step is what stages have to beat by more than the wanted gap: the search for them ends
where its bound shows that they cannot, and only an arrangement that does is planned stage by stage.

Both have the same limit of memory and the same costs of computation and collectives, with one difference: in a stage,
all times add up, while one program counts what waits (`hidden_s`). So where collectives hide, stages are priced from
above, and what they win by is the least that they gain. The bound of the plan that is taken is the lesser of the two.
"""

import dataclasses
import math
import time
from collections.abc import Callable

from autoshard.errors import AutoshardError, MemoryBudgetError, SolverError
from autoshard.interrupts import stop_on_signals
from autoshard.pipelines.plan.arrange import Arranged, StagedTask, arrange
from autoshard.pipelines.plan.make import plan_arranged
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.pipelines.search.alternative import Alternative
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.question import axes_text, until_s
from autoshard.plans.step_variant import StepVariant, VariantCandidate, VariantChoice
from autoshard.printing import counted
from autoshard.solver.options import ROUNDING
from autoshard.solver.problem import Status

WORTH_TELLING = 0.1
"""Stages are pointed out where more than this share of a step waits for what is sent between nodes."""

IN_STAGES = "in stages"
"""The name of a form in stages where no arrangement of it is known."""


_NOT_SOUGHT = VariantCandidate(IN_STAGES, None, 0.0, None, "stopped")
"""What is told of stages that were not sought: Ctrl-C came before, or the time was over."""


def plan_either(plan_one: Callable[[], ProgramPlan], task: StagedTask) -> ProgramPlan | PipelinePlan:
    """The faster of the plan of one program and the plan in stages, which lists the other among what was considered.

    The first Ctrl-C ends the search with the plan of one program, if that is there already. Where that took all of
    `PlanOptions.time_limit_s`, stages are not sought.

    Args:
      plan_one: Makes the plan of one program. task: What is planned in stages.

    Raises:
      MemoryBudgetError, SolverError: There is neither.
      AutoshardError: Whatever else `plan_one` raises.
    """
    started = time.perf_counter()
    with stop_on_signals() as stop:
        try:
            one = plan_one()
        except SolverError as error:  # of memory, mostly
            return in_stages_instead(error, task)
        to_beat_s = one.estimate.step_s * (1 - task.options.relative_gap)
        arranged, staged, verdict, bound_s = None, None, "", math.inf
        if stop.until(until_s(task.options, started)).requested:
            return _beside_stages(one, _NOT_SOUGHT, task.options.relative_gap, started)
        try:
            arranged = arrange(task, to_beat_s=to_beat_s)
            bound_s = arranged.bound_s
            if arranged.step_s < to_beat_s:
                staged = plan_arranged(arranged)
            else:
                verdict = "not faster, by the costs of its layers"
        except KeyboardInterrupt:
            if stop.is_urgent:
                raise
            verdict, bound_s = "stopped", 0.0
        except AutoshardError as error:
            verdict = str(error).partition("\n")[0]
    if staged is not None and staged.step_s < to_beat_s:
        return _beside_one_program(staged, one, started)
    step_s = None if arranged is None else arranged.step_s
    if staged is not None:
        step_s, verdict = staged.step_s, "not faster, with its stages planned"
    name = IN_STAGES if arranged is None else arrangement_text(arranged)
    candidate = VariantCandidate(name, step_s, bound_s, None, verdict)
    return _beside_stages(one, candidate, task.options.relative_gap, started)


def in_stages_instead(error: SolverError, task: StagedTask) -> PipelinePlan:
    """The plan in stages of a step that no plan of one program was found for.

    Args:
      error: Why there is none. task: What is planned.

    Raises:
      SolverError: There is none in stages either; of the kind of `error`.
    """
    try:
        staged = plan_arranged(arrange(task))
    except AutoshardError as also:
        both = f"There is a plan neither in stages nor of one program. In stages: {also} As one program: {error}"
        raise type(error)(both) from also
    reason = "does not fit the memory" if isinstance(error, MemoryBudgetError) else "none was found in time"
    draws = (
        "It is the same step."
        if task.step.parts
        else "Micro-batches draw their random numbers anew; else it is the same step."
    )
    warning = (
        f"The step is run in stages, since no plan of one program that fits the memory was found. {draws} To be told "
        'how much memory one program needs, forbid it: PlanOptions(pipelines="never").'
    )
    considered = (*staged.considered, Alternative("one program", None, reason))
    return dataclasses.replace(staged, considered=considered, warnings=(*staged.warnings, warning))


def hint(plan: ProgramPlan) -> str | None:
    """What to say of stages for a plan of one program, where they have not been tried; None where there is no call.

    Pipelines send between nodes what crosses the borders of stages, not weights and gradients of all layers. What a
    step waits for now between nodes is about as much as stages could save.
    """
    mesh, e = plan.logical_mesh, plan.estimate
    across = {axis.name for axis in mesh.axes if any(level.link.level > 0 for level in axis.levels)}
    waits_s = sum(c.exposed_s for c in e.collectives if across & set(c.axes))
    if not waits_s > WORTH_TELLING * e.step_s:
        return None
    return (
        f"{waits_s / e.step_s:.0%} of the step waits for what is sent between nodes. Pipelines of stages send less: "
        'PlanOptions(pipelines="search") plans them too, and takes the faster plan; "never" leaves this warning out.'
    )


def arrangement_text(arranged: Arranged) -> str:
    """An arrangement in a line."""
    pipelines = arranged.arrangement.pipelines
    first, options = pipelines[0], arranged.priced.table.options
    devices = sorted({options[submesh.option].num_devices for p in pipelines for submesh in p.submeshes})
    stages, rounds = len(first.stages), counted(first.num_micro_batches, "micro-batch", "micro-batches")
    each = " or ".join(map(str, devices))
    return (
        f"{len(pipelines)} x {counted(stages, 'stage')} of {each} device{'s' if devices[-1] > 1 else ''}, "
        f"{first.schedule.value}, {rounds} of {first.micro_batch_size}"
    )


def _beside_stages(one: ProgramPlan, stages: VariantCandidate, relative_gap: float, started: float) -> ProgramPlan:
    """The plan of one program, with the best form in stages among what was considered."""
    own = one.certificate
    bound = min(own.bound, stages.bound_s)
    gap = (own.objective - bound) / own.objective if own.objective else 0.0
    status = Status.OPTIMAL if gap <= max(relative_gap, ROUNDING) else Status.FEASIBLE
    certificate = dataclasses.replace(own, status=status, bound=bound, gap=gap, solve_s=time.perf_counter() - started)
    choice = one.choice
    if choice is None:
        e, variant = one.estimate, StepVariant()
        alone = VariantCandidate(
            str(variant), own.objective, own.bound, e.reserved_bytes or e.peak_bytes, own.status.value
        )
        choice = VariantChoice(variant, (alone,))
    choice = dataclasses.replace(choice, candidates=(*choice.candidates, stages))
    return dataclasses.replace(one, certificate=certificate, choice=choice)


def _beside_one_program(staged: PipelinePlan, one: ProgramPlan, started: float) -> PipelinePlan:
    """The plan in stages, with that of one program among what was considered."""
    own = staged.certificate
    bound_s = min(own.bound_s, one.certificate.bound)
    gap = (own.searched_s - bound_s) / own.searched_s
    form = "" if one.choice is None else f", {one.choice}"
    told = Alternative(f"one program, planned as a whole: {axes_text(one.axes)}{form}", one.estimate.step_s)
    certificate = dataclasses.replace(own, bound_s=bound_s, gap=gap, search_s=time.perf_counter() - started)
    return dataclasses.replace(staged, certificate=certificate, considered=(*staged.considered, told))

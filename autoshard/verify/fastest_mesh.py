"""Which of several meshes, whose plans are predicted to be nearly as fast, has the fastest compiled program.

Predictions of two meshes often differ by less than they are exact: a schedule exposes more than the plan's own, and a
narrow product takes longer. So the plans of the best meshes are confirmed each by itself (`closed_loop.py`), compiled
in every way that `plan.jit` tries, and the one whose schedule is the fastest by replay is taken. It takes the place of
the plan that is predicted to be the fastest, and its certificate tells what that costs by the prediction at most.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autoshard.cluster import LogicalMesh
from autoshard.errors import MemoryBudgetError, SolverError
from autoshard.execution.candidates import CandidateFigures
from autoshard.plans.confirmation import ReplayedMesh
from autoshard.plans.found import NO_MEMORY, NOT_TRIED, PASSED_BY
from autoshard.plans.make import Posed
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.question import axes_text, report
from autoshard.verify.closed_loop import plan_confirmed, proven_of
from autoshard.verify.compile import compile_step
from autoshard.verify.devices import devices_for, options_for
from autoshard.verify.targets import target_of
from autoshard.verify.verify import by_shape

NEAR = 0.05
"""By how much slower than the best the plan of a mesh may be predicted to be compiled as well: a choice. Predicted
steps of six models were 0.59 to 1.26 times the replayed ones, on two meshes of one model 0.82 and 0.90, and 0.90 and
0.96 (`benchmarks/results/exposed.md`)."""


def plan_checked(posed: Posed, fn: Callable[..., Any], args: Sequence[Any]) -> ProgramPlan:
    """The plan that the compiler confirms; of up to `PlanOptions.compile_check_meshes` meshes, the fastest by replay.

    A plan that is not confirmed takes the place of none that is.

    Args:
      posed: What is to be planned. fn, args: The function and its arguments, by shape.

    Raises:
      As `autoshard.plan`.
    """
    first = plan_confirmed(posed, fn, args)
    near = _near(posed, first)
    if not near or first.confirmation is None or first.confirmation.chosen is None:  # no GPUs, or nothing hides
        return first
    replayed: list[tuple[ProgramPlan, CandidateFigures]] = []
    for plan in (first, *(_confirmed_on(mesh, posed, fn, args) for mesh in near)):
        if plan is not None and _is_confirmed(plan) >= _is_confirmed(first):
            report(posed.question.options, posed.question.started, "replay", axes_text(plan.axes))
            replayed.append((plan, _fastest_way(plan, fn, args)))
    best, _ = min(replayed, key=lambda pair: pair[1].step_s)
    assert best.confirmation is not None
    among_all = dataclasses.replace(best.certificate, bound=first.certificate.bound)
    meshes = tuple(ReplayedMesh(plan.axes, plan.certificate.objective, way) for plan, way in replayed)
    return dataclasses.replace(
        best,
        certificate=proven_of(among_all, best.certificate.objective, posed.question),
        candidates=first.candidates,
        confirmation=dataclasses.replace(best.confirmation, meshes=meshes),
    )


def _near(posed: Posed, first: ProgramPlan) -> list[LogicalMesh]:
    """The other meshes whose plans are predicted to be nearly as fast as the first; of those that cannot be faster by
    what is wanted, only that is known. Those of one axis come first, since what XLA transposes between gathers over two
    axes is not priced; then the fastest.
    """
    limit_s = (1 + NEAR) * first.certificate.objective
    out = NO_MEMORY, NOT_TRIED, PASSED_BY
    others = [c for c in first.candidates if c.axes != first.axes and c.verdict not in out]
    least_s = {c.hardware: c.bound_s if c.step_s is None else c.step_s for c in others}
    near = [m for m in (*posed.meshes, *posed.further) if str(m) in least_s and least_s[str(m)] <= limit_s]
    near.sort(key=lambda m: (len(m.axes) > 1, least_s[str(m)]))
    return near[: posed.question.options.compile_check_meshes - 1]


def _confirmed_on(mesh: LogicalMesh, posed: Posed, fn: Callable[..., Any], args: Sequence[Any]) -> ProgramPlan | None:
    """The plan of one mesh that the compiler confirms, or the nearest to that; None if none is found again."""
    try:
        return plan_confirmed(posed.on(mesh), fn, args)
    except (MemoryBudgetError, SolverError):
        return None


def _is_confirmed(plan: ProgramPlan) -> bool:
    return plan.confirmation is not None and plan.confirmation.is_confirmed


def _fastest_way(plan: ProgramPlan, fn: Callable[..., Any], args: Sequence[Any]) -> CandidateFigures:
    """The way in which `plan.jit` schedules the program of a plan on its own GPUs."""
    target = target_of(plan)
    devices = devices_for(target, plan.axes, plan.devices_per_node, plan.logical_mesh.torus)
    shapes = jax.tree.map(by_shape, args)
    step = compile_step(plan, fn, shapes, devices, options_for(target), choosing=plan.interface.choosing)
    assert step.chosen is not None
    return step.chosen

"""Where the search on one mesh begins: from the layouts that the caller has, or from what a simpler mesh can do."""

from collections.abc import Callable, Sequence

from autoshard.errors import AnnotationError, LayoutError, PinError
from autoshard.interrupts import StopRequest
from autoshard.planner.build import Formulation
from autoshard.planner.joined_axes import choices_apart, joined_meshes
from autoshard.planner.labels import labels_of
from autoshard.plans.question import Question, axes_text, report
from autoshard.solver import evaluate, solve
from autoshard.solver.options import SolverOptions
from autoshard.solver.problem import Solution

START_SHARE = 0.3
"""Share of the time limit that the search for the plan with given layouts may take."""
JOINED_SHARE = 0.5
"""Share of the time limit that each mesh of joined axes may take; most are solved in a small part of it."""


def starting_choices(
    question: Question, formulation: Formulation, limits: SolverOptions, stop: StopRequest
) -> tuple[tuple[int, ...] | None, str | None]:
    """The choices of the best plan that has the layouts of `question.start`; or None, and why there are none."""
    axes = axes_text([(axis.name, axis.size) for axis in formulation.mesh.axes])
    report(question.options, question.started, "start", axes)
    try:
        narrowed = question.formulation(formulation.mesh, starting=True)
    except (PinError, LayoutError) as error:  # such as an axis that this mesh lacks
        return None, str(error)
    found = solve(narrowed.problem, limits.part(START_SHARE), stop=stop)
    if found.choices is None:
        return None, f"no plan with these layouts was found on mesh {axes} within the memory limit."
    return same_choices(formulation, narrowed, found.choices), None


def same_choices(formulation: Formulation, other: Formulation, choices: Sequence[int]) -> tuple[int, ...] | None:
    """The choices of one problem that mean what `choices` mean in another one of the same program and axes; None where
    it lacks one of them.
    """
    wanted = [theirs[choice] for theirs, choice in zip(labels_of(other).choices, choices, strict=True)]
    pairs = list(zip(labels_of(formulation).choices, wanted, strict=True))
    return tuple(own.index(one) for own, one in pairs) if all(one in own for own, one in pairs) else None


def choices_of_joined_axes(
    question: Question,
    formulation: Formulation,
    limits: SolverOptions,
    solve_one: Callable[[Formulation, SolverOptions], Solution],
) -> tuple[int, ...] | None:
    """The choices of the best plan of those meshes on which two axes of this one are joined; None if there is none.

    Meshes of three axes and more are worth it: their problems are large, and a plan of theirs can be missed altogether
    within the time limit.
    """
    best = None
    for first, mesh in joined_meshes(formulation.mesh):
        report(question.options, question.started, "start", axes_text([(axis.name, axis.size) for axis in mesh.axes]))
        try:
            joined = question.formulation(mesh)
        except (PinError, LayoutError, AnnotationError):  # such as one that names or asks for an axis of the two
            continue
        found = solve_one(joined, limits.part(JOINED_SHARE))
        choices = None if found.choices is None else choices_apart(formulation, joined, first, found.choices)
        if choices is None:
            continue
        priced = evaluate(formulation.problem, choices)
        if priced.feasible and (best is None or priced.objective < best[0]):
            best = priced.objective, choices
    return None if best is None else best[1]

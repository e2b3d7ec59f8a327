"""Plans on the way from one plan to another: the first layers do as the one, the others as the other.

Where two plans differ, nodes of the problem are walked through from the first on, neighbours before others (breadth
first): so a layer comes with its backward pass and its update, which hang on it, before the next layer. As far as the
walk has come, nodes choose what the other plan chooses. (Path relinking; Glover, Laguna and Marti, Fundamentals of
scatter search and path relinking, 2000.)
"""

import collections
import dataclasses
from collections.abc import Sequence

from autoshard.planner.build import Formulation
from autoshard.planner.timeline import asked_for
from autoshard.solver.evaluate import evaluate
from autoshard.solver.problem import Problem

_CUTS = 6
"""The way is cut into so many parts at first."""

_HALVINGS = 3
"""How often the part around the best plan is halved."""


@dataclasses.dataclass(frozen=True, slots=True)
class Relinked:
    """A plan on the way, and the time of its step as scheduled."""

    choices: tuple[int, ...]
    step_s: float


def relinked(f: Formulation, one: Sequence[int], other: Sequence[int]) -> Relinked | None:
    """The fastest plan found on the way from `one` to `other`; None if none of them fits the memory."""
    order = _walk(f.problem, [a != b for a, b in zip(one, other, strict=True)])
    tried: dict[int, Relinked | None] = {}

    def at(place: int) -> Relinked | None:
        if place not in tried:
            choices = list(one)
            for node in order[:place]:
                choices[node] = other[node]
            fits = evaluate(f.problem, choices).feasible
            tried[place] = Relinked(tuple(choices), asked_for(f, choices).step_s) if fits else None
        return tried[place]

    part = len(order) / _CUTS
    for cut in range(1, _CUTS):
        at(round(cut * part))
    for _ in range(_HALVINGS):
        part /= 2
        found = [(plan.step_s, place) for place, plan in tried.items() if plan is not None]
        if not found or part < 1:
            break
        _, best = min(found)
        for place in (round(best - part), round(best + part)):
            if 0 < place < len(order):
                at(place)
    return min((plan for plan in tried.values() if plan is not None), key=lambda plan: plan.step_s, default=None)


def _walk(problem: Problem, differs: Sequence[bool]) -> list[int]:
    """The nodes that differ, breadth first from the first of each part of the problem that they make."""
    neighbours: dict[int, list[int]] = {node: [] for node, own in enumerate(differs) if own}
    for edge in problem.edges:
        if differs[edge.source] and differs[edge.target]:
            neighbours[edge.source].append(edge.target)
            neighbours[edge.target].append(edge.source)
    order: dict[int, None] = {}
    for first in neighbours:
        waiting = collections.deque([] if first in order else [first])
        while waiting:
            node = waiting.popleft()
            if node not in order:
                order[node] = None
                waiting.extend(neighbours[node])
    return list(order)

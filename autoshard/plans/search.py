"""The search for a plan: over the schedules of the compiler, the logical meshes, and the orders of their devices."""

import dataclasses
import functools
import math
import os
from collections.abc import Sequence

from autoshard.cluster import LogicalMesh, Slice
from autoshard.interrupts import StopRequest
from autoshard.planner.decode import evaluate
from autoshard.plans.found import LEFT, NOT_FASTER, PASSED_BY, Found
from autoshard.plans.master_problem import Mixture
from autoshard.plans.mesh_search import search_meshes
from autoshard.plans.mesh_walk import walked
from autoshard.plans.placing import MOST_ROUNDS, better_order, close_orders
from autoshard.plans.pricing import Timed
from autoshard.plans.question import Question, axes_of

_MOST_IN_VAIN = 2
"""Orders of the devices of one mesh of which so many hold nothing faster are not followed up any further."""


def search(
    question: Question,
    meshes: Sequence[LogicalMesh],
    solution: str | os.PathLike[str] | None,
    stop: StopRequest,
    further: Sequence[LogicalMesh] = (),
) -> Found:
    """The outcome under the first schedule under which a plan fits the memory (`PlanOptions.schedule`).

    Nothing hides under a later schedule that does not under an earlier one: what cannot beat the best there is not
    tried again.

    Args:
      question, meshes: What is to be planned, and the meshes that are all searched.
      solution: A file that solves the problem of the only mesh; None to solve the problems here.
      stop: Asks to end; so does the time, once there is a plan (`Question.until_s`).
      further: Meshes of which those are searched that a walk from the best mesh comes by (`walked`).

    Raises:
      FileFormatError: If `solution` is none of the problem.
    """
    found = Found(None, (), ())
    left_for_order = functools.partial(_has_better_order, question) if len(meshes) == 1 else _never
    timed = stop.until(question.until_s)
    for schedule in question.schedules(meshes[0]):
        asked = dataclasses.replace(question, schedule=schedule)
        found = search_meshes(asked, meshes, solution, stop, is_left=left_for_order)
        if found.best is not None or solution is not None or stop.requested:
            if solution is not None:
                return found
            return _placed(asked, meshes, walked(asked, found, further, timed, _placed), timed)
        if all(c.verdict == NOT_FASTER for c in found.candidates):
            return found
    return found


def gone_on(
    question: Question,
    meshes: Sequence[LogicalMesh],
    found: Found,
    further: Sequence[LogicalMesh],
    stop: StopRequest,
) -> Found:
    """The outcome after a search over `meshes`, which is done, went on to `further` ones; the devices of a new best are
    put in order."""
    stop = stop.until(question.until_s)
    beyond = walked(question, found, further, stop, _placed)
    return beyond if beyond.best is found.best else _placed(question, meshes, beyond, stop)


def _placed(question: Question, meshes: Sequence[LogicalMesh], found: Found, stop: StopRequest) -> Found:
    """The outcome after the devices of the best plan were put in order, and it was made again, as often as that helps.

    Each mesh in a new order is one more candidate, and what was found for it takes the place of the best if it is
    faster.
    """
    for _ in range(MOST_ROUNDS):
        if question.hardware is None or found.best is None or stop.requested:
            break
        found = dataclasses.replace(found, evaluation=found.evaluated)
        mesh = better_order(question.hardware, found.evaluated, question.options.relative_gap)
        if mesh is None:
            break
        worthwhile_s = max(found.cost_s, found.to_beat_s(question.options.relative_gap))
        asked = dataclasses.replace(question, to_beat_s=min(question.to_beat_s, worthwhile_s))
        beside = None if found.is_done else _Beside(question, question.hardware, found, stop)
        again = search_meshes(asked, [mesh], None, stop, after=found, is_left=beside or _never)
        if beside is not None and beside.found is not None and again.best is not None:
            again = again.after(beside.found, beside.to_beat_s)
            to_beat_s = min(question.to_beat_s, again.cost_s * (1 - question.options.relative_gap))
            if again.best is beside.found.best and beside.mixture_s < to_beat_s:  # left too early, maybe
                asked = dataclasses.replace(question, to_beat_s=to_beat_s)
                again = again.after(search_meshes(asked, [mesh], None, stop, after=again), to_beat_s)
        candidates = (*found.candidates, *again.candidates)
        if again.best is None or again.step_s >= found.step_s:
            found = dataclasses.replace(found, candidates=candidates)
            break
        found = dataclasses.replace(again, candidates=candidates, warnings=found.warnings)
    return _with_close_orders(question, _without_left(question, meshes, found, stop), stop)


class _Beside:
    """Asks once, before more time goes to an early plan, whether the order closest to its own is better.

    Attributes:
      found: What was found there; None if nothing was asked. to_beat_s: What it had to beat.
      mixture_s: The best mixture on the order of the early plan, when it was asked.
    """

    def __init__(self, question: Question, hardware: Slice, before: Found, stop: StopRequest) -> None:
        """`before`: What was found on the first order, to begin with."""
        self.found: Found | None = None
        self.to_beat_s, self.mixture_s = math.inf, math.inf
        self._question, self._hardware, self._before, self._stop = question, hardware, before, stop

    def __call__(self, timed: Timed, mixture: Mixture) -> bool:
        """Whether there is a faster plan. It is hardly sought where no mixture is faster than this plan."""
        gap, evaluation = self._question.options.relative_gap, evaluate(timed.formulation, timed.choices)
        searched = {c.hardware for c in self._before.candidates}
        close = [mesh for mesh in close_orders(self._hardware, evaluation, gap) if str(mesh) not in searched]
        if self.found is not None or not close:
            return False
        self.mixture_s = mixture.step_s
        self.to_beat_s = min(self._question.to_beat_s, timed.step_s * (1 - gap))
        self.found = _on_close_order(self._question, self._before, close[0], self.to_beat_s, self._stop)
        return self.found.is_done


def _never(timed: Timed, mixture: Mixture) -> bool:
    """No mesh is left."""
    return False


def _has_better_order(question: Question, timed: Timed, _: Mixture) -> bool:
    """Whether a plan would be faster with the devices of its mesh in another order."""
    if question.hardware is None:
        return False
    evaluation = evaluate(timed.formulation, timed.choices)
    return better_order(question.hardware, evaluation, question.options.relative_gap) is not None


def _with_close_orders(question: Question, found: Found, stop: StopRequest) -> Found:
    """The outcome after the orders of the devices were searched that are closest to the best, by what its plan would
    take there: other plans may be faster. It ends with an order that is out of the question.

    Each begins with the best plan and the weights that bound best, with which mostly the first bound tells that nothing
    is to be found; else soon the best mixture of plans does.
    """
    if question.hardware is None or found.best is None:
        return found
    gap, searched = question.options.relative_gap, {c.hardware for c in found.candidates}
    while True:
        found = dataclasses.replace(found, evaluation=found.evaluated)
        close = close_orders(question.hardware, found.evaluated, gap)
        mesh = next((mesh for mesh in close if str(mesh) not in searched), None)
        own = [c for c in found.candidates if c.axes == axes_of(found.winner[0].mesh)]
        in_vain = sum(c.verdict in (LEFT, PASSED_BY, NOT_FASTER) for c in own)
        if mesh is None or in_vain >= _MOST_IN_VAIN or stop.requested:
            return found
        searched.add(str(mesh))
        worthwhile_s = min(question.to_beat_s, found.to_beat_s(gap))
        again = _on_close_order(question, found, mesh, worthwhile_s, stop)
        found = found.after(again, min(question.to_beat_s, found.cost_s * (1 - gap)))
        if again.best is None:  # those that are farther will hardly be better
            return found


def _on_close_order(question: Question, found: Found, mesh: LogicalMesh, to_beat_s: float, stop: StopRequest) -> Found:
    """What is found on a mesh with its devices in another order, where there is something to beat; it is left as soon
    as no mixture of plans beats that."""
    asked = dataclasses.replace(question, to_beat_s=to_beat_s)
    is_left = lambda _, mixture: mixture.step_s >= to_beat_s
    return search_meshes(asked, [mesh], None, stop, after=found, is_left=is_left)


def _without_left(question: Question, meshes: Sequence[LogicalMesh], found: Found, stop: StopRequest) -> Found:
    """The outcome after meshes that were left are searched to the end, if they may still hold a better plan."""
    left = [c for c in found.candidates if c.verdict == LEFT and c.hardware in set(map(str, meshes))]
    if not left or found.best is None or stop.requested:
        return found
    others = tuple(c for c in found.candidates if c not in left)
    is_best = str(found.winner[0].mesh) in {c.hardware for c in left}
    cutoff = found.cost_s * (1 - question.options.relative_gap)
    if not is_best and min(c.bound_s for c in left) >= cutoff:
        return found
    to_beat_s = question.to_beat_s if is_best else min(question.to_beat_s, cutoff)
    asked = dataclasses.replace(question, to_beat_s=to_beat_s)
    again = search_meshes(asked, meshes, None, stop, after=found)
    kept = again if is_best or again.best is not None else found
    return dataclasses.replace(kept, candidates=(*again.candidates, *others), warnings=found.warnings)

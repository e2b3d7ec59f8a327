"""The walk over logical meshes of more axes, from the best of few."""

import dataclasses
from collections.abc import Callable, Sequence

from autoshard.cluster import LogicalMesh
from autoshard.interrupts import StopRequest
from autoshard.planner.build import Formulation
from autoshard.planner.choices import fastest_kernels_s
from autoshard.plans.found import Found
from autoshard.plans.mesh_search import search_meshes
from autoshard.plans.mesh_steps import MeshSteps
from autoshard.plans.question import Question

_LEAST_WALKED, _WORTH_A_WALK, _MOST_WALKED, _LONGEST_WALK = 16, 0.01, 12, 2.0
"""Meshes of more axes are walked over for at least so many devices (eight have one such mesh), and where a plan takes
more than this share beyond its kernels; how many at most, and with how many times what was done before: choices.
From data=128, tensor=8 of GPT-3 on 1,024 H100, ten are."""

_GAP_ON_THE_WAY = 0.015
"""How exactly meshes are solved on the way, at least: enough to tell where to go, and a walk comes farther so. The
mesh it ends at is solved as exactly as is asked for, unless its plan waits longer than the solver counts."""

Placed = Callable[[Question, Sequence[LogicalMesh], Found, StopRequest], Found]
"""The outcome of a search over some meshes after the devices of its best plan were put in order."""


def walked(
    question: Question, found: Found, further: Sequence[LogicalMesh], stop: StopRequest, placed: Placed
) -> Found:
    """The outcome after a walk over `further` meshes from the best so far: each mesh a step from it is searched, and is
    the best from then on if it is faster by more than the wanted gap, be it with its devices in another order.

    It ends where no step gains, where kernels alone would take nearly as long on the mesh that it begins with, and
    after `_LONGEST_WALK` times as much as was done before. A mesh that is neither faster nor out of the question by
    then is passed by: the proof is not about it. Nobody walks among few devices.
    """
    if found.best is None or not further or further[0].num_devices < _LEAST_WALKED:
        return found
    if _gain_s(found.winner[0], found.cost_s) < _WORTH_A_WALK * found.cost_s:
        return found
    best = _walk(question, found, further, stop, placed)
    is_proven = best.winner[1].certificate.gap <= question.options.relative_gap or best.waits_longer
    return best if is_proven or best.winner[0].mesh is found.winner[0].mesh else _proven(question, best, stop)


def _proven(question: Question, found: Found, stop: StopRequest) -> Found:
    """The outcome after the mesh of the best was searched again, as exactly as is asked for."""
    mesh = found.winner[0].mesh
    again = search_meshes(question, [mesh], None, stop, after=found)
    own = [c for c in found.candidates if c.hardware == str(mesh)]
    others = [c for c in found.candidates if c.hardware != str(mesh)]
    is_better = again.best is not None and again.cost_s <= found.cost_s and again.fits >= found.fits
    bound_s = max(c.bound_s for c in (*own, *again.candidates))
    kept = dataclasses.replace((again.candidates if is_better else own)[-1], bound_s=bound_s)
    best = again if is_better else found
    return dataclasses.replace(best, candidates=(*others, kept), warnings=found.warnings)


def _walk(question: Question, found: Found, further: Sequence[LogicalMesh], stop: StopRequest, placed: Placed) -> Found:
    """`walked`, once it is known that a walk is worth it, and as far as it is proven on the way; without branches, as
    these take most of the time and tell no other way to go."""
    is_over = question.effort.limit(_LONGEST_WALK)
    steps, last, tried = MeshSteps(further), None, {str(found.winner[0].mesh)}
    is_moving = True
    while is_moving:
        is_moving = False
        for step, mesh in steps.of(found.winner[0].mesh, last):
            if stop.requested or is_over() or len(tried) > _MOST_WALKED:
                return found
            if str(mesh) in tried:
                continue
            tried.add(str(mesh))
            before, found = found, _with_mesh(question, found, mesh, stop, placed)
            is_moving = found.best is not before.best
            if is_moving:
                last = step
                break
    return found


def _with_mesh(question: Question, found: Found, mesh: LogicalMesh, stop: StopRequest, placed: Placed) -> Found:
    """The outcome after one more mesh was searched for a faster plan than the best."""
    options = question.options
    limited = dataclasses.replace(options, relative_gap=max(options.relative_gap, _GAP_ON_THE_WAY))
    to_beat_s = min(question.to_beat_s, found.cost_s * (1 - options.relative_gap))
    worthwhile_s = min(question.to_beat_s, found.to_beat_s(options.relative_gap))
    asked = dataclasses.replace(question, to_beat_s=worthwhile_s, options=limited, branches=False)
    again = search_meshes(asked, [mesh], None, stop, weights=found.weights)
    return found.after(placed(asked, [mesh], again, stop), to_beat_s)


def _gain_s(formulation: Formulation, cost_s: float) -> float:
    """What a plan takes beyond kernels that are each as fast as any choice on its mesh makes them."""
    return cost_s - fastest_kernels_s(formulation.program.groups, formulation.tables)

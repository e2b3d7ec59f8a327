"""Problems whose plans hide what they send: for given stretches of operations, a limit on what kernels wait for.

The price of a plan is linear in the weights of stretches (`overlap.py`): least(x) + sum_I w_I waited_I(x). What a node
or an edge adds to waited_I is therefore the difference between its price with all weight on I and that with none. Such
a limit is one more instant of the problem, at which every node and edge takes what it adds, shifted to be at least 0
and scaled to the capacity that the problem has:

    sum of (added - least added)  <=  limit - sum of (least added)
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from autoshard.cost.exposure import Stretch
from autoshard.planner.build import Formulation, repriced
from autoshard.planner.overlap import StretchWeights
from autoshard.solver.problem import EdgeUsage, Problem, Usage

_DIGITS = 12
"""Amounts are rounded to so many digits of the limit: what is equal but for rounding, as in copies, becomes equal."""


def hidden(f: Formulation, limits_s: Mapping[Stretch, float]) -> Problem | None:
    """The problem of `f` with limits on what kernels wait for within some stretches, in seconds.

    Its solutions are solutions of the problem of `f` at the same cost. None if one of the limits cannot be met.
    """
    problem = f.problem
    capacity = 1.0 if problem.capacity is None else problem.capacity
    is_limited = problem.capacity is not None
    usages, pairs = list(problem.usages if is_limited else ()), list(problem.edge_usages if is_limited else ())
    following = max((u.stop for u in (*usages, *pairs)), default=0)
    without = repriced(f, StretchWeights(())).problem
    for number, (stretch, limit_s) in enumerate(limits_s.items(), following):
        within = repriced(f, StretchWeights(((1.0, stretch),))).problem
        nodes = [_added(one.costs, none.costs) for one, none in zip(within.nodes, without.nodes, strict=True)]
        edges = [
            None if one is none else _added(one.costs, none.costs)
            for one, none in zip(within.edges, without.edges, strict=True)
        ]
        least_s = sum(float(a.min()) for a in (*nodes, *edges) if a is not None)
        room_s = limit_s - least_s
        if room_s <= 0:
            return None
        amounts = _Amounts(room_s, capacity)
        usages += [Usage(n, number, number + 1, amounts.of(a)) for n, a in enumerate(nodes) if np.ptp(a) > 0]
        pairs += [
            EdgeUsage(n, number, number + 1, amounts.of(a)) for n, a in enumerate(edges) if a is not None and np.ptp(a)
        ]
    return dataclasses.replace(problem, usages=tuple(usages), edge_usages=tuple(pairs), capacity=capacity)


class _Amounts:
    """What nodes and edges take of `capacity`, which stands for `room_s`; the same array for equal ones."""

    def __init__(self, room_s: float, capacity: float) -> None:
        self._room_s, self._capacity = room_s, capacity
        self._made: dict[tuple[tuple[int, ...], bytes], np.ndarray] = {}

    def of(self, added_s: np.ndarray) -> np.ndarray:
        """The amounts of what adds so many seconds."""
        amounts = self._capacity * np.round((added_s - added_s.min()) / self._room_s, _DIGITS)
        return self._made.setdefault((amounts.shape, amounts.tobytes()), amounts)


def _added(one: np.ndarray, none: np.ndarray) -> np.ndarray:
    """What a stretch adds; 0 for what is forbidden."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(one), one - none, 0.0)

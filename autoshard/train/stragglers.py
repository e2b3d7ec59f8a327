"""Slow devices during a run: measured, named, and evened out by other shares.

After each step: times of all devices -> the detector -> who is slow -> the controller -> other shares, from the next
step on. All processes see the same times, so that all decide the same.
"""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from autoshard.api.balanced_call import BalancedCall
from autoshard.balance.detect import Detector
from autoshard.balance.places import Placing, moved
from autoshard.balance.policy import Action, Disturbance, Part, Policy, act
from autoshard.balance.selection import ordered
from autoshard.plans.apply import check
from autoshard.plans.balanced import units_of
from autoshard.plans.movable_work import busiest_axis, island_seconds, parts_of
from autoshard.plans.program_plan import ProgramPlan
from autoshard.train.config import StragglersSection
from autoshard.train.device_times import DeviceTimes, Times
from autoshard.train.emulation import slowed_ranks
from autoshard.train.metrics import StragglerReport
from autoshard.train.unit_scores import UnitScores

_JUDGED_AFTER = 10
"""Steps with new shares after which their gain is told."""
_LOOKED_AT = 10
"""Steps after which a disturbance that goes on is looked at again."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Change:
    """Shares that changed after `step`: seconds of a step and `placings` before, and the slowness that they are for."""

    step: int
    before_s: float
    placings: tuple[Placing, ...]
    slowness: tuple[float, ...]


class Stragglers:
    """Watches the devices of a run, and sets their shares.

    Args:
        section: what may be done. plan: the run's plan. step: the step of that plan. fn, args: its function, and its
            arguments by shape.
        report: takes what is found and done.
        times: measures the devices; None for `DeviceTimes`.
    """

    def __init__(
        self,
        section: StragglersSection,
        plan: ProgramPlan,
        step: BalancedCall,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        report: Callable[[StragglerReport], None],
        times: Times | None = None,
    ):
        self._section, self._report, self._shares = section, report, step.balance
        self._policy = Policy(self._shares.options, replan_after=section.replan_after)
        graph = check(plan, fn, args).graph
        dims = units_of(plan, graph)
        own_s = island_seconds(plan, graph, dims)
        rooms = self._shares.rooms
        self._axis, _ = busiest_axis([room.unit for room in rooms], own_s)
        self._rooms = [n for n, room in enumerate(rooms) if room.unit.axis == self._axis]
        self._own_s = [own_s[rooms[n].unit.index] for n in self._rooms]
        self._other_s, self._comm_s = plan.estimate.compute_s - sum(self._own_s), plan.estimate.exposed_s
        link = next(a for a in plan.logical_mesh.axes if a.name == self._axis).levels[-1].link
        self._bytes_per_s = link.bandwidth_bytes_per_s
        self._place_of = _coordinates(plan, self._axis)
        self._ways = self._shares.axes[self._axis]
        self._times = times or DeviceTimes(step.mesh, self._emulated, self._work)
        self._scores = UnitScores(self._shares.options.priority, [rooms[n] for n in self._rooms], graph, step.mesh)
        self._waited = [np.zeros(rooms[n].unit.size, int) for n in self._rooms]
        self._detector, self._disturbance = Detector(section.threshold), Disturbance((1.0,) * self._ways)
        self._recent: list[float] = []
        self._looked_at, self._told_plan = 0, False
        self._to_judge: _Change | None = None
        self._undone: tuple[float, ...] | None = None
        self._slowed: dict[int, float] = {}

    def before_step(self, number: int) -> None:
        """Begins or ends the emulation at its steps.

        Args:
            number: of the step that comes, counted from 1.
        """
        wanted = slowed_ranks(self._section, number, self._axis, self._ways)
        if wanted != self._slowed:
            self._slowed = wanted
            self._shares.slow(wanted, self._axis)

    def after_step(self, number: int, step_s: float, state: Any) -> None:
        """Looks at a step that was taken, and sets the shares for the next.

        Args:
            number: of the step. step_s: its seconds. state: what it returned.
        """
        measured = self._times.after_step(step_s)
        if measured is None:
            return
        times, slowest_s = measured
        self._recent = [*self._recent[-(_JUDGED_AFTER - 1) :], slowest_s]
        self._judge(number)
        ranks = [max(times[self._place_of == rank]) for rank in range(self._ways)]
        named = self._detector.named
        self._detector = self._detector.then(ranks)
        slowness = self._detector.slowness
        self._disturbance = self._disturbance.then(slowness, 1)
        is_new = self._detector.named != named and number > 1
        is_due = number - self._looked_at >= _LOOKED_AT and (self._disturbance.slow or self._dropped)
        if is_new or is_due:
            self._looked_at = number
            self._act(number, slowness, state, is_new)

    @property
    def _dropped(self) -> int:
        return sum(p.dropped for p in self._shares.placings)

    def _act(self, number: int, slowness: tuple[float, ...], state: Any, is_new: bool) -> None:
        """Decides, and sets shares."""
        if self._undone is not None:
            if Disturbance(self._undone).then(slowness, 1).lasted > 1:
                return
            self._undone = None
        parts = self._parts()
        before = self._shares.placings
        action = act(self._policy, self._disturbance, parts)
        if action.changes or self._dropped or action.dropped:
            self._place(action, number, state)
        wants_plan = action.wants_plan and not self._told_plan
        self._told_plan |= action.wants_plan
        if is_new or action.changes or wants_plan:
            others_s = self._scale * self._comm_s
            slow = tuple((d, w) for d, w in enumerate(slowness) if w > 1)
            shares = self._shares.shares(self._axis)
            before_s, after_s = action.before_s + others_s, action.after_s + others_s
            means = action.means
            self._report(StragglerReport(number, self._axis, slow, means, before_s, after_s, shares, wants_plan))
        if action.changes:
            self._to_judge = _Change(number, statistics.median(self._recent[-3:]), before, slowness)
            self._recent = []

    def _parts(self) -> list[Part]:
        """What can move, priced by the plan, scaled to what steps take."""
        self._scale = 1.0
        parts = self._priced(1.0)
        now = act(dataclasses.replace(self._policy, margin=2.0), self._disturbance, parts).before_s + self._comm_s
        self._scale = statistics.median(self._recent[-3:]) / now
        return self._priced(self._scale)

    def _priced(self, scale: float) -> list[Part]:
        placed = [(self._shares.rooms[n], self._shares.placings[n]) for n in self._rooms]
        return parts_of(placed, self._own_s, self._other_s, self._bytes_per_s, scale)

    def _place(self, action: Action, number: int, state: Any) -> None:
        """Sets shares, and chooses which units are left out."""
        placings = list(self._shares.placings)
        chosen = []
        for n, decision in zip(self._rooms, action.decisions, strict=True):
            placing = placings[n] if decision.counts == placings[n].counts else moved(placings[n], decision.counts)
            chosen.append(Placing(placing.units, decision.active))
        scores = [None] * len(chosen)
        if action.dropped:
            scores = self._scores.of(self._shares.by_units(state))
        for k, n in enumerate(self._rooms):
            own = ordered(chosen[k], self._shares.options.priority, scores[k], self._waited[k], number)
            computed = [u for units, active in zip(own.units, own.active, strict=True) for u in units[:active]]
            self._waited[k] += 1
            self._waited[k][computed] = 0
            placings[n] = own
        self._shares.place(placings)

    def _judge(self, number: int) -> None:
        """Tells what shares gained, some steps after they changed, and undoes what made steps longer."""
        change = self._to_judge
        if change is None or number - change.step < _JUDGED_AFTER:
            return
        after_s = statistics.median(self._recent[1:] or self._recent)
        self._to_judge, done = None, f"measured since step {change.step}"
        is_same = Disturbance(change.slowness).then(self._detector.slowness, 1).lasted > 1
        if is_same and after_s > (1 + self._policy.margin) * change.before_s and max(change.slowness) > 1:
            self._shares.place(change.placings)
            self._undone, done = change.slowness, f"{done}, which is worse, and undone"
        slow = tuple((d, w) for d, w in enumerate(self._detector.slowness) if w > 1)
        shares = self._shares.shares(self._axis)
        self._report(StragglerReport(number, self._axis, slow, done, change.before_s, after_s, shares, False))

    def _emulated(self) -> list[float]:
        """For each device, how many times slower it is made."""
        return [self._slowed.get(int(rank), 1.0) for rank in self._place_of]

    def _work(self) -> np.ndarray:
        """For each device, its work in a step as a share of an even one, by the plan's seconds."""
        total_s = self._other_s + sum(self._own_s)
        work = np.full(self._ways, self._other_s)
        for n, own_s in zip(self._rooms, self._own_s, strict=True):
            room, placing = self._shares.rooms[n], self._shares.placings[n]
            computed = np.asarray([room.buckets[room.bucket_of(a)] for a in placing.active])
            work += own_s * computed / (room.unit.size / room.unit.ways)
        return (work / total_s)[self._place_of]


def _coordinates(plan: ProgramPlan, axis: str) -> np.ndarray:
    """For each device of the mesh, in row-major order, its coordinate along an axis."""
    sizes = [size for _, size in plan.axes]
    at = [name for name, _ in plan.axes].index(axis)
    return np.indices(sizes)[at].ravel()

"""Slow devices during a run: measured, named, and evened out by other shares.

After each step: times of all devices -> the detector -> who is slow -> the controller -> other shares, from the next
step on. All processes see the same times, so that all decide the same.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from autoshard.api.balanced_call import BalancedCall
from autoshard.balance.places import Placing, moved
from autoshard.balance.policy import Action, Disturbance, Part, Policy, act
from autoshard.balance.selection import ordered
from autoshard.plans.apply import check
from autoshard.plans.balanced import units_of
from autoshard.plans.movable_work import busiest_axis, island_seconds, parts_of
from autoshard.plans.program_plan import ProgramPlan
from autoshard.train.config import StragglersSection
from autoshard.train.device_times import DeviceTimes, Times
from autoshard.train.emulation import check_ranks, slowed_ranks
from autoshard.train.metrics import StragglerReport
from autoshard.train.unit_scores import UnitScores
from autoshard.train.watch import Watch


class Stragglers:
    """Watches the devices of a run, and sets their shares.

    Args:
        section: what may be done. plan: the run's plan. step: the step of that plan. fn, args: its function, and its
            arguments by shape.
        report: takes what is found and done.
        times: measures the devices; None for `DeviceTimes`.

    Raises:
        ConfigError: a rank that is not there is to be slowed.
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
        check_ranks(section, self._axis, self._ways)
        times = times or DeviceTimes(step.mesh, self._emulated, self._work)
        self._watch = Watch(times, self._place_of, section.threshold)
        self._scores = UnitScores(self._shares.options.priority, [rooms[n] for n in self._rooms], graph, step.mesh)
        self._waited = [np.zeros(rooms[n].unit.size, int) for n in self._rooms]
        self._disturbance = Disturbance((1.0,) * self._ways)
        self._told_plan = False
        self._placings_before: tuple[Placing, ...] = ()
        self._undone: tuple[float, ...] | None = None
        self._slowed: dict[int, float] = {}

    def before_step(self, number: int) -> None:
        """Begins or ends the emulation at its steps.

        Args:
            number: of the step that comes, counted from 1.
        """
        wanted = slowed_ranks(self._section, number)
        if wanted != self._slowed:
            self._slowed = wanted
            self._shares.slow(wanted, self._axis)

    def after_step(self, number: int, step_s: float, state: Any) -> None:
        """Looks at a step that was taken, and sets the shares for the next.

        Args:
            number: of the step. step_s: its seconds. state: what it returned.
        """
        steps = self._watch.after_step(number, step_s)
        if not steps:
            return
        self._judge(number)
        self._disturbance = self._disturbance.then(self._watch.slowness, steps)
        if self._watch.is_due(bool(self._disturbance.slow or self._dropped)):
            self._act(number, state)

    @property
    def _dropped(self) -> int:
        return sum(p.dropped for p in self._shares.placings)

    def _act(self, number: int, state: Any) -> None:
        """Decides, and sets shares."""
        if self._undone is not None:
            if Disturbance(self._undone).then(self._watch.slowness, 1).lasted > 1:
                return
            self._undone = None
        parts = self._parts()
        before = self._shares.placings
        action = act(self._policy, self._disturbance, parts)
        if action.changes or self._dropped or action.dropped:
            self._place(action, number, state)
        wants_plan = action.wants_plan and not self._told_plan
        self._told_plan |= action.wants_plan
        if self._watch.is_new or action.changes or wants_plan:
            others_s = self._scale * self._comm_s
            self._tell(number, action.means, action.before_s + others_s, action.after_s + others_s, wants_plan)
        if action.changes:
            self._watch.changed()
            self._placings_before = before

    def _parts(self) -> list[Part]:
        """What can move, priced by the plan, scaled to what steps take."""
        self._scale = 1.0
        parts = self._priced(1.0)
        now = act(dataclasses.replace(self._policy, margin=2.0), self._disturbance, parts).before_s + self._comm_s
        self._scale = self._watch.step_s / now
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
        gain = self._watch.gain()
        if gain is None:
            return
        done = f"measured since step {gain.since}"
        is_same = Disturbance(gain.slowness).then(self._watch.slowness, 1).lasted > 1
        if is_same and gain.after_s > (1 + self._policy.margin) * gain.before_s and max(gain.slowness) > 1:
            self._shares.place(self._placings_before)
            self._undone, done = gain.slowness, f"{done}, which is worse, and undone"
        self._tell(number, done, gain.before_s, gain.after_s)

    def _tell(self, number: int, done: str, before_s: float, after_s: float, wants_plan: bool = False) -> None:
        self._report(
            StragglerReport(
                step=number,
                axis=self._axis,
                slow=self._watch.slow,
                done=done,
                before_s=before_s,
                after_s=after_s,
                shares=self._shares.shares(self._axis),
                wants_plan=wants_plan,
            )
        )

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

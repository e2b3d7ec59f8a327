"""Slow replicas during a run that shares its batches out: measured, named, and given fewer parts.

After each step: times of all devices -> the detector -> who is slow -> other shares, from the next step on. They cost
nothing to change, so that they change whenever that pays. All processes see the same times, and decide the same.
"""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from autoshard.balance.batch_shares import moved_parts
from autoshard.balance.detect import Detector
from autoshard.train.config import StragglersSection
from autoshard.train.device_times import DeviceTimes, Times
from autoshard.train.emulation import slowed_ranks
from autoshard.train.metrics import StragglerReport
from autoshard.train.shared_batch import SharedBatchCall

_LOOKED_AT = 10
"""Steps after which a slowdown that goes on is looked at again, and a change is judged."""
_MARGIN = 0.05
"""Shares change only where that gains more than this part of a step."""


class SlowReplicas:
    """Watches the replicas of a run, and shares its batches out.

    Args:
        section: what may be done. step: the step of the run.
        report: takes what is found and done.
        times: measures the devices; None for `DeviceTimes`.
    """

    def __init__(
        self,
        section: StragglersSection,
        step: SharedBatchCall,
        report: Callable[[StragglerReport], None],
        times: Times | None = None,
    ):
        self._section, self._step, self._report = section, step, report
        self._times = times or DeviceTimes(step.mesh, lambda: step.slowed.tolist(), self._work)
        self._detector = Detector(section.threshold)
        self._recent: list[float] = []
        self._looked_at = 0
        self._changed: tuple[int, float] | None = None

    def before_step(self, number: int) -> None:
        """Begins or ends the emulation at its steps.

        Args:
            number: of the step that comes, counted from 1.
        """
        step = self._step.step
        wanted = slowed_ranks(self._section, number, step.axis, step.replicas)
        self._step.slowed = np.asarray([round(wanted.get(rank, 1)) for rank in range(step.replicas)], np.int32)

    def after_step(self, number: int, step_s: float, state: Any) -> None:
        """Looks at a step that was taken, and sets the shares for the next.

        Args:
            number: of the step. step_s: its seconds. state: what it returned.
        """
        measured = self._times.after_step(step_s)
        if measured is None:
            return
        times, slowest_s = measured
        self._recent = [*self._recent[1 - _LOOKED_AT :], slowest_s]
        self._judge(number)
        named = self._detector.named
        self._detector = self._detector.then(times)
        is_new = self._detector.named != named and number > 1
        is_due = number - self._looked_at >= _LOOKED_AT and any(self._detector.named)
        if self._section.mode != "off" and (is_new or is_due):
            self._looked_at = number
            self._share(number, is_new)

    def _share(self, number: int, is_new: bool) -> None:
        """Sets other shares, if that pays."""
        slowness, before = np.asarray(self._detector.slowness), self._step.counts
        wanted = self._step.step.shares(slowness.tolist())
        now, then = float((slowness * before).max()), float((slowness * wanted).max())
        changes, step_s = now - then > _MARGIN * now, statistics.median(self._recent[-3:])
        if changes:
            self._step.counts = wanted
            self._changed, self._recent = (number, step_s), []
        if changes or is_new:
            moved = moved_parts(before.tolist(), wanted.tolist())
            means = f"moved {moved} of {self._step.step.num_parts} parts of a batch" if changes else "nothing"
            self._tell(number, means, step_s, step_s * then / now if changes else step_s)

    def _judge(self, number: int) -> None:
        """Tells what shares gained, some steps after they changed."""
        if self._changed is not None and number - self._changed[0] >= _LOOKED_AT:
            since, before_s = self._changed
            self._changed = None
            self._tell(number, f"measured since step {since}", before_s, statistics.median(self._recent))

    def _tell(self, number: int, done: str, before_s: float, after_s: float) -> None:
        slow = tuple((d, w) for d, w in enumerate(self._detector.slowness) if w > 1)
        shares = tuple((self._step.counts / self._step.step.num_parts).tolist())
        self._report(StragglerReport(number, self._step.step.axis, slow, done, before_s, after_s, shares, False))

    def _work(self) -> np.ndarray:
        """For each replica, its parts as a share of an even number of them."""
        return np.maximum(self._step.counts, 1) / self._step.step.mean_parts

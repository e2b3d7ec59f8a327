"""Slow replicas during a run that shares its batches out: measured, named, and given fewer parts.

After each step: times of all devices -> the detector -> who is slow -> other shares, from the next step on. They cost
nothing to change, so that they change whenever that pays. All processes see the same times, and decide the same.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from autoshard.balance.batch_shares import moved_parts
from autoshard.train.config import StragglersSection
from autoshard.train.device_times import DeviceTimes, Times
from autoshard.train.emulation import check_ranks, slowed_ranks
from autoshard.train.metrics import StragglerReport
from autoshard.train.shared_batch import SharedBatchCall
from autoshard.train.watch import Watch

_MARGIN = 0.05
"""Shares change only where that gains more than this part of a step."""


class SlowReplicas:
    """Watches the replicas of a run, and shares its batches out.

    Args:
        section: what may be done. step: the step of the run.
        report: takes what is found and done.
        times: measures the devices; None for `DeviceTimes`.

    Raises:
        ConfigError: a rank that is not there is to be slowed.
    """

    def __init__(
        self,
        section: StragglersSection,
        step: SharedBatchCall,
        report: Callable[[StragglerReport], None],
        times: Times | None = None,
    ):
        self._section, self._step, self._report = section, step, report
        check_ranks(section, step.step.axis, step.step.replicas)
        times = times or DeviceTimes(step.mesh, lambda: step.slowed.tolist(), self._work)
        self._watch = Watch(times, range(step.step.replicas), section.threshold)

    def before_step(self, number: int) -> None:
        """Begins or ends the emulation at its steps.

        Args:
            number: of the step that comes, counted from 1.
        """
        step = self._step.step
        wanted = slowed_ranks(self._section, number)
        self._step.slowed = np.asarray([round(wanted.get(rank, 1)) for rank in range(step.replicas)], np.int32)

    def after_step(self, number: int, step_s: float, state: Any) -> None:
        """Looks at a step that was taken, and sets the shares for the next.

        Args:
            number: of the step. step_s: its seconds. state: what it returned.
        """
        if not self._watch.after_step(number, step_s):
            return
        if gain := self._watch.gain():
            self._tell(number, f"measured since step {gain.since}", gain.before_s, gain.after_s)
        if self._section.mode != "off" and self._watch.is_due(bool(self._watch.slow)):
            self._share(number)

    def _share(self, number: int) -> None:
        """Sets other shares, if that pays."""
        slowness, before = np.asarray(self._watch.slowness), self._step.counts
        wanted = self._step.step.shares(slowness.tolist())
        now, then = float((slowness * before).max()), float((slowness * wanted).max())
        changes, step_s = now - then > _MARGIN * now, self._watch.step_s
        if changes:
            self._step.counts = wanted
            self._watch.changed()
        if changes or self._watch.is_new:
            moved = moved_parts(before.tolist(), wanted.tolist())
            means = f"moved {moved} of {self._step.step.num_parts} parts of a batch" if changes else "nothing"
            self._tell(number, means, step_s, step_s * then / now if changes else step_s)

    def _tell(self, number: int, done: str, before_s: float, after_s: float) -> None:
        self._report(
            StragglerReport(
                step=number,
                axis=self._step.step.axis,
                slow=self._watch.slow,
                done=done,
                before_s=before_s,
                after_s=after_s,
                shares=tuple((self._step.counts / self._step.step.num_parts).tolist()),
            )
        )

    def _work(self) -> np.ndarray:
        """For each replica, its parts as a share of an even number of them."""
        return np.maximum(self._step.counts, 1) / self._step.step.mean_parts

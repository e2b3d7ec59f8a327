"""Which of several programs for one step is the fastest, found out by running them: the first steps of a run, timed.

A replay (`hlo/compiled_schedule.py`) prices kernels by formulas, which on an H100 were off by more than the programs of
one plan differ (benchmarks/results/gpu-steps.md). All of them compute the same step, so each call is a step of the run
whichever program it takes: nothing is computed twice or thrown away. Results can differ by rounding, as between any
two compilations.
"""

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from autoshard.execution.candidates import CompiledCandidate, fitting
from autoshard.printing import seconds

_LOGGER = logging.getLogger(__name__)

WARM_STEPS, TIMED_STEPS = 1, 3
"""Steps of each program in a row: the first loads it and does not count."""

WORTH_TRYING = 1.15
"""How much longer than the best the replay of a program may be that is tried. Replays of two programs for one step
and what these took on an H100 differed by 0.5 to 8 % (five models), the most of which is doubled here."""


@dataclasses.dataclass(frozen=True, slots=True)
class TimedCandidate:
    """A program and what a step of it took: the median of those timed, on the slowest process."""

    candidate: CompiledCandidate
    step_s: float


class Trial:
    """Called in place of a compiled program: its first calls try each one in turn, all others take the fastest.

    Attributes:
      candidates: The programs. timed: What each took; empty while they are tried, and where there is but one.
    """

    candidates: tuple[CompiledCandidate, ...]
    timed: tuple[TimedCandidate, ...]

    def __init__(self, candidates: Sequence[CompiledCandidate], slowest: Callable[[Sequence[float]], Sequence[float]]):
        """
        Args:
          candidates: The programs, equal but for how they are scheduled.
          slowest: Of this process's seconds of each, those of the slowest process; all processes call it together.
        """
        self.candidates, self.timed = tuple(candidates), ()
        self._slowest = slowest
        self._seconds: tuple[list[float], ...] = tuple([] for _ in candidates)
        self._fastest: CompiledCandidate | None = candidates[0] if len(candidates) == 1 else None

    @property
    def chosen(self) -> CompiledCandidate | None:
        """The program that all further calls take; None while programs are tried."""
        return self._fastest

    def __call__(self, *args: Any) -> Any:
        if self._fastest is not None:
            return self._fastest.compiled(*args)
        turn = next(n for n, own in enumerate(self._seconds) if len(own) < WARM_STEPS + TIMED_STEPS)
        jax.block_until_ready(args)
        started = time.perf_counter()
        results = self.candidates[turn].compiled(*args)
        jax.block_until_ready(results)
        self._seconds[turn].append(time.perf_counter() - started)
        if all(len(own) == WARM_STEPS + TIMED_STEPS for own in self._seconds):
            self._decide()
        return results

    def _decide(self) -> None:
        medians = [statistics.median(own[WARM_STEPS:]) for own in self._seconds]
        agreed = zip(self.candidates, self._slowest(medians), strict=True)
        self.timed = tuple(TimedCandidate(candidate, step_s) for candidate, step_s in agreed)
        fastest = min(self.timed, key=lambda one: one.step_s)
        self._fastest = fastest.candidate
        told = "; ".join(f"{t.candidate.figures.candidate.value}: {seconds(t.step_s)}" for t in self.timed)
        _LOGGER.info("as timed, the step is scheduled for %s (%s)", self._fastest.figures.candidate.value, told)


def trial_of(candidates: Sequence[CompiledCandidate], budget_bytes: float | None) -> Trial:
    """The trial of those candidates that fit the memory and are not far slower than the best of them by replay.

    Where none fits, only those come into question that hardly need more memory than the least of all.

    Args:
      candidates: All that were compiled.
      budget_bytes: Memory of a device; None for no limit.
    """
    able = fitting([c.figures for c in candidates], budget_bytes)
    limit_s = WORTH_TRYING * min(f.step_s for f in able)
    tried = [c for c in candidates if c.figures in able and c.figures.step_s <= limit_s]
    return Trial(tried, _of_slowest_process)


def _of_slowest_process(medians: Sequence[float]) -> Sequence[float]:
    """A step takes as long as on its slowest process, and all processes must choose alike."""
    if jax.process_count() == 1:
        return medians
    every = np.asarray(multihost_utils.process_allgather(np.asarray(medians, np.float32)))
    return every.reshape(-1, len(medians)).max(axis=0).tolist()

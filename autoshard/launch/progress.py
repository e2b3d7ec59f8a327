"""Whether workers make progress: the time since each changed what it is at, against limits learnt in this run.

A worker that is gone is noticed by its exit status. One that lives and does nothing would hold up all others for ever:
either its heartbeats end (a stopped process, a host that hangs), or they come and say the same (a collective that
waits for ever).
"""

import collections
import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

from autoshard.launch.messages import Heartbeat, Phase

FIRST_LIMITS_S: Mapping[Phase, float] = MappingProxyType(
    {
        Phase.STARTUP: 300.0,
        Phase.PLANNING: 3600.0,
        Phase.COMPILE: 3600.0,
        Phase.RESTORE: 1800.0,
        Phase.TRAINING: 1800.0,
        Phase.EVALUATION: 1800.0,
        Phase.SAVING: 1800.0,
    }
)
"""Longest time in a phase, or of a step, while this run has not been through one. JAX waits 300 s for processes to
join; the others are generous, since a large model may take so long, and a stall in the first generation costs it once.
"""

LEAST_LIMITS_S: Mapping[Phase, float] = MappingProxyType(
    {
        Phase.STARTUP: 30.0,
        Phase.PLANNING: 60.0,
        Phase.COMPILE: 60.0,
        Phase.RESTORE: 30.0,
        Phase.TRAINING: 10.0,
        Phase.EVALUATION: 30.0,
        Phase.SAVING: 30.0,
    }
)
"""No limit that is learnt is below this, for what a busy machine may hold up."""

FACTOR = 5.0
"""A limit is so many times the longest time seen."""

FIRST_HEARTBEAT_LIMIT_S = 30.0
LEAST_HEARTBEAT_LIMIT_S = 5.0
"""A worker sends a heartbeat four times a second; Python's lock may be held for longer while a library works."""

QUIET_S = 2.0
"""Of workers that make no progress, one that has said nothing for this time, eight heartbeats, is the one at fault."""

_RECENT_STEPS = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Stall:
    """A worker that exceeded a limit.

    Attributes:
        process: the engine's number of it.
        phase, step: where it was.
        detail: which limit, in words.
    """

    process: int
    phase: Phase
    step: int
    detail: str


@dataclasses.dataclass(slots=True)
class _Seen:
    phase: Phase
    step: int
    changed_s: float
    heard_s: float
    has_spoken: bool = False


class LearntLimits:
    """The longest times seen in this run, over all its generations, and the limits that follow."""

    def __init__(self, heartbeat_limit_s: float | None = None):
        """Args:
        heartbeat_limit_s: limit between heartbeats that the user set; None to learn it.
        """
        self._heartbeat_limit_s = heartbeat_limit_s
        self._longest_s: dict[Phase, float] = {}
        self._steps_s: collections.deque[float] = collections.deque(maxlen=_RECENT_STEPS)
        self._longest_gap_s = 0.0
        self._patience = 1.0

    def stalled(self) -> None:
        """A worker was taken to be stalled: limits that are learnt double, until a step is committed that was not.

        If the machine is only busier than before, the same would happen to every generation.
        """
        self._patience *= 2

    def made_progress(self) -> None:
        """A step was committed that had not been."""
        self._patience = 1.0

    def saw_phase(self, phase: Phase, seconds: float) -> None:
        """A worker has been through `phase`, which is not training, in `seconds`."""
        self._longest_s[phase] = max(self._longest_s.get(phase, 0.0), seconds)

    def saw_step(self, seconds: float) -> None:
        """A step, or a few of them, took `seconds`."""
        self._steps_s.append(seconds)

    def saw_gap(self, seconds: float) -> None:
        """Two heartbeats of a worker were `seconds` apart."""
        self._longest_gap_s = max(self._longest_gap_s, seconds)

    def of_phase(self, phase: Phase) -> float:
        """Longest time that a worker may be in a phase, or a step may take in training, in seconds."""
        longest = max(self._steps_s, default=None) if phase is Phase.TRAINING else self._longest_s.get(phase)
        limit_s = FIRST_LIMITS_S[phase] if longest is None else max(LEAST_LIMITS_S[phase], FACTOR * longest)
        return self._patience * limit_s

    def of_heartbeats(self) -> float:
        """Longest time between two heartbeats of a worker, in seconds; its first one comes within that of startup."""
        if self._heartbeat_limit_s is not None:
            return self._heartbeat_limit_s
        limit_s = max(LEAST_HEARTBEAT_LIMIT_S, FACTOR * self._longest_gap_s) if self._steps_s else math.inf
        return self._patience * min(limit_s, FIRST_HEARTBEAT_LIMIT_S)


class Progress:
    """Where the workers of one generation are, and since when."""

    def __init__(self, limits: LearntLimits, processes: tuple[int, ...], now_s: float):
        """Args:
        limits: those of the run; they learn what is seen here.
        processes: the engine's numbers of the workers.
        now_s: a clock that never goes back, as for all methods.
        """
        self._limits = limits
        self._seen = {process: _Seen(Phase.STARTUP, 0, now_s, now_s) for process in processes}

    def where(self, process: int) -> tuple[Phase, int, float]:
        """What a worker is at, how many steps it has taken, and when it changed either."""
        seen = self._seen[process]
        return seen.phase, seen.step, seen.changed_s

    def heard(self, process: int, heartbeat: Heartbeat | None, now_s: float) -> None:
        """A worker said something; `heartbeat` if it told where it is."""
        seen = self._seen[process]
        if seen.has_spoken:  # before, it may have had everything to import
            self._limits.saw_gap(now_s - seen.heard_s)
        seen.heard_s, seen.has_spoken = now_s, True
        if heartbeat is None or (heartbeat.phase, heartbeat.step) == (seen.phase, seen.step):
            return
        if heartbeat.phase is not seen.phase:
            if seen.phase is not Phase.TRAINING:
                self._limits.saw_phase(seen.phase, now_s - seen.changed_s)
        elif heartbeat.phase is Phase.TRAINING:
            self._limits.saw_step((now_s - seen.changed_s) / max(heartbeat.step - seen.step, 1))
        seen.phase, seen.step, seen.changed_s = heartbeat.phase, heartbeat.step, now_s

    def stalls(self, now_s: float) -> tuple[Stall, ...]:
        """The workers that exceed a limit now: the silent ones, or else those that are furthest behind."""
        limit_s = self._limits.of_heartbeats()
        silent = [
            Stall(
                process, seen.phase, seen.step, f"no heartbeat for {now_s - seen.heard_s:.1f} s, limit {limit_s:.1f} s"
            )
            for process, seen in self._seen.items()
            if seen.has_spoken and now_s - seen.heard_s > limit_s
        ]
        if silent:
            return tuple(silent)
        late = {p: s for p, s in self._seen.items() if now_s - s.changed_s > self._limits.of_phase(s.phase)}
        if not late:
            return ()
        # The others wait for one that is stopped, and say so: then the silent one is at fault, although it has not been
        # silent for as long as a busy machine may make it.
        quiet = {p: s for p, s in late.items() if now_s - s.heard_s > QUIET_S}
        late = quiet or late
        phases = tuple(Phase)
        behind = min((s.step, phases.index(s.phase)) for s in late.values())
        return tuple(
            Stall(
                process,
                seen.phase,
                seen.step,
                f"no progress in {seen.phase} for {now_s - seen.changed_s:.1f} s, limit "
                f"{self._limits.of_phase(seen.phase):.1f} s",
            )
            for process, seen in late.items()
            if (seen.step, phases.index(seen.phase)) == behind
        )

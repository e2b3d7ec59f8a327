"""Goodput of a run: which part of its time went into steps that count, and what took the rest.

The words are those of Google's ml-goodput-measurement library: *goodput* is productive time by total time, *badput* is
the rest, by cause. What is measured are the events of a run (`launch.events`), nothing else.

How time is attributed. The log is cut into spans, which follow each other without gaps:

- From the start of the supervisor to the first phase of a generation: startup. Then each phase of the worker of rank 0.
- Training: its steps count as equally long. Of the steps that a generation took, those count as productive whose
  result was kept: steps up to the one that every later generation restored. The others were taken again: redone. What
  followed the last step before a loss (the step in flight) is redone as well, or a stall, if nothing moved any more.
- From a loss, or the end of a drained generation, to the start of the next one: down. So is the time from the last
  event of a supervisor that was killed, or that ended with an error, to the start of the next.
- Between a run that was finished, or stopped by its user, and its continuation, the run was not wanted: not counted.

Waiting for data lies within training, and is not told apart from steps.
"""

import collections
import dataclasses
import enum
import itertools
import math
from collections.abc import Iterable, Sequence

from autoshard.launch.events import (
    Drained,
    Event,
    Finished,
    GenerationStarted,
    PhaseStarted,
    Restored,
    RunFailed,
    StepCommitted,
    Stopped,
    SupervisorStarted,
    WorkerLost,
)
from autoshard.launch.failures import STALLED
from autoshard.launch.messages import Phase


class Activity(enum.StrEnum):
    """What a run's time goes into; beside each, what ml-goodput-measurement calls it."""

    PRODUCTIVE = "productive"
    """Steps whose result was kept (goodput)."""
    STARTUP = "startup"
    """Starting processes, importing, joining each other (TPU_INITIALIZATION)."""
    PLANNING = "planning"
    """Choosing shardings (TRAINING_PREP)."""
    COMPILE = "compile"
    """Compiling the step, or loading its executable (PROGRAM_STARTUP)."""
    RESTORE = "restore"
    """Making or reading the state (UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME)."""
    REDONE = "redone steps"
    """Steps whose result was lost (WASTED_PROGRESS_FROM_DISRUPTION)."""
    STALL = "stall"
    """Nothing moved, until the supervisor noticed (part of WASTED_PROGRESS_FROM_DISRUPTION)."""
    EVALUATION = "evaluation"
    """Looking at held-out data (CUSTOM_BADPUT_EVENTS)."""
    SAVING = "saving"
    """Waiting for a checkpoint to be written (UNPRODUCTIVE_CHECKPOINT_SAVE_TIME)."""
    DOWN = "down"
    """No generation ran (INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION)."""


BADPUT = tuple(activity for activity in Activity if activity is not Activity.PRODUCTIVE)

_OF_PHASE = {
    Phase.STARTUP: Activity.STARTUP,
    Phase.PLANNING: Activity.PLANNING,
    Phase.COMPILE: Activity.COMPILE,
    Phase.RESTORE: Activity.RESTORE,
    Phase.TRAINING: Activity.PRODUCTIVE,
    Phase.EVALUATION: Activity.EVALUATION,
    Phase.SAVING: Activity.SAVING,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A time in which a run did one thing.

    Attributes:
        start_s, end_s: seconds since 1970.
        generation: the one that ran, or ran last.
        activity: what it did.
    """

    start_s: float
    end_s: float
    generation: int
    activity: Activity


@dataclasses.dataclass(frozen=True, slots=True)
class LossCount:
    """How many times workers were lost for one cause, such as `signal 9`."""

    cause: str
    times: int


@dataclasses.dataclass(frozen=True, slots=True)
class Goodput:
    """Where the time of a run went.

    Attributes:
        spans: all of it, in order of time.
        generations: how many were started.
        losses: the losses that ended them, by cause, the most frequent first.
        steps_redone: steps that were taken and lost, over all generations.
    """

    spans: tuple[Span, ...]
    generations: int
    losses: tuple[LossCount, ...]
    steps_redone: int

    def seconds(self, activity: Activity) -> float:
        """Time that went into an activity."""
        return math.fsum(span.end_s - span.start_s for span in self.spans if span.activity is activity)

    @property
    def total_s(self) -> float:
        """Time in which the run was wanted."""
        return math.fsum(span.end_s - span.start_s for span in self.spans)

    @property
    def productive_s(self) -> float:
        """Time of the steps whose result was kept."""
        return self.seconds(Activity.PRODUCTIVE)

    @property
    def fraction(self) -> float:
        """Goodput: productive time by total time; 0 for a run without any."""
        return self.productive_s / self.total_s if self.spans else 0.0


def goodput(events: Iterable[Event], now_s: float | None = None) -> Goodput:
    """Measures a run by its log.

    Args:
        events: oldest first.
        now_s: seconds since 1970 up to which a run that still goes on is measured; the steps that it takes count as
            productive until they are lost. None for one that does not, which is measured up to its last event.
    """
    events = tuple(events)
    reader = _Reader(events, now_s)
    return Goodput(
        tuple(reader.spans()),
        len({event.generation for event in events if isinstance(event, GenerationStarted)}),
        _loss_counts(events),
        sum(stretch.redone for stretch in reader.stretches),
    )


def _loss_counts(events: Sequence[Event]) -> tuple[LossCount, ...]:
    causes = collections.Counter(event.cause for event in events if isinstance(event, WorkerLost))
    return tuple(LossCount(cause, times) for cause, times in causes.most_common())


@dataclasses.dataclass(slots=True)
class _Stretch:
    """A span before it is known which of its steps were kept.

    Attributes:
        first_step, last_step: steps taken before it and at its end; of training only.
        last_step_s: when the last step was done.
        rest: what the time after that is.
        bound: the step up to which results were kept.
    """

    start_s: float
    generation: int
    activity: Activity
    first_step: int = 0
    end_s: float = 0.0
    last_step: int = 0
    last_step_s: float = 0.0
    rest: Activity = Activity.REDONE
    bound: float = math.inf

    @property
    def redone(self) -> int:
        """Steps taken whose result was lost."""
        lost = self.last_step - max(self.bound, self.first_step)
        return int(lost) if lost > 0 and self.activity is Activity.PRODUCTIVE else 0

    def spans(self) -> list[Span]:
        """What became of it."""
        if self.activity is not Activity.PRODUCTIVE:
            moved_s, kept_s = self.last_step_s, self.last_step_s
        else:
            moved_s = self.last_step_s
            taken = self.last_step - self.first_step
            kept = 1.0 if self.bound >= self.first_step else 0.0
            if taken > 0:
                kept = min(max((self.bound - self.first_step) / taken, 0.0), 1.0)
            kept_s = self.start_s + kept * (moved_s - self.start_s)
        cuts = (self.start_s, kept_s, moved_s, self.end_s)
        kinds = (self.activity, Activity.REDONE, self.rest)
        found = zip(itertools.pairwise(cuts), kinds, strict=True)
        return [Span(start, end, self.generation, kind) for (start, end), kind in found if end > start]


class _Reader:
    """Reads a log from its first event to its last, always in one stretch or in none."""

    def __init__(self, events: Sequence[Event], now_s: float | None):
        self.stretches: list[_Stretch] = []
        self._open: _Stretch | None = None
        self._time_s = 0.0
        self._known = (0, 0.0)
        """The last step that an event tells of, and the event's time."""
        self._committed = 0
        self._restarts: list[tuple[int, int]] = []
        """For each step that was started from: how many stretches there were before, and the step."""
        for event in events:
            before_s, self._time_s = self._time_s, max(self._time_s, event.time)  # clocks are set back at times
            self._read(event, before_s)
        self._end(events, now_s)

    def spans(self) -> list[Span]:
        """All of the time, in order."""
        return [span for stretch in self.stretches for span in stretch.spans()]

    def _read(self, event: Event, before_s: float) -> None:
        match event:
            case SupervisorStarted():
                if self._open is not None:  # the one before was killed
                    self._close(before_s, *self._known)
                    self._begin(Activity.DOWN, before_s, event.generation)
                self._close(self._time_s)
                self._begin(Activity.STARTUP, self._time_s, event.generation)
            case GenerationStarted():
                self._close(self._time_s)
                self._begin(Activity.STARTUP, self._time_s, event.generation)
            case PhaseStarted():
                if self._open is None or self._open.activity is Activity.DOWN:
                    return  # said by a worker of a generation that was given up
                self._close(self._time_s, event.step, self._time_s)
                self._begin(_OF_PHASE[event.phase], self._time_s, event.generation, event.step)
                if event.phase is Phase.TRAINING:
                    self._restarts.append((len(self.stretches), event.step))
            case Restored(step=step):
                self._restarts.append((len(self.stretches), step))
                self._committed = step
            case StepCommitted(step=step):
                self._committed = max(self._committed, step)
                if step > self._known[0]:
                    self._known = (step, self._time_s)
            case WorkerLost():
                if self._open is None or self._open.activity is Activity.DOWN:
                    return  # not the first of this generation
                moved_s = self._time_s - event.since_progress_s
                self._close(self._time_s, event.step, moved_s, event.cause == STALLED)
                self._begin(Activity.DOWN, self._time_s, event.generation)
            case Drained(step=step):
                self._committed = step
                self._close_complete(step)
                self._begin(Activity.DOWN, self._time_s, event.generation)
            case Finished(step=step) | Stopped(step=step):
                self._committed = step
                self._close_complete(step)
            case RunFailed():
                self._close(self._time_s, *self._known)
                self._begin(Activity.DOWN, self._time_s, event.generation)
            case _:
                pass

    def _begin(self, activity: Activity, time_s: float, generation: int, step: int = 0) -> None:
        self._open = _Stretch(time_s, generation, activity, step)
        self._known = (step, time_s)

    def _close_complete(self, step: int) -> None:
        """Ends the open stretch with a generation that has saved `step`."""
        if self._open is not None and self._open.activity is Activity.PRODUCTIVE and self._open.first_step == step:
            self._open.activity = Activity.SAVING  # it had saved, and waited for the others
        self._close(self._time_s, step, self._time_s)

    def _close(self, time_s: float, step: int = 0, moved_s: float = math.inf, is_stall: bool = False) -> None:
        """Ends the open stretch, if there is one; `step` is the last one taken in it, done at `moved_s`."""
        if self._open is None:
            return
        stretch, self._open = self._open, None
        stretch.end_s, stretch.last_step = time_s, max(step, self._known[0], stretch.first_step)
        stretch.last_step_s = time_s
        if is_stall or stretch.activity is Activity.PRODUCTIVE:
            stretch.last_step_s = min(max(moved_s, stretch.start_s), time_s)
        stretch.rest = Activity.STALL if is_stall else Activity.REDONE
        self.stretches.append(stretch)

    def _end(self, events: Sequence[Event], now_s: float | None) -> None:
        """Closes the last stretch, and decides which steps were kept."""
        is_taking_steps = False
        if self._open is not None and not isinstance(events[-1], RunFailed):
            is_taking_steps = now_s is not None and self._open.activity is Activity.PRODUCTIVE
            self._time_s = max(self._time_s, now_s or 0.0)
            self._close(self._time_s, *((0, self._time_s) if is_taking_steps else self._known))
        is_complete = is_taking_steps or (bool(events) and isinstance(events[-1], Finished | Stopped))
        bound = math.inf if is_complete else float(self._committed)
        restarts = list(self._restarts)
        for position in reversed(range(len(self.stretches))):
            while restarts and restarts[-1][0] > position:
                bound = min(bound, restarts.pop()[1])
            self.stretches[position].bound = bound

"""How long a run takes from a fault to its next committed step, and what that time consists of."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from autoshard.launch.events import Event, GenerationStarted, PhaseStarted, Replanned, StepCommitted, WorkerLost
from autoshard.launch.messages import Phase


@dataclasses.dataclass(frozen=True)
class Recovery:
    """The seconds from a fault until the next step is committed; the parts add up to them.

    Attributes:
        noticed_s: until the supervisor has told the loss.
        stopped_s: until the next generation has its processes.
        joined_s: until these have joined each other, and done what else no other part names.
        planned_s: reading the plan that is there, or making one.
        restored_s: reading the state.
        compiled_s: until the first step is taken: tracing, reading or making the executable, and the step itself.
        committed_s: from there until a step is safe.
        from_cache: the plan was there.
    """

    noticed_s: float
    stopped_s: float
    joined_s: float
    planned_s: float
    restored_s: float
    compiled_s: float
    committed_s: float
    from_cache: bool

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(getattr(self, name) for name in PARTS)


PARTS = tuple(field.name for field in dataclasses.fields(Recovery) if field.name.endswith("_s"))

_PART_OF_PHASE = {
    Phase.STARTUP: "joined_s",
    Phase.PLANNING: "planned_s",
    Phase.RESTORE: "restored_s",
    Phase.COMPILE: "compiled_s",
}


def recovery(events: Iterable[Event], fault_s: float) -> Recovery | None:
    """The recovery from a fault at `fault_s`, seconds since 1970, that ended a worker or stopped it.

    Returns:
        None if the log has no loss after it, or the next generation committed nothing.
    """
    after = [event for event in events if event.time >= fault_s]
    lost = next((event for event in after if isinstance(event, WorkerLost)), None)
    if lost is None:
        return None
    started = next((e for e in after if isinstance(e, GenerationStarted) and e.time >= lost.time), None)
    if started is None:
        return None
    own = [event for event in after if event.generation == started.generation and event.time >= started.time]
    committed = next((event for event in own if isinstance(event, StepCommitted)), None)
    if committed is None:
        return None
    parts = dict.fromkeys(PARTS, 0.0)
    parts["noticed_s"], parts["stopped_s"] = lost.time - fault_s, started.time - lost.time
    part, since_s = "joined_s", started.time
    for event in own:
        if isinstance(event, PhaseStarted) and event.time <= committed.time:
            parts[part] += event.time - since_s
            part, since_s = _PART_OF_PHASE.get(event.phase, "committed_s"), event.time
    parts[part] += committed.time - since_s
    planned = [event for event in own if isinstance(event, Replanned)]
    return Recovery(**parts, from_cache=bool(planned) and planned[0].from_cache)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed, linear between two."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]

"""What a training loop tells and asks while a supervisor watches over it, or while none does."""

import contextlib
from collections.abc import Iterator

import jax

from autoshard.api import Plan, StagedPlan
from autoshard.elastic.coordination import Coordination
from autoshard.elastic.lifeline import Lifeline
from autoshard.elastic.plan_store import ChosenPlan
from autoshard.interrupts import StopRequest
from autoshard.launch.messages import Assignment, FromWorker, Phase, Planned, Restored, Tier

_DRAIN_AT = "autoshard/drain_at"

_DRAIN_STEPS = 2
"""A worker that is told to stop after step s writes s + 2. Every other one reads it after step s + 1 at the latest,
for that step has collectives of all workers, and this one joins them only once it has written."""


class Worker:
    """This process as a part of a run: one worker of a generation, or a run that nobody supervises.

    Attributes:
        assignment: its part in a generation; None without a supervisor.
        step: steps taken, over all generations, as told last.
    """

    def __init__(self, assignment: Assignment | None, lifeline: Lifeline | None, coordination: Coordination):
        self.assignment = assignment
        self.step = 0
        self._lifeline = lifeline
        self._coordination = coordination
        self._stop = StopRequest()
        self._stop_at: int | None = None

    @staticmethod
    def alone() -> "Worker":
        """For a run that nobody supervises; of several processes if `jax.distributed` was initialised."""
        return Worker(None, None, Coordination.of_this_process())

    @property
    def is_supervised(self) -> bool:
        """Whether a supervisor started this process."""
        return self.assignment is not None

    @property
    def is_dry_run(self) -> bool:
        """Whether to plan, compile and take one step only."""
        return self.assignment is not None and self.assignment.is_dry_run

    @property
    def generation(self) -> int:
        """The number of the generation; 0 without a supervisor."""
        return self.assignment.generation if self.assignment is not None else 0

    @property
    def is_first(self) -> bool:
        """Whether this worker writes and prints for all."""
        return jax.process_index() == 0

    @property
    def stopped_by_signal(self) -> bool:
        """Whether this process itself was told by a signal to stop."""
        return self._stop.requested

    def tell(self, message: FromWorker) -> None:
        """Sends a message to the supervisor, if there is one."""
        if self._lifeline is not None and not self.is_dry_run:
            self._lifeline.tell(message)

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Tells that the worker is at `phase` while the block runs."""
        if self._lifeline is None:
            yield
        else:
            with self._lifeline.during(phase):
                yield

    def stepped(self, step: int) -> None:
        """Tells that `step` steps are taken, and that the next one is at hand."""
        self.step = step
        if self._lifeline is not None:
            self._lifeline.at(Phase.TRAINING, step)

    def planned(self, chosen: ChosenPlan) -> None:
        """Tells the plan of the generation; the first worker does for all."""
        if self.is_first:
            mesh = _mesh_text(chosen.plan)
            self.tell(Planned(plan=str(chosen.path), mesh=mesh, seconds=chosen.seconds, from_cache=chosen.from_cache))

    def restored(self, step: int, source: Tier | None, seconds: float) -> None:
        """Tells from which state the generation goes on; the first worker does for all."""
        if self.is_first:
            self.tell(Restored(step=step, source=source, seconds=seconds))

    def begin(self, step: int, stop: StopRequest) -> None:
        """Tells that the first step of this generation, which is compiled on the way, is at hand.

        Args:
            step: steps taken before.
            stop: signals to this process, which are requests to stop, too.
        """
        self.step = step
        self.listen(stop)
        if self._lifeline is not None:
            self._lifeline.at(Phase.COMPILE, step)

    def listen(self, stop: StopRequest) -> None:
        """Takes signals to this process for requests to stop, too."""
        self._stop = stop

    def should_stop(self) -> bool:
        """Whether to save and end now, before the next step; all workers say so after the same step.

        To be asked by all workers, once after each step: they agree through the coordination service, not by a
        collective.
        """
        if self._stop_at is None:
            is_asked = self._stop.requested or (self._lifeline is not None and self._lifeline.drain is not None)
            if self._coordination.is_single:
                self._stop_at = self.step if is_asked else None
            else:
                if is_asked:
                    self._coordination.put_once(_DRAIN_AT, str(self.step + _DRAIN_STEPS))
                text = self._coordination.get(_DRAIN_AT)
                self._stop_at = None if text is None else int(text)
        return self._stop_at is not None and self.step >= self._stop_at


def _mesh_text(plan: Plan | StagedPlan) -> str:
    """The mesh of a plan, or how many devices its stages share."""
    if isinstance(plan, Plan):
        return " x ".join(f"{axis}={size}" for axis, size in plan.axes)
    return f"{plan.num_devices} devices in stages"

"""What a training loop tells and asks while a supervisor watches over it, or while none does."""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from autoshard.api import Plan, StagedPlan, plan_on_devices
from autoshard.checkpoints.checkpoints import Checkpoints, Restored
from autoshard.checkpoints.disk import Tell
from autoshard.checkpoints.memory import MemoryTier
from autoshard.cluster import Cluster
from autoshard.elastic.coordination import Coordination
from autoshard.elastic.decisions import is_first
from autoshard.elastic.lifeline import Lifeline
from autoshard.elastic.plan_store import ChosenPlan, DeviceSet, mark_compiled, plan_for_devices
from autoshard.errors import ElasticError, PlanMismatchError, TrainingError
from autoshard.interrupts import StopRequest
from autoshard.launch import messages
from autoshard.launch.messages import Assignment, FromWorker, Phase, Planned

_DRAIN_AT = "autoshard/drain_at"


@dataclasses.dataclass(frozen=True, slots=True)
class Cadence:
    """How often the state is made safe.

    Attributes:
        disk_every: steps between two checkpoints on disk; None for the last one only.
        memory_every: steps between two copies in the memory of hosts; None for none.
        keep: the newest checkpoints that stay on disk.
    """

    disk_every: int | None = None
    memory_every: int | None = 1
    keep: int = 2


COMPILE_TIMEOUT_S = 24 * 3600.0
"""How long the others wait for what the first worker compiles; the supervisor ends the generation sooner."""

STEP_TIMEOUT_S = 24 * 3600.0
"""How long workers wait for each other after a step; the supervisor ends the generation sooner."""


class DryRunOver(Exception):
    """A dry run has done all that it is for."""


class Worker:
    """This process as a part of a run: one worker of a generation, or a run that nobody supervises.

    All workers call its methods together, on their main threads.

    Attributes:
        assignment: its part in a generation; None without a supervisor.
        step: steps taken, over all generations.
    """

    def __init__(
        self,
        assignment: Assignment | None,
        lifeline: Lifeline | None,
        coordination: Coordination,
        stop: StopRequest | None = None,
    ):
        self.assignment = assignment
        self.step = 0
        self._lifeline = lifeline
        self._coordination = coordination
        self._stop = stop or StopRequest()
        self._stop_at: int | None = None
        self._have_agreed = False  # to stop, behind a meeting of all
        self._checkpoints: Checkpoints | None = None
        self._cadence = Cadence()
        self._identity: Callable[[], Mapping[str, Any]] = dict
        self._saved_step = -1
        self._last: tuple[int, Any] | None = None
        self._num_planned = 0
        self._only_in_memory: Any | None = None
        """The shapes of the state that this generation began with, where it came from memory."""

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
    def rank(self) -> int:
        """Which worker this is."""
        return jax.process_index()

    @property
    def num_workers(self) -> int:
        """Of how many."""
        return jax.process_count()

    @property
    def is_first(self) -> bool:
        """Whether this worker writes and prints for all."""
        return is_first()

    @property
    def run_dir(self) -> pathlib.Path:
        """The run's output folder."""
        if self.assignment is None:
            raise ElasticError("A run without a supervisor has no folder. Start it by autoshard.elastic.run.")
        return pathlib.Path(self.assignment.run_dir)

    @property
    def stopped_by_signal(self) -> bool:
        """Whether this process itself was told by a signal to stop."""
        return self._stop.requested

    def plan(self, fn: Callable[..., Any], *arguments: Any, **options: Any) -> Plan | StagedPlan:
        """The plan of `fn` for the devices of this generation, made once for each set of devices and kept.

        A run may plan several programs, always in the same order; the first one is the step that trains, whose plan
        stands for the run.

        Args:
            fn: what to plan, as for `autoshard.plan`.
            *arguments: its arguments, by shape.
            **options: those of `autoshard.plan`; without `cluster` for the live devices.

        Raises:
            AutoshardError: no plan satisfies the limits.
        """

        def why_unfit(kept: Plan | StagedPlan) -> str | None:
            if kept.num_devices != jax.device_count():
                return f"the plan is for {kept.num_devices} devices, and there are {jax.device_count()}"
            try:
                kept.check(fn, arguments)
            except PlanMismatchError as error:
                return str(error).partition("\n")[0]
            return None

        return self.choose_plan(lambda: plan_on_devices(fn, *arguments, **options), why_unfit).plan

    def choose_plan(
        self,
        make: Callable[[], Plan | StagedPlan],
        why_unfit: Callable[[Plan | StagedPlan], str | None],
        cluster: Cluster | None = None,
    ) -> ChosenPlan:
        """The plan for the devices of this generation, and where it comes from; see `plan_for_devices`.

        The first call is for the step that trains, and each further one for another program.

        Args:
            make, why_unfit: as `plan_for_devices` takes them.
            cluster: the devices, where they are described otherwise than JAX shows them.
        """
        self._num_planned += 1
        with self.during(Phase.PLANNING):
            chosen = plan_for_devices(
                self.run_dir,
                DeviceSet.of(cluster or Cluster.detect(), jax.process_count()),
                make=make,
                fits=why_unfit,
                decide_for_all=self._coordination.decided_by_the_first,
                is_dry_run=self.is_dry_run,
                program=self._num_planned,
            )
        if self.is_first and self._num_planned == 1:
            mesh = _mesh_text(chosen.plan)
            self.tell(Planned(plan=str(chosen.path), mesh=mesh, seconds=chosen.seconds, from_cache=chosen.from_cache))
        return chosen

    def compile(self, chosen: ChosenPlan, compile_program: Callable[[Callable[[], None]], None]) -> None:
        """Compiles what a plan makes of a program: the first worker alone, whose result the others find in the cache.

        Where all were compiled before, nobody waits.

        Args:
            chosen: the plan.
            compile_program: compiles it, and calls its argument when nothing but the compilation is left to do.
        """
        with self.during(Phase.COMPILE):
            if chosen.is_compiled:
                compile_program(lambda: None)
                return
            wait = lambda: self._coordination.barrier("autoshard/compiled", COMPILE_TIMEOUT_S)
            compile_program((lambda: None) if self.is_first else wait)
            if self.is_first:
                mark_compiled(chosen)
                wait()

    @contextlib.contextmanager
    def checkpoints(
        self,
        folder: pathlib.Path,
        cadence: Cadence,
        identity: Callable[[], Mapping[str, Any]],
        tell: Tell = lambda message: None,
    ) -> Iterator[Checkpoints]:
        """The checkpoints of the run while the block runs, which `restore` and `commit` use.

        Args:
            folder: of those on disk.
            cadence: how often `commit` makes the state safe, and where.
            identity: what identifies the run, as plain data; asked for at the first checkpoint.
            tell: called with what becomes of checkpoints, beside the supervisor.
        """

        def told(message: messages.Committed | messages.Rejected | messages.NotSaved) -> None:
            self.tell(message)
            tell(message)

        memory = None
        if self.assignment is not None and cadence.memory_every is not None and not self.is_dry_run:
            place = self.assignment
            memory = MemoryTier(pathlib.Path(place.memory_dir), place.host, place.run_id, told, place.coordinator)
        with Checkpoints(folder, cadence.keep, told, memory) as opened:
            self._checkpoints, self._cadence, self._identity = opened, cadence, identity
            yield opened
            self._checkpoints = None

    def restore(self, state: Any) -> Any:
        """The newest state of the run that is safe, in memory or on disk; `step` tells how many steps it has taken.

        Args:
            state: the initial state, sharded as the plan says; it is returned if nothing was saved.
        """
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        found = self.restored(lambda: self._open().restore(like), lambda: state)
        self._only_in_memory = like if found.source is messages.Tier.MEMORY else None
        self.begin_steps()
        return found.state

    def restored(self, find: Callable[[], Restored | None], make: Callable[[], Any]) -> Restored:
        """What `find` gives, or else the initial state that `make` gives; and the first step is at hand.

        A dry run always starts with the initial state.
        """
        with self.during(Phase.RESTORE):
            started_s = time.perf_counter()
            found = None if self.is_dry_run else find()
            found = Restored(0, make(), None) if found is None else found
        self.step = self._saved_step = found.step
        if self.is_first:
            seconds = time.perf_counter() - started_s
            self.tell(messages.Restored(step=found.step, source=found.source, seconds=seconds))
        self._agree_to_stop()
        return found

    def begin_steps(self) -> None:
        """Tells that the next step is the first of this generation, and is compiled on the way."""
        if self._lifeline is not None:
            self._lifeline.at(Phase.COMPILE, self.step)

    def stepped(self, step: int) -> None:
        """Tells that `step` steps are taken; and all workers agree whether to stop."""
        self.step = step
        if self._lifeline is not None:
            self._lifeline.at(Phase.TRAINING, step)
        if self.is_dry_run:
            raise DryRunOver
        self._agree_to_stop()

    def commit(self, step: int, state: Any) -> None:
        """Makes a state safe, as often as the cadence says; to be called after every step.

        Waits for the step, and returns once the state has been copied, so that the next one may reuse its memory. The
        last one is written to disk when the loop ends, whatever the cadence.

        Args:
            step: steps taken, over all generations.
            state: after them.

        Raises:
            TrainingError: an earlier checkpoint could not be written, for another reason than a full disk.
        """
        # XLA:CPU runs what is queued at once: the step's collectives would mix with those of a checkpoint.
        jax.block_until_ready(state)
        self._last = step, state
        self.keep(step, state)
        disk_every = self._cadence.disk_every
        if disk_every is not None and step % disk_every == 0:
            self.save(step, state)
        self.stepped(step)

    def keep(self, step: int, state: Any) -> None:
        """Begins to keep a state in memory, as often as the cadence says."""
        memory_every = self._cadence.memory_every
        if memory_every is not None and step % memory_every == 0:
            self._open().commit(step, state)

    def save(self, step: int, state: Any) -> None:
        """Begins to write a state to disk, whatever the cadence."""
        self._open().save(step, state, self._identity())
        self._saved_step = step

    def save_last_commit(self) -> None:
        """Writes the state that was committed last, in this generation or before, to disk, and waits until it is there.

        Raises:
            TrainingError: it cannot be written, and the run would end here.
        """
        with self.during(Phase.SAVING):
            if self._last is None and self._only_in_memory is not None:
                found = self._open().restore(self._only_in_memory, messages.Tier.MEMORY)
                if found is not None:
                    self.save(found.step, found.state)
            elif self._last is not None and self._saved_step != self._last[0]:
                self.save(*self._last)
            if self.should_stop() or self.step == 0:
                self._open().wait()
            else:
                self._open().require(self.step)

    def should_stop(self) -> bool:
        """Whether to end now, before the next step; all workers say so after the same step."""
        return self._stop_at is not None and self.step >= self._stop_at

    def listen(self, stop: StopRequest) -> None:
        """Takes signals to this process for requests to stop, too."""
        self._stop = stop

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

    def _open(self) -> Checkpoints:
        if self._checkpoints is None:
            raise ElasticError("Worker.restore and Worker.commit work within `autoshard.elastic.run` only.")
        return self._checkpoints

    def _agree_to_stop(self) -> None:
        """All workers meet after every step, and agree whether to stop after it.

        They meet by the coordination service, since a step need not have a collective of all: where everything is
        copied it has none, and the workers would drift apart. Who is asked to stop writes its step before they meet,
        and all read behind that. Whoever reads so late that the next step's number is there already takes that step,
        meets the others behind it, and stops with them.
        """
        if self._have_agreed:
            return
        if self._stop.requested or (self._lifeline is not None and self._lifeline.drain is not None):
            self._coordination.put_once(_DRAIN_AT, str(self.step))
        self._coordination.barrier("autoshard/stepped", STEP_TIMEOUT_S)
        text = self._coordination.get(_DRAIN_AT)
        self._stop_at = None if text is None else int(text)
        self._have_agreed = self.should_stop()


def _mesh_text(plan: Plan | StagedPlan) -> str:
    """The mesh of a plan, or how many devices its stages share."""
    if isinstance(plan, Plan):
        return " x ".join(f"{axis}={size}" for axis, size in plan.axes)
    return f"{plan.num_devices} devices in stages"


def run_identity(run_dir: pathlib.Path) -> dict[str, Any]:
    """What tells a run in code from others: its plan.

    Raises:
        TrainingError: it is not there any more.
    """
    path = run_dir / "plan.json"
    try:
        return {"plan": json.loads(path.read_text())}
    except OSError as error:
        raise TrainingError(
            f"A checkpoint carries the plan of its run, and {path} cannot be read any more: {error.strerror}. Put the "
            "output folder back, or start the run again."
        ) from error

"""Measures when the tasks of a step ran.

JAX hands work to devices and returns at once, so a task's end is seen by waiting for its result: a thread for each
submesh does, in the submesh's order. A task's beginning is not seen; it is when its submesh had ended the task before,
its inputs were made, and it had been handed over. So a task's inputs are waited for while it does not run, but their
way to it, if they come from elsewhere, counts as part of it.
"""

import collections
import dataclasses
import json
import queue
import threading
import time
from typing import Any

import jax

from autoshard.pipelines.plan.parameter_owners import StageId
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.pipelines.run.device_meshes import DeviceMeshes
from autoshard.pipelines.schedule.tasks import Phase, Task
from autoshard.pipelines.schedule.timeline import Event, SubmeshSummary, Timeline, busy_time
from autoshard.transfer.peers import all_gather_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Dispatched:
    """A task as it was handed over; `marker` is ready when it has ended."""

    one: StageId
    phase: Phase
    micro_batch: int
    handed_s: float
    marker: Any = None


class Recorder:
    """Records one step, from its making to `end`."""

    def __init__(self, plan: PipelinePlan, device_meshes: DeviceMeshes):
        self._plan, self._device_meshes = plan, device_meshes
        self._began_s = time.perf_counter()
        self._began_at_s = time.time()
        self._ended: list[tuple[_Dispatched, float]] = []
        self._lock = threading.Lock()
        self._queues: dict[int, queue.SimpleQueue[_Dispatched | None]] = {}
        self._threads: list[threading.Thread] = []
        self._step_s = 0.0

    def task(self, one: StageId, phase: Phase, micro_batch: int, marker: jax.Array) -> None:
        """Takes note of a task that was handed over; `marker` is ready when it has ended."""
        submesh = self._device_meshes.submesh_of(one)
        if submesh not in self._queues:
            self._queues[submesh] = queue.SimpleQueue()
            self._threads.append(threading.Thread(target=self._watch, args=(self._queues[submesh],), daemon=True))
            self._threads[-1].start()
        handed_s = time.perf_counter() - self._began_s
        self._queues[submesh].put(_Dispatched(one, phase, micro_batch, handed_s, marker))

    def _watch(self, waiting: "queue.SimpleQueue[_Dispatched | None]") -> None:
        while (task := waiting.get()) is not None:
            try:
                jax.block_until_ready(task.marker)
            except jax.errors.JaxRuntimeError:
                return  # the step fails, which is told where it is waited for
            with self._lock:
                self._ended.append((task, time.perf_counter() - self._began_s))

    def end(self) -> None:
        """The step is over: all that it makes is ready."""
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._step_s = time.perf_counter() - self._began_s

    def timeline(self) -> Timeline:
        """What was recorded; all processes of a run must call this together.

        The tasks of other processes are seen by the hosts' clocks of the time of day.
        """
        ended, step_s = self._of_all()
        stops: dict[tuple[StageId, Phase, int], float] = {}
        free: dict[int, float] = collections.defaultdict(float)
        events: list[Event] = []
        for task, stop_s in sorted(ended, key=lambda pair: pair[1]):
            submesh = self._device_meshes.submesh_of(task.one)
            start_s = min(stop_s, max(free[submesh], task.handed_s, self._inputs_s(task, stops)))
            free[submesh] = stop_s
            stops[task.one, task.phase, task.micro_batch] = stop_s
            name = str(Task(task.one.stage, task.phase, task.micro_batch))
            local = task.one.stage % len(self._plan.meshes[task.one.pipeline])
            events.append(
                Event(task.one.pipeline, local, name, start_s, stop_s, task.phase, task.one.stage, task.micro_batch)
            )
        events.sort(key=lambda e: (e.start_s, e.stop_s))
        return Timeline(tuple(events), tuple(self._summaries(events, step_s)), step_s, "recorded")

    def _of_all(self) -> tuple[list[tuple[_Dispatched, float]], float]:
        """The ended tasks of all processes, and the time of the step, counted from when the first process began it."""
        if jax.process_count() == 1:
            return self._ended, self._step_s
        own = [
            (t.one.pipeline, t.one.stage, t.phase.name, t.micro_batch, t.handed_s, stop_s) for t, stop_s in self._ended
        ]
        texts = all_gather_bytes(json.dumps([self._began_at_s, self._step_s, own]).encode())
        told = [json.loads(text) for text in texts]
        began_at_s = min(at_s for at_s, _, _ in told)
        last: dict[tuple[StageId, Phase, int], tuple[_Dispatched, float]] = {}  # of processes that run a task together
        for at_s, _, tasks in told:
            for pipeline, stage, phase, micro_batch, handed_s, stop_s in tasks:
                one, late_s = StageId(pipeline, stage), at_s - began_at_s
                task = _Dispatched(one, Phase[phase], micro_batch, handed_s + late_s)
                key = one, task.phase, micro_batch
                if key not in last or last[key][1] < stop_s + late_s:
                    last[key] = task, stop_s + late_s
        return list(last.values()), max(at_s - began_at_s + step_s for at_s, step_s, _ in told)

    def _inputs_s(self, task: _Dispatched, stops: dict[tuple[StageId, Phase, int], float]) -> float:
        pipeline, stage, m = task.one.pipeline, task.one.stage, task.micro_batch
        match task.phase:
            case Phase.FORWARD:
                before = [(StageId(pipeline, stage - 1), Phase.FORWARD, m)]
            case Phase.BACKWARD:
                before = [(StageId(pipeline, stage + 1), Phase.BACKWARD, m), (task.one, Phase.FORWARD, m)]
            case Phase.WEIGHT:
                before = [(task.one, Phase.BACKWARD, m)]
        return max((stops.get(key, 0.0) for key in before), default=0.0)

    def _summaries(self, events: list[Event], step_s: float) -> list[SubmeshSummary]:
        found = []
        for expected in self._plan.timeline.submeshes:
            own = [e for e in events if (e.pipeline, e.submesh) == (expected.pipeline, expected.submesh)]
            busy_s = busy_time(own)
            found.append(
                dataclasses.replace(
                    expected,
                    busy_s=busy_s,
                    bubble_share=max(0.0, 1 - busy_s / step_s) if step_s else 0.0,
                    most_in_flight=_most_in_flight(own),
                )
            )
        return found


def _most_in_flight(events: list[Event]) -> int:
    """Most micro-batches that one stage holds at once, each from its first task's beginning to its last one's end.

    A phase that has nothing to do in a stage, such as the backward phase of a first one, is no event.
    """
    held = collections.Counter[int]()
    most = 0
    spans: dict[tuple[int, int], list[Event]] = collections.defaultdict(list)
    for event in events:
        spans[event.stage, event.micro_batch].append(event)
    changes = []
    for (stage, _), own in spans.items():
        changes += [(min(e.start_s for e in own), 1, stage), (max(e.stop_s for e in own), -1, stage)]
    for _, change, stage in sorted(changes):  # at one instant, what ends is let go before what begins is held
        held[stage] += change
        most = max(most, held[stage])
    return most

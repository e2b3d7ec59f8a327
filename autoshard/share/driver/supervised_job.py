"""One job as a process: `autoshard launch`, which supervises its workers, and what its log tells."""

import contextlib
import dataclasses
import os
import pathlib
import statistics
import subprocess
import sys

import psutil

from autoshard.errors import ShareError
from autoshard.launch.events import (
    DrainStarted,
    Event,
    EventReader,
    Finished,
    GenerationStarted,
    RunFailed,
    StepCommitted,
    Stopped,
)
from autoshard.launch.requests import ScaleRequest, write_scale_request
from autoshard.launch.run_lock import holder_of
from autoshard.share.footprint import Footprint
from autoshard.share.situation import Job

_MEASURED = 5
"""Of so many last moves the median is taken as the price of the next."""

_STEPS_TIMED = 10
"""Speed is measured over so many saved steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class Launchable:
    """A job that can be run.

    Attributes:
        job: what is decided about.
        config, overrides: its training configuration.
    """

    job: Job
    config: str
    overrides: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How jobs are launched.

    Attributes:
        engine: `local` or `ray`.
        devices_per_worker: CPU devices of each worker; None for one worker a node, with the accelerators of its host.
        more: further options of `autoshard launch`.
        program: what is started; takes what `autoshard launch` takes.
    """

    engine: str = "local"
    devices_per_worker: int | None = None
    more: tuple[str, ...] = ()
    program: tuple[str, ...] = (sys.executable, "-m", "autoshard", "launch")

    def workers(self, footprint: Footprint) -> int | None:
        """Workers on a footprint; None where they do not divide it."""
        if self.devices_per_worker is None:
            return sum(part.num_nodes for part in footprint.parts)
        workers, rest = divmod(footprint.num_devices, self.devices_per_worker)
        return None if rest else workers


class SupervisedJob:
    """The process of one job, started as often as it takes."""

    def __init__(self, launchable: Launchable, run_dir: pathlib.Path, options: LaunchOptions):
        """Args:
        launchable: the job.
        run_dir: its output folder, from which it continues if it ran before.
        options: how it is launched.

        Raises:
            ShareError: none of its footprints can be made of workers.
        """
        self.job, self.run_dir, self._options = launchable.job, run_dir, options
        sizes = {w for rate in self.job.rates.entries if (w := options.workers(rate.footprint)) is not None}
        if not sizes:
            raise ShareError(
                f"Job {self.job.name!r}: a footprint must be a multiple of a worker's {options.devices_per_worker} "
                "devices; none is. Give other footprints, or another --devices-per-worker."
            )
        limits = f"{min(sizes)}:{max(sizes)}" if self.job.is_elastic else str(max(sizes))
        self._command = [
            *(*options.program, launchable.config, *launchable.overrides),
            *(f"train.output_dir={run_dir}", "--workers", limits, "--engine", options.engine),
            *(() if options.devices_per_worker is None else ("--devices-per-worker", str(options.devices_per_worker))),
            *options.more,
        ]
        self._reader = EventReader(run_dir)
        self._events: list[Event] = []
        self._num_forgiven = 0
        """So many of the events were there before a failure counts."""
        self._process: subprocess.Popen[bytes] | None = None
        self.is_stopping = False

    def forgive(self) -> None:
        """A failure that has been read already no longer counts: who runs the job again has mended what it was."""
        self._num_forgiven = len(self._events)

    def start(self, workers: int) -> None:
        """Starts it with so many workers; it continues what is saved."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.is_stopping = False
        self.scale(workers)
        with (self.run_dir / "supervisor.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def scale(self, workers: int) -> None:
        """Asks for another number of workers."""
        write_scale_request(self.run_dir, ScaleRequest(workers=workers))

    def stop(self) -> None:
        """Asks it to save and end."""
        self.is_stopping = True
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).terminate()

    def kill(self) -> None:
        """Ends it at once; its workers end with it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int | None:
        """The process that supervises it: ours, or one that an earlier driver left; None if there is none."""
        if self._process is not None and self._process.poll() is None:
            return self._process.pid
        return holder_of(self.run_dir)

    def read(self) -> None:
        """Takes what is new in its log."""
        self._events += self._reader.new()

    @property
    def ending(self) -> Finished | Stopped | RunFailed | None:
        """How its last supervisor ended; None while one runs, or if it was killed, or if its failure is forgiven."""
        last = self._events[-1] if self._events else None
        if isinstance(last, RunFailed) and len(self._events) <= self._num_forgiven:
            return None
        return last if isinstance(last, Finished | Stopped | RunFailed) else None

    @property
    def step(self) -> int:
        """The newest step that is saved."""
        return max((e.step for e in self._events if isinstance(e, StepCommitted | Finished | Stopped)), default=0)

    @property
    def workers(self) -> int:
        """Workers of the generation that runs, or ran last."""
        started = [e for e in self._events if isinstance(e, GenerationStarted)]
        return len(started[-1].workers) if started else 0

    @property
    def generations(self) -> int:
        """How many were started."""
        return sum(isinstance(e, GenerationStarted) for e in self._events)

    @property
    def move_s(self) -> float | None:
        """What its last moves took, from the request to save until the next saved step; None before the first."""
        times: list[float] = []
        asked_s: float | None = None
        is_next = False
        for event in self._events:
            if isinstance(event, DrainStarted):
                asked_s, is_next = event.time, False
            elif isinstance(event, GenerationStarted):
                is_next = True
            elif isinstance(event, StepCommitted) and asked_s is not None and is_next:
                times.append(event.time - asked_s)
                asked_s = None
        return statistics.median(times[-_MEASURED:]) if times else None

    @property
    def steps_per_s(self) -> float | None:
        """Its speed over the last steps of the generation that runs; None before there are some."""
        own = [e for e in self._events if isinstance(e, StepCommitted) and e.generation == self._events[-1].generation]
        last = own[-_STEPS_TIMED:]
        if len(last) < _STEPS_TIMED or last[-1].time <= last[0].time:
            return None
        return (last[-1].step - last[0].step) / (last[-1].time - last[0].time)

    @property
    def error(self) -> str:
        """Why it failed, or the end of what its supervisor printed."""
        if isinstance(self.ending, RunFailed):
            return self.ending.error
        with contextlib.suppress(OSError):
            text = (self.run_dir / "supervisor.log").read_text(errors="replace").strip()
            return text.rpartition(os.linesep)[2]
        return ""

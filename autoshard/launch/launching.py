"""Starts the supervisor of a run, or a new one for a run that has lost its own."""

import contextlib
import os
import socket
import time
from collections.abc import Callable

import psutil

from autoshard.errors import ElasticError
from autoshard.launch.engines.protocol import Engine
from autoshard.launch.events import EventLog, SupervisorStarted, read_events
from autoshard.launch.goodput import goodput
from autoshard.launch.report import goodput_lines
from autoshard.launch.run_lock import run_lock
from autoshard.launch.settings import LaunchSettings
from autoshard.launch.supervisor import RunOutcome, Supervisor


def launch_run(settings: LaunchSettings, make_engine: Callable[[], Engine], say: Callable[[str], None]) -> RunOutcome:
    """Supervises a run until it is over.

    Args:
        settings: the run; its folder must be there.
        make_engine: makes what its workers run on, once it is certain that nobody else supervises the run.
        say: shows a line to people.

    Returns:
        How it ended.

    Raises:
        ElasticError: another supervisor has the run, or its folder cannot be written to.
    """
    with run_lock(settings.run_dir):
        earlier = list(read_events(settings.run_dir))
        kill_leftovers(settings.run_variable)
        shown = os.path.relpath(settings.run_dir)
        log, started_s = EventLog(settings.run_dir), time.time()
        run_id = repr(earlier[0].time if earlier else started_s)
        last = max((event.generation for event in earlier), default=0)
        engine = make_engine()
        started = SupervisorStarted(
            time=started_s,
            generation=last,
            pid=os.getpid(),
            host=socket.gethostname(),
            engine=engine.name,
            least_workers=settings.least_workers,
            most_workers=settings.most_workers,
            resumed=bool(earlier),
        )
        try:
            log.write(started)
        except OSError as error:
            engine.close()
            raise ElasticError(
                f"{shown}: the events of a run are written to its output folder; that fails: {error}. Make room, or "
                "choose another output folder."
            ) from error
        say(f"What workers print goes to {settings.command.log_dir}; to follow the run: autoshard status {shown}")
        outcome = Supervisor(settings, engine, log, run_id, earlier, say).run()
        for line in goodput_lines(goodput(read_events(settings.run_dir))):
            say(line)
        return outcome


def kill_leftovers(variable: tuple[str, str]) -> None:
    """Kills processes of this machine and user that have an environment variable of this value.

    Workers end when their supervisor does; a new supervisor does not rely on that.
    """
    name, value = variable
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(name) == value:
                process.kill()
                process.wait(10)

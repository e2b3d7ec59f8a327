"""Runs several processes of Python that belong together, and tells what each printed.

They are forked from a server that has imported JAX and autoshard already, once for all tests of a process: an
interpreter of its own takes 4 s of processor time for that. Else they are as if they had been started: nothing of JAX
has run before them, and they end as interpreters do. That autoshard starts from nothing is shown by the tests of the
command line and of launched runs.
"""

import atexit
import multiprocessing
import os
import pathlib
import runpy
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver

import jax

TIMEOUT_S = 240
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["imported"])


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run_together(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]] | None = None
) -> list[str]:
    """What each prints; fails with all their output if one fails or takes too long.

    Args:
      commands: Of each process: this interpreter, a script or `-c` and a program, and its arguments. environments:
        Likewise; None for this process's own.
    """
    environments = environments or [os.environ] * len(commands)
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, str(number)) for number in range(len(commands))]
        processes = []
        late = threading.Timer(TIMEOUT_S, lambda: [process.kill() for process in processes])
        try:
            for command, environment, log in zip(commands, environments, logs, strict=True):
                processes.append(start(command, environment, log))
            late.start()
            for process in processes:
                process.join()
        finally:
            late.cancel()
            for process in processes:
                process.kill()
                process.join()
        printed = [log.read_text() if log.exists() else "" for log in logs]
    assert [process.exitcode for process in processes] == [0] * len(commands), "\n\n".join(printed)
    return printed


def start(
    command: Sequence[str], environment: Mapping[str, str], output: pathlib.Path, errors: pathlib.Path | None = None
) -> multiprocessing.Process:
    """A process as `run_together` has them, which writes to files; errors go to `output` unless they have their own."""
    _start_server()
    process = PROCESSES.Process(target=_run, args=(list(command[1:]), dict(environment), output, errors or output))
    process.start()
    return process


def _start_server() -> None:
    """Starts what processes are forked from, unless it runs. It finds what this process finds, for which Python 3.11
    does not care before it is asked for a process."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)


def _run(arguments: list[str], environment: dict[str, str], output: pathlib.Path, errors: pathlib.Path) -> None:
    """Is the process from here to its end."""
    for stream, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    jax.config.update("jax_platforms", environment.get("JAX_PLATFORMS"))  # which JAX reads when it is imported
    status = 0
    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(arguments[1], {"__name__": "__main__"})
        else:
            sys.argv = arguments
            sys.path.insert(0, str(pathlib.Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # as at the end of an interpreter, which a forked process would pass over
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = 120
    os._exit(status)

"""One process of a worker on this machine: started, heard, and killed with all that it started."""

import contextlib
import os
import pathlib
import signal
import subprocess

import psutil

from autoshard.launch.engines.parent_death import dying_with_parent
from autoshard.launch.engines.protocol import Command
from autoshard.launch.messages import MESSAGES_FD

_CHUNK_BYTES = 1 << 16


class WorkerProcess:
    """A process that leads a session of its own, so that a terminal's Ctrl-C does not reach it.

    Attributes:
        pid: its number.
        messages: file descriptor to read its messages from; it does not block.
    """

    def __init__(self, command: Command, log_name: str):
        """Starts the process; its output is appended to the file `log_name` in the command's folder."""
        self.messages, writing = os.pipe()
        os.set_blocking(self.messages, False)
        folder = pathlib.Path(command.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **command.environment, MESSAGES_FD: str(writing)}
        try:
            with (folder / log_name).open("ab") as log:
                self._process = subprocess.Popen(
                    dying_with_parent(command.arguments),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=(writing,),
                    start_new_session=True,
                )
        finally:
            os.close(writing)
        self.pid = self._process.pid
        self._unread = b""
        if command.niceness:
            with contextlib.suppress(psutil.Error):
                psutil.Process(self.pid).nice(command.niceness)

    def send(self, text: str) -> None:
        """Writes to its standard input; nothing happens if it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()

    def terminate(self) -> None:
        """Sends it SIGTERM; nothing happens if it has ended."""
        if self._process.returncode is None:
            self._process.terminate()

    def lines(self) -> list[bytes]:
        """The whole lines that it has written to its messages since the last call."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.messages, _CHUNK_BYTES):
                self._unread += chunk
        *whole, self._unread = self._unread.split(b"\n")
        return whole

    def exit_status(self) -> int | None:
        """Its exit status, negative for the signal that ended it; None while it runs.

        What it left behind in its process group is killed before the number of the group can be given to another.
        """
        if self._process.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            self._kill_group()
            self._process.wait()
        return self._process.returncode

    def kill(self) -> None:
        """Kills it and all that it started, and returns when it is gone; it may be called again."""
        if self._process.returncode is None:
            children = []
            with contextlib.suppress(psutil.Error):
                children = psutil.Process(self.pid).children(recursive=True)
            self._kill_group()
            for child in children:  # of those that made a group of their own
                with contextlib.suppress(psutil.Error):
                    child.kill()
            self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self.messages >= 0:
            os.close(self.messages)
            self.messages = -1

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

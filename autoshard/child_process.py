"""A process of one's own that answers requests one after another, and that its owner may kill at any moment.

Both ends are here. Requests and answers are pickled behind their length, on the standard streams, which nobody else
has. The process ends when its input does, even in the midst of an answer, so that it does not outlive its owner. This
file needs Python alone, so that a process starts fast.
"""

import contextlib
import os
import pickle
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

_LENGTH = struct.Struct("<Q")
"""Comes before every message: its length in bytes."""


def packed(message: Any) -> bytes:
    """A message as bytes, which may be sent several times."""
    return pickle.dumps(message, protocol=5)


def unpacked(data: bytes) -> Any:
    """What `packed` was given."""
    return pickle.loads(data)


class ChildProcess:
    """The owner's end of a process, which runs from its making to `end`.

    Attributes:
      process: It.

    Args:
      program: What follows the name of the Python interpreter: the file, or `-m` and the module.
      environment: Variables that it has other than this process.
      is_silent: Whether what it writes to its standard error is thrown away.
    """

    def __init__(
        self, program: Sequence[str], environment: Mapping[str, str] | None = None, is_silent: bool = False
    ) -> None:
        path = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if is_silent else None,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            start_new_session=True,  # Ctrl-C in a terminal is for the owner alone
        )

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def exchange(self, request: Any) -> tuple[bool, Any]:
        """Sends a request and waits for the answer: (True, it), (False, the text of an error), or (False, None) if the
        process is gone. `request` may be `packed` already."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            _send(self.process.stdin, request)
            return _receive(self.process.stdout)
        except (OSError, EOFError, ValueError):
            return False, None

    def end(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.wait()
        for stream in filter(None, (self.process.stdout, self.process.stdin)):
            with contextlib.suppress(OSError):  # what was still to be written has no reader
                stream.close()


def serve(answer: Callable[[Any], Any]) -> None:
    """What the process does: answers requests until the input ends.

    Args:
      answer: Makes the answer to a request; the owner is told of what it raises, and decides.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries print at times; that must not come between the answers
    requests: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, requests), daemon=True).start()
    while True:
        request = requests.get()
        try:
            told = (True, answer(request))
        except Exception as error:
            told = (False, f"{type(error).__name__}: {error}")
        _send(answers, told)


def _send(stream: IO[bytes], message: Any) -> None:
    data = message if isinstance(message, bytes) else packed(message)
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """Raises EOFError at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return unpacked(data)


def _listen(source: IO[bytes], requests: queue.SimpleQueue) -> None:
    try:
        while True:
            requests.put(_receive(source))
    except BaseException:  # whatever ends the stream ends the process
        os._exit(0)

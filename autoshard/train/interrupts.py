"""Ctrl-C as a request: the first one asks the run to end after its current step, the second ends it at once."""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@dataclasses.dataclass(slots=True)
class StopRequest:
    """Whether a stop has been asked for."""

    requested: bool = False


@contextlib.contextmanager
def stop_on_sigint() -> Iterator[StopRequest]:
    """Turns the first SIGINT within the block into a `StopRequest`; the second raises KeyboardInterrupt.

    Only Python's main thread receives signals; elsewhere nothing is changed and the request stays unset.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if request.requested:
            raise KeyboardInterrupt
        request.requested = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, before)

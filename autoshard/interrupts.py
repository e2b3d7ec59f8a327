"""Ctrl-C as a request: the first one asks the work to end at the next good moment, the second ends it at once."""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType


@dataclasses.dataclass(slots=True)
class StopRequest:
    """Whether a stop has been asked for, and whether it has been asked for again."""

    requested: bool = False
    is_urgent: bool = False


@contextlib.contextmanager
def stop_on_signals(numbers: Sequence[int] = (signal.SIGINT,)) -> Iterator[StopRequest]:
    """Turns the first of the given signals within the block into a `StopRequest`; the second raises KeyboardInterrupt.

    Only Python's main thread receives signals; elsewhere nothing is changed and the request stays unset. Handlers that
    the program installed itself are left in place, and so is a signal that the process was started to ignore. A block
    within another that listens to one of the same signals shares its request.
    """
    if threading.current_thread() is not threading.main_thread():
        yield StopRequest()
        return
    around = [handler for handler in map(signal.getsignal, numbers) if isinstance(handler, _Handler)]
    if around:
        yield around[0].request
        return
    request = StopRequest()
    handle = _Handler(request)
    before = {}
    try:
        for number in numbers:
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                before[number] = signal.signal(number, handle)
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Handler:
    """Notes the first signal in a request, and raises KeyboardInterrupt at the next."""

    def __init__(self, request: StopRequest) -> None:
        self.request = request

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.request.requested:
            self.request.is_urgent = True
            raise KeyboardInterrupt
        self.request.requested = True

"""Requests to end work at the next good moment: a first Ctrl-C (the second ends it at once), or a time limit."""

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType


@dataclasses.dataclass(slots=True)
class StopRequest:
    """Whether work is to end.

    Attributes:
      is_asked: Whether somebody asked for it. is_urgent: Whether it was asked for again.
      until_s: When (`time.perf_counter`) the time is over. around: A request that counts as well; None for none.
    """

    is_asked: bool = False
    is_urgent: bool = False
    until_s: float = math.inf
    around: "StopRequest | None" = None

    @property
    def requested(self) -> bool:
        """Whether work ends at the next good moment."""
        if self.is_asked or self.around is not None and self.around.requested:
            return True
        return time.perf_counter() >= self.until_s

    def until(self, until_s: float) -> "StopRequest":
        """A request to end when this one says so, and at a time (`time.perf_counter`) at the latest."""
        return StopRequest(until_s=until_s, around=self)


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
        if self.request.is_asked:
            self.request.is_urgent = True
            raise KeyboardInterrupt
        self.request.is_asked = True

"""The last resort that keeps a limit: a thread that gives the best answer so far and ends the process.

Compiled kernels and libraries look at no clock, and Python handles a signal only once they return. A second thread is
not held up by those that release Python's lock. It wakes at the deadline, or some seconds after a signal, and if the
main thread has not ended by then, it does what is to be done last and leaves.
"""

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

SIGNAL_GRACE_S = 3.0
"""Time for the main thread to end by itself after a signal."""


@contextlib.contextmanager
def watchdog(deadline: float, give_up: Callable[[], int]) -> Iterator[None]:
    """Runs `give_up` and exits with the status that it returns, unless the block is left in time.

    Args:
      deadline: Value of `time.perf_counter`; +inf for none. Signals that Python handles bring it forward.
      give_up: Called in the other thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    left = threading.Lock()  # taken by whoever ends first

    def watch() -> None:
        until = deadline
        with selectors.DefaultSelector() as selector:
            selector.register(reader, selectors.EVENT_READ)
            while (wait_s := until - time.perf_counter()) > 0:
                if selector.select(min(wait_s, 3600.0)):
                    if reader.recv(1) == LEFT:
                        return
                    until = min(until, time.perf_counter() + SIGNAL_GRACE_S)
        if left.acquire(blocking=False):
            os._exit(give_up())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        if not left.acquire(blocking=False):
            threading.Event().wait()  # the other thread is about to end the process
        signal.set_wakeup_fd(before)
        writer.send(LEFT)
        thread.join()
        reader.close()
        writer.close()


LEFT = b"\xff"
"""Tells the thread that the block was left; no signal has this number."""

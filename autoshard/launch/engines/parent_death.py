"""Processes that do not outlive the one that started them, even if it is killed."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
"""prctl(2) of Linux: the signal that a process gets when its parent dies."""

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Opened before any process is forked, since a fork should do as little as it can."""


def before_exec() -> Callable[[], None] | None:
    """What a child has to do between fork and exec so that the kernel kills it when this process dies.

    From then on nothing of the child's own is needed: it may be importing, be stopped, or hold Python's lock. None
    elsewhere than on Linux, where workers notice the end of their standard input instead.
    """
    libc, parent = _LIBC, os.getpid()
    if libc is None:
        return None

    def die_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died just before
            os._exit(1)

    return die_with_parent

"""Processes that do not outlive the one that started them, even if it is killed.

Run as a script, it becomes a program that the kernel kills when the process that ran the script dies. From then on
nothing of the program's own is needed: it may be importing, be stopped, or hold Python's lock. The script asks for that
itself, after exec: where a process has threads, as JAX's have, a fork must run no Python before exec (`preexec_fn` of
`subprocess` may then block for ever).
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
"""prctl(2) of Linux: the signal that a process gets when its parent dies; exec keeps it."""


def dying_with_parent(arguments: Sequence[str]) -> list[str]:
    """The command line of a program that dies with this process.

    Elsewhere than on Linux it is the program's own, and workers notice the end of their standard input instead.
    """
    if sys.platform != "linux":
        return list(arguments)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *arguments]


def _become(parent: int, arguments: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died just before
        sys.exit(1)
    os.execvp(arguments[0], arguments)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])

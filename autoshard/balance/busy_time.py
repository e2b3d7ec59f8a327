"""How long this process was busy, apart from waiting: as the scheduler of Linux accounts for it.

A thread is running, or it could run and waits for a core, or it sleeps. The first two together are the time of its own
work: a slow core lengthens the first, and other load or a quota the second. A thread that waits for other devices at a
collective sleeps, which counts for nothing. `/proc/self/task/*/schedstat` tells both in nanoseconds (Linux,
Documentation/scheduler/sched-stats.rst). Nothing is measured while a step runs.
"""

import contextlib
import os


class BusyTime:
    """Reads how long the threads of this process ran or waited for a core."""

    def __init__(self):
        self._files: dict[str, int] = {}
        self._ended_ns = 0
        self._last_ns: dict[str, int] = {}

    @property
    def is_known(self) -> bool:
        """Whether this system tells."""
        try:
            return self.seconds() > 0
        except (OSError, ValueError):
            return False

    def seconds(self) -> float:
        """Seconds of all threads together, since this was made or they began.

        Raises:
          OSError: The system does not tell.
        """
        for thread in os.listdir("/proc/self/task"):
            if thread not in self._files:
                with contextlib.suppress(FileNotFoundError):  # it has just ended
                    self._files[thread] = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        for thread, file in list(self._files.items()):
            try:
                running_ns, waiting_ns, *_ = os.pread(file, 64, 0).split()
                self._last_ns[thread] = int(running_ns) + int(waiting_ns)
            except ProcessLookupError:  # the thread has ended
                os.close(self._files.pop(thread))
                self._ended_ns += self._last_ns.pop(thread, 0)
        return (self._ended_ns + sum(self._last_ns.values())) / 1e9

    def close(self) -> None:
        """Closes its files."""
        for file in self._files.values():
            os.close(file)
        self._files = {}

"""How long this process was busy, apart from waiting: as the scheduler of Linux accounts for it.

A thread is running, or it could run and waits for a core, or it sleeps. A slow core lengthens the first, and other load
or a quota the second; a thread that waits for other devices at a collective sleeps, which counts for nothing.
`/proc/self/task/*/schedstat` tells the first two in nanoseconds (Linux, Documentation/scheduler/sched-stats.rst).
Nothing is measured while a step runs.

Where a quota stops a process, all its threads wait at once. So that such time counts once, the time that all threads
ran is stretched as that of the busiest one was.
"""

import contextlib
import os
from typing import NamedTuple


class _Spent(NamedTuple):
    running_ns: int = 0
    waiting_ns: int = 0


class BusyTime:
    """Measures laps: how long the threads of this process ran or waited for a core."""

    def __init__(self):
        self._files: dict[str, int] = {}
        self._last: dict[str, _Spent] = {}

    @property
    def is_known(self) -> bool:
        """Whether this system tells; begins a lap."""
        try:
            self.lap_s()
        except (OSError, ValueError):
            return False
        return any(spent.running_ns for spent in self._last.values())

    def lap_s(self) -> float:
        """Seconds since the last lap; of the first, since the threads began.

        Raises:
          OSError: The system does not tell.
        """
        for thread in os.listdir("/proc/self/task"):
            if thread not in self._files:
                with contextlib.suppress(FileNotFoundError):  # it has just ended
                    self._files[thread] = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        laps: list[_Spent] = []
        for thread, file in list(self._files.items()):
            try:
                now = _Spent(*map(int, os.pread(file, 64, 0).split()[:2]))
            except ProcessLookupError:  # the thread has ended
                os.close(self._files.pop(thread))
                self._last.pop(thread, None)
                continue
            before = self._last.get(thread, _Spent())
            laps.append(_Spent(now.running_ns - before.running_ns, now.waiting_ns - before.waiting_ns))
            self._last[thread] = now
        busiest = max(laps, default=_Spent())
        running_s = sum(lap.running_ns for lap in laps) / 1e9
        return running_s * (1 + busiest.waiting_ns / max(busiest.running_ns, 1))

    def close(self) -> None:
        """Closes its files."""
        for file in self._files.values():
            os.close(file)
        self._files, self._last = {}, {}

"""Processes that may use only part of a core, by Linux's cgroup CPU controller (version 1 or 2): real slow devices.

Needs root. A process that is limited gets its share before all other load of the machine, as long as shares add up to
less than the cores.
"""

import os
import pathlib

ROOT = pathlib.Path("/sys/fs/cgroup")
PERIOD_US = 20_000
_FIRST_V1, _FIRST_V2 = 262_144, 10_000
"""The largest weights against other groups."""


class CpuQuota:
    """A control group for this process and its threads.

    Args:
      name: Of the group.

    Raises:
      OSError: There is no CPU controller, or this is not root.
    """

    def __init__(self, name: str):
        self._is_v2 = (ROOT / "cgroup.controllers").exists()
        if self._is_v2:
            (ROOT / "cgroup.subtree_control").write_text("+cpu")
            self._folders = [ROOT / name]
        else:
            self._folders = [ROOT / "cpu" / name, ROOT / "cpuacct" / name]
        for folder in self._folders:
            folder.mkdir(exist_ok=True)
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        weight, first = ("cpu.weight", _FIRST_V2) if self._is_v2 else ("cpu.shares", _FIRST_V1)
        (self._folders[0] / weight).write_text(str(first))

    def limit(self, cores: float | None) -> None:
        """Lets this process use so many cores; None: as many as there are."""
        quota = None if cores is None else round(cores * PERIOD_US)
        if self._is_v2:
            (self._folders[0] / "cpu.max").write_text(f"{'max' if quota is None else quota} {PERIOD_US}")
            return
        (self._folders[0] / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self._folders[0] / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))

    def used_s(self) -> float:
        """CPU time that was used so far."""
        if self._is_v2:
            lines = (self._folders[0] / "cpu.stat").read_text().splitlines()
            return float(dict(line.split() for line in lines)["usage_usec"]) / 1e6
        return float((self._folders[1] / "cpuacct.usage").read_text()) / 1e9

    def close(self) -> None:
        """Leaves the group and removes it."""
        for folder in self._folders:
            (folder.parent / "cgroup.procs").write_text(str(os.getpid()))
            folder.rmdir()

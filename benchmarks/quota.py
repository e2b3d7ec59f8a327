"""Processes that may use only part of a core, by Linux's cgroup CPU controller (version 1 or 2): real slow devices.

Needs root. A process that is limited gets its share before all other load of the machine, as long as shares add up to
less than the cores. `result_of_workers` starts such processes, and `over_ratios` is the command line of a benchmark
that does so for one slowdown after another.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path("/sys/fs/cgroup")
PERIOD_US, SHORT_PERIOD_US = 20_000, 5_000
LEAST_QUOTA_US = 1_000
"""Of a period, the kernel's limit."""
_PREFIX = "autoshard-"
_FIRST_V1, _FIRST_V2 = 262_144, 10_000
"""The largest weights against other groups."""


class CpuQuota:
    """A control group for this process and its threads.

    That of a process that was killed is removed by who started it (`result_of_workers`), or by the next one.

    Args:
      name: What the group is for; it is told from others by the process's number.

    Raises:
      OSError: There is no CPU controller, or this is not root.
    """

    def __init__(self, name: str):
        self._is_v2 = _is_v2()
        if self._is_v2:
            (ROOT / "cgroup.subtree_control").write_text("+cpu")
        remove_left_groups()
        self._folders = [parent / f"{_PREFIX}{name}-{os.getpid()}" for parent in _parents()]
        for folder in self._folders:
            folder.mkdir(exist_ok=True)
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        weight, first = ("cpu.weight", _FIRST_V2) if self._is_v2 else ("cpu.shares", _FIRST_V1)
        (self._folders[0] / weight).write_text(str(first))

    def limit(self, cores: float | None, period_us: int = PERIOD_US) -> None:
        """Lets this process use so many cores; None: as many as there are.

        Args:
          cores: How many, at least LEAST_QUOTA_US of a period.
          period_us: A process that has used up its part of a period stands still for the rest of it.
        """
        quota = None if cores is None else round(cores * period_us)
        if self._is_v2:
            (self._folders[0] / "cpu.max").write_text(f"{'max' if quota is None else quota} {period_us}")
            return
        (self._folders[0] / "cpu.cfs_period_us").write_text(str(period_us))
        (self._folders[0] / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))

    def limit_evenly(self, cores: float | None) -> None:
        """As `limit`, in short periods: who has used up its part stands still, and all at the next sum."""
        shortest = 0 if cores is None else math.ceil(1.2 * LEAST_QUOTA_US / cores)
        self.limit(cores, max(SHORT_PERIOD_US, shortest))

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


def remove_left_groups() -> None:
    """Removes the groups of processes that are no more."""
    for folder in (folder for parent in _parents() for folder in parent.glob(f"{_PREFIX}*")):
        process = folder.name.rpartition("-")[2]
        if not pathlib.Path(f"/proc/{process}").exists():
            with contextlib.suppress(OSError):  # a process that it started is still there, or another removed it
                folder.rmdir()


def _is_v2() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def _parents() -> list[pathlib.Path]:
    """The folders of groups."""
    return [ROOT] if _is_v2() else [ROOT / "cpu", ROOT / "cpuacct"]


def result_of_workers(script: str, count: int, ratio: float, options: list[str]) -> dict:
    """What the first of `count` new processes of a script writes to `result.json`; each computes on one thread.

    They are started with `--worker ADDRESS NUMBER RATIO FOLDER` behind `options`, and end with this process where it is
    interrupted or asked to end.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, *options, "--worker", f"127.0.0.1:{port}"]
        workers = [
            subprocess.Popen([*command, str(number), str(ratio), folder], env=environment) for number in range(count)
        ]
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ended by SIGTERM."))
        try:
            codes = [worker.wait() for worker in workers]
        finally:  # also where this process is interrupted
            for worker in workers:
                worker.kill()
                worker.wait()
            remove_left_groups()
            signal.signal(signal.SIGTERM, before)
        if any(codes):
            raise SystemExit(f"The workers ended with {codes}.")
        return json.loads((pathlib.Path(folder) / "result.json").read_text())


def ideal_gain(slowness: Sequence[float]) -> float:
    """What work divided at will gains over equal shares, by how many times slower each process is."""
    speeds = [1 / w for w in slowness]
    return sum(speeds) / (len(speeds) * min(speeds))


def over_ratios(
    script: str,
    description: str | None,
    name: str,
    work: Callable[[str, int, int, float, pathlib.Path, int], None],
    rows: Callable[[dict[str, Any]], list[str]],
    table: Callable[[dict[str, Any], int], str],
) -> None:
    """Runs workers for each ratio that is asked for, and writes what they found, or is one of the workers.

    Args:
      script: The benchmark's file. description: What it is.
      name: Of its results, of which there are a `.json` and a `.md`.
      work: What a worker does: (address, its number, workers, ratio, folder for results, rounds).
      rows: Lines of a table of results by `processes|ratio`. table: The report of results and the number of rounds.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", default="2,4,8")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        address, number, ratio, folder = arguments.worker
        work(address, int(number), arguments.processes, float(ratio), pathlib.Path(folder), arguments.rounds)
        return
    path = pathlib.Path(script).resolve().parent / "results" / f"{name}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    own = ["--processes", str(arguments.processes), "--rounds", str(arguments.rounds)]
    for ratio in map(float, arguments.ratios.split(",")):
        key = f"{arguments.processes}|{ratio:g}"
        results[key] = result_of_workers(script, arguments.processes, ratio, own)
        print(*rows({key: results[key]}), sep="\n", flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".md").write_text(table(results, arguments.rounds))

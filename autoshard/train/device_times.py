"""The time of the same work on each device, apart from waiting for others.

Of several processes on CPUs, each looks at how long it was busy in its steps (`balance/busy_time.py`), which costs
nothing while a step runs; but only if XLA computes on one thread, since idle threads of its pool spin. Telling each
other takes a millisecond or two, so that the times of two steps are exchanged together: four clear steps name a device
(`balance/detect.py`), so that this is still within five. Elsewhere a small product runs on each device of the process
in turn, between steps. Either is done no more often than takes a hundredth of the time, but at least every fifth step.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.balance.busy_time import BusyTime
from autoshard.transfer.peers import all_gather_rows

MOST_OVERHEAD = 0.01
"""The part of a step that measuring may take."""
_PROBE_SIZE, _PROBE_S, _RUNS = 192, 5e-4, 3
"""Rows and columns of the products of a probe; seconds that one run of them takes, more than a dispatch; runs."""
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
_BUSY_EVERY, _MOST_EVERY = 2, 5
"""Steps after which processes tell each other how long they were busy, at least; and those after which they do, or
probes run, at most."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A step.

    Attributes:
        times_s: seconds of the same work on each device, in the mesh's order.
        step_s: seconds of the step in the slowest process.
    """

    times_s: np.ndarray
    step_s: float


class Times(Protocol):
    """What measures devices."""

    def after_step(self, step_s: float) -> Sequence[Measured]:
        """See `DeviceTimes.after_step`."""
        ...


class DeviceTimes:
    """Measures the devices of a run, in all of its processes together.

    Args:
        mesh: the devices. repeats: for each device, in the mesh's order, how many times slower it is made by emulation.
        work: for each device, how much it has to do in a step, as a share of what is usual.
    """

    def __init__(self, mesh: jax.sharding.Mesh, repeats: Callable[[], Sequence[float]], work: Callable[[], np.ndarray]):
        self._devices = list(mesh.devices.flat)
        self._repeats, self._work = repeats, work
        self._local = [n for n, d in enumerate(self._devices) if d.process_index == jax.process_index()]
        is_cpu = self._devices[0].platform == "cpu"
        is_single = _ONE_THREAD in os.environ.get("XLA_FLAGS", "")
        self._busy = BusyTime() if is_cpu and is_single and jax.process_count() > 1 else None
        if self._busy is not None and not self._busy.is_known:
            self._busy = None
        self._probes = {} if self._busy else {n: _Probe(self._devices[n]) for n in self._local}
        self._rows: list[np.ndarray] = []
        """Of each step that is not told yet: times of all devices, 0 for those of other processes, and of the step."""
        self._since, self._turn = 0, 0
        self._least_every = 1 if self._busy is None else _BUSY_EVERY
        self._every, self._cost_s = self._least_every, 0.0

    def after_step(self, step_s: float) -> Sequence[Measured]:
        """Measures a step; all processes must call this after each.

        Args:
            step_s: how long it took here.

        Returns:
            What is now known of the steps since the last that was told, the earliest first; empty after steps after
            which nothing is measured or exchanged. The same in all processes.
        """
        self._since += 1
        is_told = self._since >= self._every
        if self._busy is not None:
            self._note(self._busy.lap_s() / self._work()[self._local], step_s)
        if not is_told:
            return ()
        begin_s = time.perf_counter()
        if self._busy is None:
            self._note(self._probed(), step_s)
        own = np.append(self._rows, self._cost_s)
        everywhere = own[None] if jax.process_count() == 1 else all_gather_rows(own)
        rows = everywhere[:, :-1].reshape(len(everywhere), len(self._rows), -1)
        measured = [Measured(rows[:, k, :-1].sum(0), float(rows[:, k, -1].max())) for k in range(len(self._rows))]
        cost_s = float(everywhere[:, -1].min())  # of the process that came last, which waited for nobody
        wanted = math.ceil(cost_s / (MOST_OVERHEAD * max(measured[-1].step_s, 1e-6)))
        self._every = max(self._least_every, min(_MOST_EVERY, wanted))
        self._since, self._rows = 0, []
        self._cost_s = time.perf_counter() - begin_s
        return measured

    def _note(self, times_s: np.ndarray, step_s: float) -> None:
        """Keeps what a step took here."""
        row = np.zeros(len(self._devices) + 1)
        row[self._local], row[-1] = times_s, step_s
        self._rows.append(row)

    def _probed(self) -> np.ndarray:
        """Seconds of the probes of this process's devices."""
        self._turn += 1  # the first one finds the process just awake
        order = [(k + self._turn) % len(self._local) for k in range(len(self._local))]
        self._probes[self._local[order[-1]]].wake()
        times_s = np.zeros(len(self._local))
        for k in order:
            times_s[k] = self._probes[self._local[k]].seconds(self._repeats()[self._local[k]])
        return times_s


class _Probe:
    """Products on one device, timed."""

    def __init__(self, device: Any):
        self._x = jax.device_put(jnp.eye(_PROBE_SIZE, dtype=jnp.float32), device)
        self._products = 1
        self.seconds(1)  # compiles
        few_s, many_s = self.seconds(1), self.seconds(11)
        self._products = max(1, min(1000, round(_PROBE_S / max((many_s - few_s) / 10, 1e-7))))

    def seconds(self, times: float) -> float:
        """Seconds that it takes, run so many times over: the least of some runs, which other load disturbs least."""
        return min(self._run(self._products * round(times)) for _ in range(_RUNS))

    def wake(self) -> None:
        """Runs once, not timed."""
        self._run(self._products)

    def _run(self, count: int) -> float:
        begin_s = time.perf_counter()
        jax.block_until_ready(_products(self._x, np.int32(count)))
        return time.perf_counter() - begin_s


@jax.jit
def _products(x: jax.Array, times: jax.Array) -> jax.Array:
    """x times itself, again and again; of the identity, so that it stays what it is."""
    return jax.lax.fori_loop(0, times, lambda _, y: y @ x, x)

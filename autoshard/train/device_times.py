"""The time of the same work on each device, apart from waiting for others.

Of several processes on CPUs, each looks at how long it was busy in its steps (`balance/busy_time.py`), which costs
nothing; but only if XLA computes on one thread, since idle threads of its pool spin. Elsewhere a small product runs on
each device of the process in turn, between steps, no more often than takes a hundredth of the time, but at least every
fifth step.
"""

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
_LEAST_OFTEN = 5
"""Steps between two measurements, at most."""


class Times(Protocol):
    """What measures devices."""

    def after_step(self, step_s: float) -> tuple[np.ndarray, float] | None:
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
        self._since = 0
        self._every, self._turn = 1, 0

    def after_step(self, step_s: float) -> tuple[np.ndarray, float] | None:
        """The times of all devices in the mesh's order, and the slowest process's step; None if not measured.

        All processes must call this after each step.

        Args:
            step_s: how long it took here.
        """
        self._since += 1
        if self._since < self._every:
            return None
        begin_s = time.perf_counter()
        own = np.zeros(len(self._devices) + 1)
        own[-1] = step_s
        if self._busy is not None:
            own[self._local] = self._busy.lap_s() / self._since / self._work()[self._local]
        else:
            self._turn += 1  # the first one finds the process just awake
            order = [self._local[(k + self._turn) % len(self._local)] for k in range(len(self._local))]
            self._probes[order[-1]].seconds(1)
            for n in order:
                own[n] = self._probes[n].seconds(self._repeats()[n])
        rows = own[None] if jax.process_count() == 1 else all_gather_rows(own)
        slowest_s = float(rows[:, -1].max())
        took_s = time.perf_counter() - begin_s
        if jax.process_count() > 1:  # all must measure after the same steps
            each = math.ceil(len(self._devices) / jax.process_count())
            took_s = 0.0 if self._busy is not None else _RUNS * _PROBE_S * (each + 1)
            step_s = slowest_s
        if self._busy is None:
            self._every = max(1, min(_LEAST_OFTEN, math.ceil(took_s / (MOST_OVERHEAD * max(step_s, 1e-6)))))
        self._since = 0
        if self._busy is not None:
            self._busy.lap_s()
        return rows[:, :-1].sum(0), slowest_s


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

    def _run(self, count: int) -> float:
        begin_s = time.perf_counter()
        jax.block_until_ready(_products(self._x, np.int32(count)))
        return time.perf_counter() - begin_s


@jax.jit
def _products(x: jax.Array, times: jax.Array) -> jax.Array:
    """x times itself, again and again; of the identity, so that it stays what it is."""
    return jax.lax.fori_loop(0, times, lambda _, y: y @ x, x)

"""Gives the tests eight CPU devices, no cache of solutions, quick compilation, and Ctrl-C; must run before anything
uses a JAX backend. Gives them as well a device with round figures, meshes of it, and programs formulated on them.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import jax
import pytest

from autoshard.cluster import AxisLevel, DeviceType, Link, LogicalMesh, MeshAxis
from autoshard.planner.build import Formulation, formulate
from autoshard.planner.program import prepare
from autoshard.trace.trace import trace

QUICK = "--xla_cpu_use_fusion_emitters=false"
"""A flag of XLA. Without the newer emitters, small programs compile in a third of the time or less."""


PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
"""Another. On a loaded machine, devices of one step may be far apart; XLA:CPU ends the process after 40 s."""


def _xla_knows(flag: str) -> bool:
    """Whether XLA knows `flag`; it ends a process that sets one that it does not know, so that another one tries."""
    environment = {**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    trial = subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=environment, capture_output=True)
    return trial.returncode == 0


for known in filter(_xla_knows, (QUICK, PATIENT)):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {known}".strip()

os.environ["AUTOSHARD_CACHE"] = "off"  # what earlier runs solved must not decide what a test sees

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a run that a shell put in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_num_cpu_devices", 8)

DEVICE = DeviceType(
    "test",
    {"float32": 1e12},
    memory_bytes=10**9,
    memory_bandwidth_bytes_per_s=1e11,
    launch_overhead_s=1e-6,
    source="test",
)
FAST = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e10, level=0, source="test")
SLOW = Link(latency_s=5e-6, bandwidth_bytes_per_s=1e9, level=1, source="test")


def _mesh(*sizes: int) -> LogicalMesh:
    axes = tuple(
        MeshAxis("abc"[a], n, (AxisLevel(n, FAST if a == len(sizes) - 1 else SLOW),) if n > 1 else ())
        for a, n in enumerate(sizes)
    )
    return LogicalMesh(axes, DEVICE)


def _formulated(fn, args, mesh, budget_bytes=None, donate=(), pins=None, **options) -> Formulation:
    program = prepare(trace(fn, args, donate).graph)
    pins = pins or [None] * len(program.graph.arguments)
    return formulate(program, mesh, budget_bytes, pins, **options)


@pytest.fixture(scope="session")
def mesh_of() -> Callable[..., LogicalMesh]:
    """Makes a mesh of the given sizes, axes a, b, c; the last one is fast (1 us, 10 GB/s), the others are slow."""
    return _mesh


@pytest.fixture(scope="session")
def formulated() -> Callable[..., Formulation]:
    """Traces, prepares and formulates: (fn, args, mesh, budget_bytes=None, donate=(), pins=None)."""
    return _formulated

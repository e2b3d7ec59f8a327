"""A device with round figures, meshes of it, and programs formulated on them."""

from collections.abc import Callable

import pytest

from autoshard.cluster import AxisLevel, DeviceType, Link, LogicalMesh, MeshAxis
from autoshard.planner.build import Formulation, formulate
from autoshard.planner.program import prepare
from autoshard.trace.trace import trace

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

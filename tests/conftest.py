"""Gives the tests eight CPU devices, no cache of solutions, quick compilation, and Ctrl-C, and gives them out by files;
must run before anything uses a JAX backend. Gives them as well a device with round figures, meshes of it, and programs
formulated on them. Skips what is exhaustive, and says so, unless `--exhaustive` is given.
"""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import jax
import pytest
from whole_files import WholeFiles

from autoshard.cluster import AxisLevel, DeviceType, Link, LogicalMesh, MeshAxis
from autoshard.compiler.versions import jax_version
from autoshard.execution.placement import HOST_MEMORY_SINCE
from autoshard.planner.build import Formulation, formulate
from autoshard.planner.program import prepare
from autoshard.trace.trace import trace

QUICK = (
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_multi_thread_eigen=false",
)
"""Flags of XLA. Programs here are tiny and run a few times; what takes time is to compile them. Without the newer
emitters that takes a third of the time, and without LLVM's optimizations an eighth of what is left (6.7 s of processor
time become 0.9 s for a training step of a GPT on eight devices). Nor are programs or products worth several threads: in
one thread, planning, compiling and running such steps takes a seventh less. Subprocesses have them too, by the
environment.
"""


PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
"""Another. On a loaded machine, devices of one step may be far apart; XLA:CPU ends the process after 40 s."""


def _xla_knows(*flags: str) -> bool:
    """Whether XLA knows `flags`; it ends a process that sets one that it does not know, so that another one tries."""
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    trial = subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=environment, capture_output=True)
    return trial.returncode == 0


_flags = os.environ.get("XLA_FLAGS", "").split()  # a worker of xdist has them already from the process that starts it
_missing = [flag for flag in (*QUICK, PATIENT) if flag not in _flags]
_known = _missing if not _missing or _xla_knows(*_missing) else list(filter(_xla_knows, _missing))
os.environ["XLA_FLAGS"] = " ".join(_flags + _known)

os.environ["AUTOSHARD_CACHE"] = "off"  # what earlier runs solved must not decide what a test sees

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a run that a shell put in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.dont_write_bytecode = False
os.environ["PYTHONSAFEPATH"] = "1"  # processes import what pytest does: the installed package, not the folder
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process of every test parses autoshard again: 1.3 s each

jax.config.update("jax_num_cpu_devices", 8)

gc.set_threshold(10_000, 10, 50)  # what JAX keeps is walked through in search of cycles: 6 % of the time by default


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what this JAX cannot compile (`autoshard.execution.placement.refuse_host_memory`)."""
    if item.get_closest_marker("host_memory") and jax_version() < HOST_MEMORY_SINCE:
        pytest.skip("this JAX compiles no program for several devices with values in the memory of the host")


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


EXHAUSTIVE = "exhaustive"


def pytest_addoption(parser: pytest.Parser) -> None:
    told = (
        "also run the tests marked `exhaustive`: laws that other tests show already, on more models, meshes and plans"
    )
    parser.addoption("--exhaustive", action="store_true", help=told)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Tells how many tests were left out, apart from those that cannot run here."""
    skipped = terminalreporter.stats.get("skipped", ())
    if config.getoption("exhaustive"):
        return
    if number := sum(EXHAUSTIVE in report.keywords for report in skipped):
        terminalreporter.write_line(f"{number} exhaustive tests were skipped; --exhaustive runs them, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests run first: the last one to be begun is short, and keeps no worker waiting for the other."""
    for item in items:
        if item.get_closest_marker(EXHAUSTIVE) and not config.getoption("exhaustive"):
            item.add_marker(pytest.mark.skip(reason="exhaustive: --exhaustive runs it"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forgets what JAX has traced and compiled for a file that is done: workers grow to 4 GB otherwise, and files
    after it take 4 % longer."""
    if nextitem is None or nextitem.path != item.path:
        jax.clear_caches()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    return WholeFiles(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def mesh_of() -> Callable[..., LogicalMesh]:
    """Makes a mesh of the given sizes, axes a, b, c; the last one is fast (1 us, 10 GB/s), the others are slow."""
    return _mesh


@pytest.fixture(scope="session")
def formulated() -> Callable[..., Formulation]:
    """Traces, prepares and formulates: (fn, args, mesh, budget_bytes=None, donate=(), pins=None)."""
    return _formulated

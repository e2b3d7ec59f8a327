"""Steps on the GPU at hand: what they take, kernel by kernel, beside what the cost model says of them.

    autoshard calibrate --out h100x1.yaml
    python benchmarks/gpu_steps.py measure --cluster h100x1.yaml --out runs/gpu      # needs a GPU
    python benchmarks/gpu_steps.py table runs/gpu --cluster h100x1.yaml              # needs none

Each program has one device's share of the batch that `exposed.py` has on 16, so that its products are those of a plan
that splits the batch. It runs as written (`jax.jit`) and as planned for one device (`Plan.jit`); both are timed, then
recorded by JAX's profiler. A run without options goes on where it stopped.
"""

import argparse
import collections
import dataclasses
import glob
import gzip
import json
import math
import os
import pathlib
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.93")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
"""Kernels in CUDA graphs are recorded without the instruction that they belong to."""

import jax
import jax.numpy as jnp
from by_hand import gpt
from by_hand.programs import PROGRAMS

import autoshard
from autoshard.cluster import Cluster, DeviceType
from autoshard.hlo.kernel_cost import kernel_s
from autoshard.hlo.module import parse
from autoshard.train.planning import arguments
from autoshard.train.registry import train_functions

SHARES = 16
"""Of the batch of a program on 16 devices, one has this part."""
WARM, TIMED, RECORDED = 3, 20, 3
MOST_S = 4.0
"""Steps before any is timed, steps that are timed unless they take longer than that together, and steps recorded."""
AS_WRITTEN, PLANNED = "as written", "planned"


@dataclasses.dataclass(frozen=True)
class Measured:
    """A step on the GPU.

    Attributes:
      program, way: Which, and `AS_WRITTEN` or `PLANNED`. device, jax: What it ran on.
      step_s: Median of the timed steps. slowest_s: Of these. compile_s: What compiling took.
      planned_step_s, planned_compute_s, planned_reserved_bytes: By the plan; 0.0 as written.
      reserved_bytes: What the compiled program needs. used_bytes: The most that was in use since the process began.
      kernels: (instruction, runs a step, seconds a step), of all steps recorded, the longest first.
      busy_s: What all kernels of a step take together.
    """

    program: str
    way: str
    device: str = ""
    jax: str = ""
    reason: str = ""
    step_s: float = 0.0
    slowest_s: float = 0.0
    compile_s: float = 0.0
    planned_step_s: float = 0.0
    planned_compute_s: float = 0.0
    planned_reserved_bytes: float = 0.0
    reserved_bytes: float = 0.0
    used_bytes: float = 0.0
    busy_s: float = 0.0
    kernels: tuple[tuple[str, float, float], ...] = ()

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.program}-{self.way}".replace(" ", "-")


# ---- measuring


def loaded(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], Callable[[], tuple[Any, Any]]]:
    """A program's step, its arguments by shape, and what makes them: random numbers, since zeros draw less power."""
    program = PROGRAMS[name]
    batch = max(1, program.batch // SHARES)
    if program.config is None:
        step, args = gpt.train_step(), gpt.train_arguments(gpt.Sizes(batch=batch))
        make_state = lambda: _random(args[0], 0)
    else:
        config = program.loaded(SHARES, f"data.batch_size={batch}")
        functions = train_functions(config)
        step, args = functions.step, arguments(config, functions)
        make_state = lambda: jax.jit(functions.init)(0)
    return step, args, lambda: (make_state(), *(_random(arg, 1) for arg in args[1:]))


def _random(shapes: Any, seed: int) -> Any:
    """Arrays of these shapes: small numbers, or ids below 1,000."""
    leaves, tree = jax.tree_util.tree_flatten(shapes)

    def make(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, len(leaves))
        return [_leaf(k, leaf) for k, leaf in zip(keys, leaves, strict=True)]

    return jax.tree_util.tree_unflatten(tree, jax.jit(make)(jax.random.key(seed)))


def _leaf(key: jax.Array, leaf: Any) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return key
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return (jnp.abs(jax.random.normal(key, leaf.shape)) * 0.02).astype(leaf.dtype)
    return jax.random.randint(key, leaf.shape, 0, 1000 if leaf.ndim else 1).astype(leaf.dtype)


def timed(run: Callable[..., Any], state: Any, rest: Sequence[Any]) -> tuple[list[float], Any]:
    """Seconds of each timed step, and the state behind them."""
    seconds: list[float] = []
    for n in range(WARM + TIMED):
        started = time.perf_counter()
        state, aux = run(state, *rest)
        jax.block_until_ready((state, aux))
        seconds.append(time.perf_counter() - started)
        if n >= WARM and math.fsum(seconds[WARM:]) > MOST_S:
            break
    return seconds[WARM:], state


def recorded(run: Callable[..., Any], state: Any, rest: Sequence[Any]) -> tuple[tuple[str, float, float], ...]:
    """What kernels take: (instruction, runs a step, seconds a step)."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(RECORDED):
                state, _ = run(state, *rest)
            jax.block_until_ready(state)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        found = list(_events(jax.profiler.ProfileData.from_file(path)))
    runs, total_s = collections.Counter(), collections.Counter()
    for name, seconds in found:
        runs[name] += 1
        total_s[name] += seconds
    return tuple((name, runs[name] / RECORDED, s / RECORDED) for name, s in total_s.most_common())


def _events(profile: Any) -> Iterator[tuple[str, float]]:
    """Every event on a stream of the GPU: the instruction that it belongs to, else its own name, and its seconds."""
    for plane in profile.planes:
        if "/device:GPU" not in plane.name:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = {key: value for key, value in event.stats if isinstance(key, str)}
                yield str(stats.get("hlo_op") or f"? {event.name}"), event.duration_ns * 1e-9


def measure(name: str, way: str, cluster: Cluster | None, out: pathlib.Path) -> Measured:
    """Runs a program in one way; its text goes beside the row."""
    device = jax.devices()[0]
    row = Measured(name, way, device.device_kind, jax.__version__)
    step, args, make = loaded(name)
    plan = None
    if way == PLANNED:
        plan = autoshard.plan(step, *args, cluster=cluster, donate_argnums=0)
        e = plan.estimate
        row = dataclasses.replace(
            row,
            planned_step_s=e.step_s,
            planned_compute_s=e.compute_s,
            planned_reserved_bytes=e.reserved_bytes or e.peak_bytes,
        )
    state, *rest = make()
    jax.block_until_ready(state)
    started = time.perf_counter()
    if plan is None:
        compiled = jax.jit(step, donate_argnums=0).lower(state, *rest).compile()
        run = compiled
    else:
        run = plan.jit(step)
        compiled = run.lower(*args).compile()
        run = compiled
    compile_s = time.perf_counter() - started
    with gzip.open(out / f"{row.name}.hlo.txt.gz", "wt") as file:
        file.write(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    seconds, state = timed(run, state, rest)
    kernels = recorded(run, state, rest)
    return dataclasses.replace(
        row,
        step_s=statistics.median(seconds),
        slowest_s=max(seconds),
        compile_s=compile_s,
        reserved_bytes=(
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        ),
        used_bytes=(device.memory_stats() or {}).get("peak_bytes_in_use", 0.0),
        busy_s=math.fsum(s for _, _, s in kernels),
        kernels=kernels,
    )


def measure_all(
    programs: Sequence[str], ways: Sequence[str], cluster: Cluster | None, out: pathlib.Path, limit_s: float
) -> None:
    """Measures what is not there yet, as long as there is time to begin another."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for name in programs:
        for way in ways:
            path = out / f"{Measured(name, way).name}.json"
            if path.exists() or time.perf_counter() - began > limit_s:
                continue
            started = time.perf_counter()
            try:
                row = measure(name, way, cluster, out)
            except Exception as error:  # what fails is told; the others are measured
                row = Measured(name, way, reason=f"{type(error).__name__}: {error}"[:1000])
            jax.clear_caches()
            path.write_text(json.dumps(dataclasses.asdict(row)) + "\n")
            passed_s = time.perf_counter() - started
            print(
                f"{row.name}: {row.reason or f'{row.step_s * 1e3:.2f} ms'}, kernels {row.busy_s * 1e3:.2f} ms, "
                f"planned {row.planned_step_s * 1e3:.2f} ms, in {passed_s:.1f} s (compiled in {row.compile_s:.1f})",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--ways", default=f"{AS_WRITTEN},{PLANNED}")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no other program begins")
    own = parser.parse_args()
    cluster = Cluster.from_file(own.cluster) if own.cluster else None
    measure_all(own.programs.split(","), own.ways.split(","), cluster, own.out, own.limit)


if __name__ == "__main__":
    main()

"""What checksums and the memory tier cost a step of 100 ms, side by side in one process.

    python benchmarks/checkpoint_overhead.py --megabytes 2,8,32 --rounds 8

Steps on two CPU devices, which are made to take 200 ms of processor time: 100 ms on two free cores. Block by block of
five steps, in turn: nothing is kept; every step goes to the memory tier; one state of the five goes to disk, by Orbax
alone; or by Orbax with manifest. Each block ends when all is written. Compared are the times of the blocks of one
round, on the processor and by the wall clock, which other programs disturb; the median of the ratios counts, with
quartiles. Writes benchmarks/results/checkpoint-overhead.md.
"""

import argparse
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard.checkpoints.checkpoints import Checkpoints
from autoshard.checkpoints.memory import MemoryTier
from autoshard.files import write_text_atomically

RESULTS = pathlib.Path(__file__).parent / "results" / "checkpoint-overhead.md"
STEP_S, STEPS, DEVICES = 0.1, 5, 2
LEAVES, WIDTH = 24, 384
"""Of the state, and of the products that fill a step."""

Step = Callable[[Any], Any]
Block = Callable[[Any, Step], Any]


def state_of(megabytes: float) -> dict[str, jax.Array]:
    """As many random numbers, in leaves of one size, split over two devices."""
    split = NamedSharding(jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data"))
    rows = int(megabytes * 1e6 / 4 / LEAVES / WIDTH) // 2 * 2
    keys = jax.random.split(jax.random.key(0), LEAVES)
    return {f"leaf{n}": jax.device_put(jax.random.normal(key, (rows, WIDTH)), split) for n, key in enumerate(keys)}


def step_of(products: int) -> Step:
    """A step that changes the whole state in place, and takes as many products beside that."""

    @jax.jit
    def filling(state: dict[str, jax.Array]) -> jax.Array:
        square = jnp.tile(state["leaf0"][:1], (WIDTH, 1))
        return jax.lax.fori_loop(0, products, lambda _, x: jnp.tanh(x @ x), square).sum()

    def change(state: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
        return {name: leaf * 0.999 for name, leaf in state.items()}, filling(state)

    taken = jax.jit(change, donate_argnums=0)

    def step(state: Any) -> Any:
        state, metric = taken(state)
        jax.block_until_ready((state, metric))
        return state

    return step


def calibrated(megabytes: float) -> Step:
    """A step of 100 ms."""
    products = 8
    while True:
        step, state, times_s = step_of(products), state_of(megabytes), []
        for _ in range(6):
            started_s = time.process_time()
            state = step(state)
            times_s.append((time.process_time() - started_s) / DEVICES)
        taken_s = statistics.median(times_s[1:])
        if abs(taken_s / STEP_S - 1) < 0.15 or products > 1 << 20:
            return step
        products = max(1, min(4 * products, round(products * STEP_S / taken_s)))


def bare(state: Any, step: Step) -> Any:
    for _ in range(STEPS):
        state = step(state)
    return state


class Arms:
    """The ways to keep states, each with a block of steps."""

    def __init__(self, base: pathlib.Path, memory: pathlib.Path):
        self._memory = MemoryTier(memory, "here", "benchmark", lambda message: None)
        self._checked = Checkpoints(base / "checked", 2)
        self._orbax = ocp.CheckpointManager(base / "orbax", options=ocp.CheckpointManagerOptions(max_to_keep=2))
        self._number = 0

    def memory(self, state: Any, step: Step) -> Any:
        for _ in range(STEPS):
            state = step(state)
            self._number += 1
            self._memory.commit(self._number, state)
        self._memory.wait()
        return state

    def orbax_alone(self, state: Any, step: Step) -> Any:
        self._number += 1
        self._orbax.save(self._number, args=ocp.args.StandardSave(state))
        state = bare(state, step)
        self._orbax.wait_until_finished()
        return state

    def with_manifest(self, state: Any, step: Step) -> Any:
        self._number += 1
        self._checked.save(self._number, state, {})
        state = bare(state, step)
        self._checked.wait()
        return state

    def close(self) -> None:
        self._memory.close()
        self._checked.close()
        self._orbax.close()


def ratios_of(megabytes: float, rounds: int) -> list[str]:
    """Rows of the table for one size of the state."""
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        arms = Arms(pathlib.Path(base), pathlib.Path(memory))
        blocks: dict[str, Block] = {
            "bare": bare, "memory": arms.memory, "Orbax alone": arms.orbax_alone, "with manifest": arms.with_manifest
        }  # fmt: skip
        step, state = calibrated(megabytes), state_of(megabytes)
        wall_s: dict[str, list[float]] = {name: [] for name in blocks}
        cpu_s: dict[str, list[float]] = {name: [] for name in blocks}
        for number in range(rounds + 1):
            names = list(blocks)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                started_s, busy_s = time.perf_counter(), time.process_time()
                state = blocks[name](state, step)
                if number:  # the first round makes files and compiles
                    wall_s[name].append((time.perf_counter() - started_s) / STEPS)
                    cpu_s[name].append((time.process_time() - busy_s) / STEPS)
        arms.close()
    rows = []
    for name, beside in (("memory", "bare"), ("with manifest", "Orbax alone"), ("Orbax alone", "bare")):
        cells = [f"{megabytes:g}", f"{name} / {beside}", f"{1e3 * statistics.median(cpu_s['bare']):.0f}"]
        for times in (cpu_s, wall_s):
            low, middle, high = statistics.quantiles(
                [a / b for a, b in zip(times[name], times[beside], strict=True)], n=4
            )
            cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
        rows.append("| " + " | ".join(cells) + " |")
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", default="2,8,32")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rows = [
        "| state, MB | what | bare step, processor ms | processor, ratio (quartiles) | wall clock, ratio (quartiles) |",
        "|---|---|---|---|---|",
    ]
    for megabytes in map(float, options.megabytes.split(",")):
        rows += ratios_of(megabytes, options.rounds)
    cores = os.cpu_count()
    head = (
        "# Overhead of checkpoints\n\n`python benchmarks/checkpoint_overhead.py --megabytes "
        f"{options.megabytes} --rounds {options.rounds}`, on {cores} cores that other programs use too: times of a "
        f"step, blocks of {STEPS} steps in turn. To memory goes every step, to disk one of {STEPS}.\n\n"
    )
    write_text_atomically(RESULTS, head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()

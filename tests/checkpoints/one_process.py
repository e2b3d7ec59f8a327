"""One process of a run for test_processes.py: restores what is there, checks every number, goes on, and is cut off.

Arguments: this process's number, how many there are, the coordinator's port, the base folder, the host's name, the
tier (`memory` or `disk`), how many steps to commit, and a file to write to: the step that was restored, and what was
told. With `full` for the tier, the disk is full when the last process writes its part of step 2.
"""

import json
import os
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.checkpoints.checkpoints import Checkpoints
from autoshard.checkpoints.layout import words
from autoshard.checkpoints.memory import MemoryTier

DEVICES = 2


def state_after(step: int) -> dict:
    """A state that is a function of its step: split over all devices, not at all, or held by the last process only."""
    auto = (AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    stage = jax.make_mesh((DEVICES,), ("data",), axis_types=auto, devices=jax.devices()[-DEVICES:])

    def place(numbers: np.ndarray, spec: PartitionSpec, mesh: Mesh = mesh) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index], dtype=numbers.dtype)

    key = np.asarray(jax.random.key_data(jax.random.key(step)))

    return {
        "split": place(np.arange(480, dtype=np.float32).reshape(48, 10) * (step + 1), PartitionSpec("data")),
        "whole": place(np.full((5, 7), step, jnp.bfloat16), PartitionSpec()),
        "step": place(np.int32(step), PartitionSpec()),
        "staged": place(np.arange(18000, dtype=np.float32).reshape(5, 3600) - step, PartitionSpec(None, "data"), stage),
        "key": jax.random.wrap_key_data(place(key, PartitionSpec(), stage)),
    }


def uneven_state(step: int) -> dict:
    """A state of which nearly all lies with the last process, as 4 MiB that cannot be compressed."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    numbers = np.zeros((jax.device_count(), 1 << 20), np.uint32)
    numbers[-1] = np.random.default_rng(step).integers(0, 1 << 32, 1 << 20, np.uint32)
    split = NamedSharding(mesh, PartitionSpec("data"))
    return {"w": jax.make_array_from_callback(numbers.shape, split, lambda index: numbers[index])}


def save_on_a_full_disk(folder: pathlib.Path, checkpoints: Checkpoints) -> int:
    """Saves three steps, the second while there is no space; returns the step that is then restored."""
    checkpoints.save(1, uneven_state(1), {})
    checkpoints.wait()
    usage, filler = shutil.disk_usage(folder), folder / "filler"
    shutil.disk_usage = lambda path: usage  # what was free when it was looked at
    multihost_utils.sync_global_devices("before")
    if jax.process_index() == 0:
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, usage.free - (2 << 20))
    multihost_utils.sync_global_devices("full")
    checkpoints.save(2, uneven_state(2), {})
    checkpoints.wait()
    if jax.process_index() == 0:
        assert sorted(path.name for path in (folder / "disk").iterdir()) == ["1"]
        filler.unlink()
    multihost_utils.sync_global_devices("free again")
    checkpoints.save(3, uneven_state(3), {})
    checkpoints.wait()
    restored = checkpoints.restore(uneven_state(0))
    assert restored is not None
    return restored.step


def main() -> None:
    number, count, port, base, host, tier, steps, report = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(number))
    folder, told = pathlib.Path(base), []
    memory = None
    if tier == "memory":
        memory = MemoryTier(folder / host, host, "run", told.append, f"127.0.0.1:{port}")
        assert {one.address[0] for one in memory._processes} <= {"127.0.0.1", ""}
    checkpoints = Checkpoints(folder / "disk", 2, told.append, memory)
    if tier == "full":
        step = save_on_a_full_disk(folder, checkpoints)
        finish(report, {"restored": step, "told": [json.loads(message.line()) for message in told]})
    restored = checkpoints.restore(state_after(0))
    first = 0 if restored is None else restored.step
    if restored is not None:
        assert restored.source == tier, restored.source
        for name, expected in state_after(first).items():
            assert restored.state[name].sharding == expected.sharding, name
            for ours, theirs in zip(restored.state[name].addressable_shards, expected.addressable_shards, strict=True):
                np.testing.assert_array_equal(*(np.asarray(words(x.data)) for x in (ours, theirs)), name)
    for step in range(first + 1, first + int(steps) + 1):
        if tier == "memory":
            checkpoints.commit(step, state_after(step))
        else:
            checkpoints.save(step, state_after(step), {"name": "test"})
    checkpoints.wait()
    finish(report, {"restored": first, "told": [json.loads(message.line()) for message in told]})


def finish(report: str, said: dict) -> None:
    """Ends the process, as abruptly as a kill, once all have come here."""
    multihost_utils.sync_global_devices("all is committed")
    pathlib.Path(report).write_text(json.dumps(said))  # what is printed may be mixed with what Gloo prints
    os._exit(0)


if __name__ == "__main__":
    main()

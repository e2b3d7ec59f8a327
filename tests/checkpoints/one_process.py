"""One process of a run for test_processes.py: restores what is there, checks every number, goes on, and is cut off.

Arguments: this process's number, how many there are, the coordinator's port, the base folder, the host's name, the
tier (`memory` or `disk`), and how many steps to commit. The last line printed is the step that was restored.
"""

import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard.checkpoints.checkpoints import Checkpoints
from autoshard.checkpoints.memory import MemoryTier

DEVICES = 2


def state_after(step: int) -> dict:
    """A state that is a function of its step, split over all devices and, in part, not at all."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

    def place(numbers: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(numbers.shape, NamedSharding(mesh, spec), lambda index: numbers[index])

    return {
        "split": place(np.arange(480, dtype=np.float32).reshape(48, 10) * (step + 1), PartitionSpec("data")),
        "whole": place(np.full((5, 7), step, jnp.bfloat16), PartitionSpec()),
        "step": place(np.int32(step), PartitionSpec()),
    }


def main() -> None:
    number, count, port, base, host, tier, steps = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(number))
    folder, told = pathlib.Path(base), []
    memory = MemoryTier(folder / host, host, "run", told.append) if tier == "memory" else None
    checkpoints = Checkpoints(folder / "disk", 2, told.append, memory)
    restored = checkpoints.restore(state_after(0))
    first = 0 if restored is None else restored.step
    if restored is not None:
        assert restored.source == tier, restored.source
        for name, expected in state_after(first).items():
            assert restored.state[name].sharding == expected.sharding, name
            for ours, theirs in zip(restored.state[name].addressable_shards, expected.addressable_shards, strict=True):
                np.testing.assert_array_equal(np.asarray(ours.data), np.asarray(theirs.data), name)
    for step in range(first + 1, first + int(steps) + 1):
        if tier == "memory":
            checkpoints.commit(step, state_after(step))
        else:
            checkpoints.save(step, state_after(step), {"name": "test"})
    checkpoints.wait()
    multihost_utils.sync_global_devices("all is committed")
    print(json.dumps({"restored": first, "told": [json.loads(message.line()) for message in told]}), flush=True)
    os._exit(0)  # as abruptly as a kill


if __name__ == "__main__":
    main()

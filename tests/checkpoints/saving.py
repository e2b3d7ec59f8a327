"""A process that saves, for test_disk.py: on a disk that others fill up meanwhile (`full`), or without end."""

import json
import os
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp

from autoshard.checkpoints.checkpoints import Checkpoints

LEFT_BYTES = 2 << 20
"""Half of what the state needs."""


def random_state(step: int) -> dict:
    """4 MiB that cannot be compressed."""
    return {"w": jax.random.bits(jax.random.key(step), (1 << 20,))}


def save_without_end(folder: pathlib.Path) -> None:
    with Checkpoints(folder, 2) as checkpoints:
        for step in range(1, 1000):
            checkpoints.save(step, {"w": jnp.full((1 << 20,), step, jnp.float32)}, {})
            print(f"saved {step}", flush=True)


def save_on_a_disk_that_fills_up(folder: pathlib.Path) -> None:
    told: list = []
    checkpoints = Checkpoints(folder, 2, told.append)
    checkpoints.save(1, random_state(1), {})
    checkpoints.wait()
    usage = shutil.disk_usage(folder)
    shutil.disk_usage = lambda path: usage  # what was free when it was looked at
    filler = folder / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, usage.free - LEFT_BYTES)
    checkpoints.save(2, random_state(2), {})
    checkpoints.wait()
    left = sorted(path.name for path in folder.iterdir())
    filler.unlink()
    checkpoints.save(3, random_state(3), {})
    checkpoints.wait()
    restored = checkpoints.restore(random_state(0))
    assert restored is not None and bool((restored.state["w"] == random_state(3)["w"]).all())
    kinds = [message.kind for message in told]
    why = next(message.why for message in told if message.kind == "not_saved")
    print(json.dumps({"kinds": kinds, "why": why, "left": left, "restored": restored.step}))


if __name__ == "__main__":
    run = save_on_a_disk_that_fills_up if sys.argv[2] == "full" else save_without_end
    run(pathlib.Path(sys.argv[1]))

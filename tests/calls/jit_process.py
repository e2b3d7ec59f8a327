"""One of two processes for test_jit_processes.py: its number, the coordinator's port, and a file to write to."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import autoshard
from autoshard.errors import AutoshardError


@autoshard.jit(mesh={"data": 4}, pins={"x": jax.sharding.PartitionSpec("data")})
def loss(w, x):
    return jnp.mean((x @ w) ** 2)


@autoshard.jit(mesh={"data": 4})
def noisy(w, key):
    return jnp.sum(w * jax.random.normal(key, w.shape))


@autoshard.jit(mesh={"data": 3})
def planned_for_others(w):
    return w * 2


def main() -> None:
    number, port, report = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number))
    w, x = np.eye(8, dtype=np.float32), np.arange(64, dtype=np.float32).reshape(8, 8)
    told = {"loss": float(loss(w, x)), "certificate": str(loss.plan(w, x).certificate)}
    own = jax.device_put(w, jax.local_devices()[0])
    told |= {"noisy": float(noisy(own, jax.random.key(1))), "raw": float(noisy(own, jax.random.PRNGKey(1)))}
    try:
        planned_for_others(w)
    except AutoshardError as error:
        told["error"] = str(error)
    pathlib.Path(report).write_text(json.dumps(told))


if __name__ == "__main__":
    main()

"""A run of several processes: joining them, what one decides for all, and what all must agree on."""

import os
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from autoshard.errors import AutoshardError, ConfigError, TrainingError


def join_processes() -> None:
    """Joins the other processes of this run; must come before JAX's first use of a device.

    JAX finds them under Slurm, Open MPI, Kubernetes and on Cloud TPUs. Elsewhere three variables tell: the address
    JAX_COORDINATOR_ADDRESS, which JAX reads, and the numbers JAX_NUM_PROCESSES and JAX_PROCESS_ID, read here.

    Raises:
        ConfigError: they cannot be found or reached.
    """
    if jax.distributed.is_initialized():
        return
    try:
        numbers = (os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        count, number = (int(text) if text else None for text in numbers)
        jax.distributed.initialize(num_processes=count, process_id=number)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"distributed: the processes of this run cannot be joined: {reason} Start them under Slurm, Open MPI or "
            "Kubernetes, or set JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID for each."
        ) from error


def is_first() -> bool:
    """Whether this process writes and prints for all."""
    return jax.process_index() == 0


def decided_by_the_first(decide: Callable[[], str]) -> str:
    """The text that `decide` gives in the first process, in all of them; the others do not call it.

    Raises:
        TrainingError: in the others, if it failed in the first.
    """
    if jax.process_count() == 1:
        return decide()
    text, failure = "", None
    if is_first():
        try:
            text = decide()
        except (AutoshardError, KeyboardInterrupt) as error:
            failure = error
    content = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
    if failure is not None:
        raise failure
    if not size:
        raise TrainingError("The first process of this run ended with an error. Its own output tells which.")
    padded = content if is_first() else np.zeros(size, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8).tobytes().decode()

"""Joins the processes of a run that no supervisor started."""

import os

import jax

from autoshard.errors import ConfigError


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

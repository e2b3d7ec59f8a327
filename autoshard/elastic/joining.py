"""A worker joins its generation: JAX's devices, the coordinator, and how processes talk to each other."""

import contextlib
import socket
import time

import jax

from autoshard.elastic.mutual_tls import check_mutual_tls
from autoshard.launch.messages import Assignment

HEARTBEAT_TIMEOUT_S = 100
"""JAX's own default. The supervisor notices a lost worker long before; this is the last resort of those it lost."""

INITIALIZATION_TIMEOUT_S = 300
SHUTDOWN_TIMEOUT_S = 15

_LOOK_EVERY_S = 0.02


def join(assignment: Assignment) -> None:
    """Makes this process one of the generation's; must come before JAX's first use of a device.

    Raises:
        ConfigError: mutual TLS is asked for, and this version of JAX has none.
        RuntimeError: JAX was used before, or the others cannot be reached.
    """
    if assignment.devices_per_worker is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", assignment.devices_per_worker)
    if assignment.num_workers == 1:
        return
    if assignment.devices_per_worker is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    check_mutual_tls()
    # SIGTERM is the worker's own: it drains the run, and the worker tells that it was the one to get the signal.
    jax.config.update("jax_enable_preemption_service", False)
    if assignment.rank:
        _await_coordinator(assignment.coordinator)
    jax.distributed.initialize(
        assignment.coordinator,
        assignment.num_workers,
        assignment.rank,
        coordinator_bind_address=assignment.coordinator if assignment.rank == 0 else None,
        initialization_timeout=INITIALIZATION_TIMEOUT_S,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
        cluster_detection_method="deactivate",
    )


def _await_coordinator(address: str) -> None:
    """Returns when somebody listens at `address`, or when it is JAX's turn to say that nobody does.

    JAX's client tries again only a second after it found nobody, which is longer than all else that joining takes.
    """
    host, _, port = address.rpartition(":")
    deadline_s = time.monotonic() + INITIALIZATION_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_EVERY_S * 50).close()
            return
        time.sleep(_LOOK_EVERY_S)

"""Joins the processes of a run that no supervisor started."""

import ipaddress
import os
import socket

import jax

from autoshard.elastic.mutual_tls import check_mutual_tls
from autoshard.errors import ConfigError


def join_processes() -> None:
    """Joins the other processes of this run; must come before JAX's first use of a device.

    JAX finds them under Slurm, Open MPI, Kubernetes and on Cloud TPUs. Elsewhere three variables tell: the address
    JAX_COORDINATOR_ADDRESS, which JAX reads, and the numbers JAX_NUM_PROCESSES and JAX_PROCESS_ID, read here. Where all
    three are set, JAX does not look for more: under Slurm it would give each process one device of its host only.

    The first process listens where `bind_address` says, unless JAX_COORDINATOR_BIND_ADDRESS says otherwise.

    Raises:
        ConfigError: they cannot be found or reached, or mutual TLS is asked for, which this version of JAX has not.
    """
    if jax.distributed.is_initialized():
        return
    check_mutual_tls()
    try:
        numbers = (os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        count, number = (int(text) if text else None for text in numbers)
        address = os.environ.get("JAX_COORDINATOR_ADDRESS")
        is_told = bool(address) and count is not None and number is not None
        jax.distributed.initialize(
            num_processes=count,
            process_id=number,
            cluster_detection_method="deactivate" if is_told else None,
            coordinator_bind_address=os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or bind_address(address),
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"distributed: the processes of this run cannot be joined: {reason} Start them under Slurm, Open MPI or "
            "Kubernetes, or set JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID for each."
        ) from error


def bind_address(coordinator: str | None) -> str | None:
    """Where the first process listens, as `host:port`: at the address by which the others reach it, and no other.

    Args:
        coordinator: `host:port` as all were told; None if JAX finds it.

    Returns:
        None for all addresses of the host, where it cannot be told which one the others use: JAX finds the
        coordinator, the name is not known here, or it stands for loopback here, as on many systems a host's own does.
    """
    host, _, port = (coordinator or "").rpartition(":")
    host = host.strip("[]")
    if not host or host == "localhost":
        return coordinator or None
    try:
        found = {ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    if host in map(str, found):  # it is no name
        return coordinator
    outward = sorted((a for a in found if not a.is_loopback), key=lambda a: (a.version, str(a)))
    if not outward:
        return None
    return f"{outward[0]}:{port}" if outward[0].version == 4 else f"[{outward[0]}]:{port}"

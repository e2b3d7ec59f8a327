"""How the processes of a run find each other for transfers: where this one listens, and where the others do."""

import functools
import ipaddress
import os
import socket
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.errors import TransferError

_TEXT_BYTES = 64
_NOBODY = "198.51.100.1"
"""An address that is given to nobody (RFC 5737): the route to it is the default one."""


def listening_host(coordinator_address: str | None) -> str:
    """The numeric address under which the other processes reach this one; all of them must call this together.

    It is that of the interface that leads to the coordinator, so loopback where all processes find the coordinator on
    their own host. Where some do not, none may listen on loopback: a host's own name often stands for it, in which
    case the interface of the default route is taken.

    Args:
      coordinator_address: See `host_towards_coordinator`.

    Raises:
      TransferError: Processes run on several hosts, but this host has no address besides loopback.
    """
    mine = host_towards_coordinator(coordinator_address)
    hosts = all_gather_text(mine)
    if not _is_loopback(mine) or all(map(_is_loopback, hosts)):
        return mine
    outward = _host_towards(_NOBODY)
    if outward is None:
        raise TransferError(
            f"Processes of this run are on several hosts, but process {jax.process_index()} found no address of its "
            f"host besides {mine}. Give coordinator_address=host:port with an address, not a name, of the "
            "coordinator's host."
        )
    return outward


def host_towards_coordinator(coordinator_address: str | None) -> str:
    """The address of the interface of this host that leads to the coordinator.

    No packet is sent: the system is only asked for the route.

    Args:
      coordinator_address: `host:port` as given to `jax.distributed.initialize`; None for the environment variable
        `JAX_COORDINATOR_ADDRESS`, and where that is not set, for the interface of the default route.
    """
    towards = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS") or f"{_NOBODY}:0"
    host = towards.rpartition(":")[0].strip("[]")
    return _host_towards(host) or "127.0.0.1"


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _host_towards(host: str) -> str | None:
    """The address of the interface that leads to `host`; None where none does."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return cast(str, probe.getsockname()[0])
    except OSError:
        return None


def all_gather_text(text: str) -> list[str]:
    """What every process gives, in their order; all of them must call this together.

    Args:
      text: Of this process; at most 64 bytes, which an address and its port do not exceed.
    """
    rows = all_gather_rows(np.frombuffer(text.encode().ljust(_TEXT_BYTES), np.uint8))
    return [bytes(row).decode().strip() for row in rows]


def all_gather_bytes(data: bytes) -> list[bytes]:
    """As `all_gather_text`, for data of any length."""
    sizes = list(map(int, all_gather_text(str(len(data)))))
    rows = all_gather_rows(np.frombuffer(data.ljust(max(sizes), b"\0"), np.uint8))
    return [bytes(row)[:size] for row, size in zip(rows, sizes, strict=True)]


def all_gather_rows(row: np.ndarray) -> np.ndarray:
    """What every process gives, in their order; all of them must call this together. The fastest way, in one exchange.

    Args:
      row: (n,): of this process, of one length and type in all.

    Returns:
      (processes, n), of that type.
    """
    rows = _rows(row.view(np.uint8))  # JAX may have no numbers of this type
    return np.asarray(_copy_to(_everywhere(rows))(rows).addressable_data(0)).view(row.dtype)


@functools.cache
def _copy_to(everywhere: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """A copy on all devices; made once, since JAX takes milliseconds for a program that it sees anew."""
    return jax.jit(jnp.copy, out_shardings=everywhere)


def broadcast_bytes(data: bytes) -> bytes:
    """What process 0 gives, in every process; all of them must call this together. What others give does not matter."""
    size = int(all_gather_text(str(len(data)))[0])
    if jax.process_count() == 1 or not size:
        return data[:size]
    is_first = jax.process_index() == 0
    rows = _rows(np.frombuffer(data, np.uint8) if is_first else np.zeros(size, np.uint8))
    added = jax.jit(_sum_of, out_shardings=_everywhere(rows))(rows)
    return bytes(np.asarray(added.addressable_data(0)))


def _sum_of(rows: jax.Array) -> jax.Array:
    """The rows added up; one function, so that it is compiled once for each length."""
    return rows.sum(0, dtype=np.uint8)


def _rows(row: np.ndarray) -> jax.Array:
    """An array with a row for each process, which gives its own.

    One device of each process takes part, so that processes may have different numbers of devices, which
    `jax.experimental.multihost_utils.process_allgather` does not allow.
    """
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([firsts[process] for process in sorted(firsts)]), ("process",))
    mine = jax.device_put(row[None], firsts[jax.process_index()])
    split = NamedSharding(mesh, PartitionSpec("process"))
    return jax.make_array_from_single_device_arrays((len(firsts), row.size), split, [mine])


def _everywhere(rows: jax.Array) -> NamedSharding:
    """A copy on each device that has a row."""
    return NamedSharding(cast(NamedSharding, rows.sharding).mesh, PartitionSpec())

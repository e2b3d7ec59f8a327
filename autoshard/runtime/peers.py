"""How the processes of a run find each other for transfers: where this one listens, and where the others do."""

import os
import socket
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_ADDRESS_BYTES = 64
"""Room for one address; the longest is an IPv6 one in brackets with its port, 47 characters."""


def own_host(coordinator_address: str | None) -> str:
    """The numeric address under which other hosts reach this one.

    It is that of the interface that leads to the coordinator, so loopback where the coordinator runs here under a
    loopback address. No packet is sent: the system is only asked for the route.

    Args:
      coordinator_address: `host:port` as given to `jax.distributed.initialize`; None for the environment variable
        `JAX_COORDINATOR_ADDRESS`, and where that is not set, for the interface of the default route.
    """
    towards = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if not towards:
        return _host_towards("192.0.2.1") or "127.0.0.1"  # RFC 5737: an address that belongs to nobody
    host = towards.rpartition(":")[0].strip("[]") or towards
    return _host_towards(host) or "127.0.0.1"


def _host_towards(host: str) -> str | None:
    """The address of the interface that leads to `host`; None where none does."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return cast(str, probe.getsockname()[0])
    except OSError:
        return None


def gather_addresses(address: str) -> list[str]:
    """The address of every process, in order; all of them must call this together.

    One device of each process takes part, so that processes may have different numbers of devices, which
    `jax.experimental.multihost_utils.process_allgather` does not allow.

    Args:
      address: Of this process.
    """
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([firsts[process] for process in sorted(firsts)]), ("process",))
    row = np.frombuffer(address.encode().ljust(_ADDRESS_BYTES), np.uint8)[None]
    mine = jax.device_put(row, firsts[jax.process_index()])
    split = NamedSharding(mesh, PartitionSpec("process"))
    rows = jax.make_array_from_single_device_arrays((len(firsts), _ADDRESS_BYTES), split, [mine])
    everywhere = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(rows)
    return [bytes(row).decode().strip() for row in np.asarray(everywhere.addressable_data(0))]

"""Carries parts of tensors between processes: what one offers under a number, another fetches under it.

It stands on `jax.experimental.transfer`, which asks for no equal devices, equal counts or common order of operations,
as collectives do. What was found out about it (jax 0.10.1, 0.10.2 and 0.12.0, on CPU):

- A fetch returns at once; the array becomes ready when the bytes are there.
- A peer that dies while it is connected makes waiting and later fetches fail at once, but this shows only when
  somebody blocks on the array. Hence all connections are made at the start.
- A peer that never offers the number, or is stopped, makes the array wait for ever: the `timeout` of `pull` does not
  end it. So does connecting to a peer that is gone. Hence `PendingTransfers`, which keeps time.
- What is offered need not be computed yet. If that fails, so does the fetch, and all fetches of what depends on it.
- An array that was offered and then donated or deleted makes the fetch fail; it is never read in a changed state.

There is no encryption and no password: the network between the processes must be trusted, as for
`jax.distributed` itself.
"""

import jax
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from autoshard.transfer.peers import all_gather_text, listening_host


class PeerConnections:
    """The connections of this process to all others of the run.

    All processes must make theirs together: they tell each other their addresses.

    Args:
      coordinator_address: See `peers.host_towards_coordinator`.
    """

    def __init__(self, coordinator_address: str | None = None) -> None:
        host = listening_host(coordinator_address)
        anywhere = f"[{host}]:0" if ":" in host else f"{host}:0"
        self._server = transfer.start_transfer_server(jax.local_devices()[0].client, anywhere, [anywhere])
        addresses = all_gather_text(self._server.address())
        self._connections = {
            process: self._server.connect(address)
            for process, address in enumerate(addresses)
            if process != jax.process_index()
        }

    def offer(self, number: int, part: jax.Array) -> None:
        """Lets another process fetch `part`, once; it is kept until then."""
        self._server.await_pull(number, [part])

    def fetch(self, number: int, shape: tuple[int, ...], dtype: jax.typing.DTypeLike, here: jax.Device, process: int):
        """What `process` offers under `number`, as an array on the local device `here`; does not wait for it."""
        wanted = jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(here))
        (part,) = self._connections[process].pull(number, [wanted])
        return part

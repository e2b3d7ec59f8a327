"""Rows of a batch on their way between slots of host memory and devices, those of one process or of several.

Of several processes each has its own rows of a batch in its slot, at their places among all. Its devices get the whole
slot; a program, launched by all processes in the same order as their steps, leaves each row to the first device of the
process that owns it and adds up: every row is there once, and what a sum adds to it is zero. On the way back new rows
are gathered on all devices, and each process takes its own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Edges = Sequence[tuple[int, int]]
"""For each table: from which to which of a batch's rows this process owns."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """Rows of one batch, copied off their slot.

    Attributes:
      arrays: On the devices; of several processes, (devices, rows of a batch, ...), each device with a slot's content.
      starts, stops: (devices, tables): which of these rows count there. Of one process: None, all do.
    """

    arrays: list[Any]
    starts: Any = None
    stops: Any = None


class OneProcess:
    """Of one process: rows are copied, and nothing else."""

    def __init__(self, shardings: Sequence[Any] | None):
        """
        Args:
          shardings: Of each array of rows; None for the default device.
        """
        self._shardings = None if shardings is None else list(shardings)

    def load(self, rows: Sequence[np.ndarray], edges: Edges) -> Loaded:
        """Copies of rows on the devices, whose memory a step may reuse; the slot may be written to afterwards."""
        return Loaded(jax.block_until_ready(jax.device_put(list(rows), self._shardings, may_alias=False)))

    def joined(self, loaded: Loaded) -> list[Any]:
        """The rows as a step reads them."""
        return loaded.arrays

    def gathered(self, new: Sequence[Any]) -> Sequence[Any]:
        """New rows, so that `host` can read them."""
        return new

    def host(self, gathered: Any) -> np.ndarray:
        """One array of new rows on the host."""
        return np.asarray(gathered)


class SeveralProcesses:
    """Of several processes, which call `joined` and `gathered` in the same order as all else that they launch."""

    def __init__(self, tables: Sequence[int], shardings: Sequence[NamedSharding]):
        """
        Args:
          tables: Of each array of rows, the number of its table. shardings: Of each, on the mesh of the plan.
        """
        self._tables = list(tables)
        devices = shardings[0].mesh.devices.reshape(-1)  # type: ignore[union-attr]
        self._flat = NamedSharding(Mesh(devices, ("device",)), PartitionSpec("device"))
        owner_of = [d.process_index for d in devices]
        self._num_devices = len(owner_of)
        self._first = owner_of.index(jax.process_index())  # device of this process
        self._waits = devices[0].platform == "cpu"  # two programs with collectives at once can hang XLA:CPU
        everywhere = NamedSharding(shardings[0].mesh, PartitionSpec())
        self._join = jax.jit(self._joined, out_shardings=list(shardings))
        self._gather = jax.jit(lambda rows: rows, out_shardings=everywhere)

    def load(self, rows: Sequence[np.ndarray], edges: Edges) -> Loaded:
        """See `OneProcess.load`."""
        bounds = np.zeros((2, self._num_devices, len(edges)), np.int32)
        bounds[:, self._first] = np.array(edges, np.int32).T
        own = lambda x: jax.make_array_from_callback(
            (self._num_devices, *x.shape), self._flat, lambda _: x[None].copy()
        )
        arrays = [own(x) for x in rows]
        starts, stops = [jax.make_array_from_callback(b.shape, self._flat, lambda i, b=b: b[i]) for b in bounds]
        return Loaded(jax.block_until_ready(arrays), starts, stops)

    def joined(self, loaded: Loaded) -> list[Any]:
        """See `OneProcess.joined`."""
        return self._done(self._join(loaded.arrays, loaded.starts, loaded.stops))

    def gathered(self, new: Sequence[Any]) -> Sequence[Any]:
        """See `OneProcess.gathered`."""
        return self._done(self._gather(list(new)))

    def host(self, gathered: Any) -> np.ndarray:
        """See `OneProcess.host`."""
        return np.asarray(gathered.addressable_data(0))

    def _joined(self, arrays: Sequence[Any], starts: Any, stops: Any) -> list[Any]:
        """Each row from the device that it counts on. starts, stops: (devices, tables)."""

        def one(x: Any, table: int) -> Any:
            places = jnp.arange(x.shape[1])[None]
            counts = (places >= starts[:, table, None]) & (places < stops[:, table, None])
            own = jnp.where(counts.reshape(*counts.shape, *[1] * (x.ndim - 2)), x, jnp.zeros((), x.dtype))
            return own.sum(0, dtype=x.dtype)

        return [one(x, table) for x, table in zip(arrays, self._tables, strict=True)]

    def _done(self, arrays: list[Any]) -> list[Any]:
        return jax.block_until_ready(arrays) if self._waits else arrays


def placed(tree: Any, shardings: Any) -> Any:
    """Arrays that all processes have, whole, on the devices; nothing is sent for that.

    Args:
      tree: NumPy arrays, or others of this process.
      shardings: Likewise, or one for all; None for the default device.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    of = lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda x: of(np.asarray(x), shardings), tree)
    return jax.tree.map(lambda x, sharding: of(np.asarray(x), sharding), tree, shardings)

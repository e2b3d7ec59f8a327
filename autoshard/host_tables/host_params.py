"""Parameters that live at the host whole: those of layers that run there, with what the optimizer keeps for them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autoshard.tables.host_layers import HostLayers
from autoshard.tables.state_rows import ParamLeaf, rows_of, with_rows


class HostParams:
    """Leaves of a state, which steps replace together.

    Attributes:
      leaves: The newest, in the order of `HostLayers.dense`.
    """

    def __init__(self, layers: HostLayers | None):
        self._which: tuple[ParamLeaf, ...] = () if layers is None else layers.dense
        self.leaves: Sequence[np.ndarray] = [np.zeros(x.shape, x.dtype) for x in self._which]

    def take(self, state: Any, shardings: tuple[Any, Any] | None) -> Any:
        """Copies the leaves out of a state; returns it with single numbers that mean nothing in their places.

        Args:
          state: Arrays.
          shardings: Of the state and of the batch of the step on the devices; None for the default device.
        """
        self.leaves = [np.array(x) for x in rows_of(state, self._which)]
        places = [jnp.zeros((1,) * x.ndim, x.dtype) for x in self.leaves]
        if shardings is not None:
            places = jax.device_put(places, rows_of(shardings[0], self._which))
        return with_rows(state, self._which, places)

    def put(self, state: Any, sharding: NamedSharding | None) -> Any:
        """A state with copies of them in their places, on the default device or where `sharding` says."""
        return with_rows(state, self._which, [jax.device_put(x, sharding, may_alias=False) for x in self.leaves])

"""Rows that stay on the devices, in front of those of a batch: put together before a step, and taken apart after it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


class HotPart:
    """Programs on all arrays of rows of a state."""

    def __init__(self, counts: Sequence[int], shardings: Sequence[Any], apart: Sequence[Any]):
        """
        Args:
          counts: Hot rows of each array.
          shardings: Of each, hot rows and those of a batch together; None for the default device.
          apart: Of each, hot rows or those of a batch alone.
        """
        self.is_empty = not any(counts)
        split = lambda rows, part: [x[part(n)] for x, n in zip(rows, counts, strict=True)]
        together = lambda hot, cold: [jnp.concatenate(pair) for pair in zip(hot, cold, strict=True)]
        in_place = lambda old, cold: [x.at[n:].set(y) for x, y, n in zip(old, cold, counts, strict=True)]
        out, alone = (None if s and s[0] is None else list(s) for s in (shardings, apart))
        self._together = jax.jit(together, out_shardings=out)
        self._in_place = jax.jit(in_place, donate_argnums=0, out_shardings=out)
        self._cold = jax.jit(lambda rows: split(rows, lambda n: slice(n, None)), out_shardings=alone)
        self._hot = jax.jit(lambda rows: split(rows, lambda n: slice(n)), out_shardings=alone)

    def together(self, hot: Sequence[Any], cold: Sequence[Any]) -> list[Any]:
        """Hot rows with those of a batch behind them."""
        return self._together(list(hot), list(cold))

    def with_batch(self, old: Sequence[Any], cold: Sequence[Any]) -> list[Any]:
        """The rows of the last step with those of another batch in place of its own; `old` is used up."""
        return list(cold) if self.is_empty else self._in_place(list(old), list(cold))

    def cold(self, rows: Sequence[Any]) -> list[Any]:
        """Those of the batch."""
        return list(rows) if self.is_empty else self._cold(list(rows))

    def hot(self, rows: Sequence[Any]) -> list[Any]:
        """The others."""
        return self._hot(list(rows))

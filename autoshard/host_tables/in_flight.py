"""Rows that were looked up before the last steps had written theirs back: which they are, and how they are patched."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Patch:
    """Rows of a batch that an earlier step has changed since they were looked up.

    Attributes:
      step: The earlier step.
      to: For each table, the positions of such rows in the batch, filled up by one that does not exist.
      of: For each table, their positions among the rows of the earlier step.
    """

    step: int
    to: tuple[np.ndarray, ...]
    of: tuple[np.ndarray, ...]


def patch_of(step: int, keys: Sequence[np.ndarray], its: Sequence[np.ndarray], none: Sequence[int]) -> Patch | None:
    """What a batch must take from an earlier step; None if they have no row in common.

    Args:
      step: The earlier step. keys, its: For each table, the keys of the rows of the batch and of that step, rising.
      none: For each table, a position that does not exist.
    """
    pairs = [_common(a, b) for a, b in zip(keys, its, strict=True)]
    most = max((len(to) for to, _ in pairs), default=0)
    if not most:
        return None
    size = 1 << (most - 1).bit_length()  # few sizes, for each of which one program is compiled
    filled = lambda a, rest: np.concatenate([a, np.full(size - len(a), rest, a.dtype)])
    to = tuple(filled(to, n) for (to, _), n in zip(pairs, none, strict=True))
    return Patch(step, to, tuple(filled(of, 0) for _, of in pairs))


def _common(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positions in two rising arrays of what both have.

    A stable sort merges the two in one pass, which is several times faster than searching one for the other.
    """
    joined = np.concatenate([a, b])
    order = np.argsort(joined, kind="stable")
    ordered = joined[order]
    pairs = np.flatnonzero(ordered[1:] == ordered[:-1])
    return order[pairs].astype(np.int32), (order[pairs + 1] - len(a)).astype(np.int32)


class Patcher:
    """Puts rows of an earlier step into those of a batch, on their devices."""

    def __init__(self, tables: Sequence[int]):
        """
        Args:
          tables: For each array of rows, the number of its table.
        """

        def patched(rows: Any, new: Any, to: Any, of: Any) -> Any:
            put = lambda x, y, t: x.at[to[t]].set(y[of[t]], mode="drop", unique_indices=False)
            return [put(x, y, t) for x, y, t in zip(rows, new, tables, strict=True)]

        self._patched, self._programs = patched, dict[Any, Any]()

    def __call__(self, rows: list[Any], new: Sequence[Any], patch: Patch) -> list[Any]:
        """The rows of a batch with those of an earlier step in place; `rows` are used up."""
        shardings = tuple(x.sharding for x in rows)
        if shardings not in self._programs:
            self._programs[shardings] = jax.jit(self._patched, donate_argnums=0, out_shardings=list(shardings))
        new = [y if y.sharding == x.sharding else jax.device_put(y, x.sharding) for x, y in zip(rows, new, strict=True)]
        to, of = (tuple(map(jnp.asarray, positions)) for positions in (patch.to, patch.of))
        return self._programs[shardings](rows, new, to, of)

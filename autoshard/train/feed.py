"""Batches on their way to the devices: read ahead of the step, and placed as the plan says.

Of several processes, each reads only the examples that its own devices hold a part of.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

from autoshard.errors import TrainingError
from autoshard.train.data.batches import Batch, Batches

READ_AHEAD = 2
"""Batches that are read while a step runs, unless it is said otherwise."""


class Fed(NamedTuple):
    """A batch on the devices, and how long the step had to wait for it."""

    batch: Any
    wait_s: float


Shardings = Mapping[str, jax.sharding.Sharding] | None
"""Where each array of a batch lies, by name; None for a batch that stays on the host, whole."""

Index = tuple[slice, ...]
"""Where a shard lies in its array."""


class BatchReader:
    """Reads of each batch the examples that this process's devices hold, and places them.

    Attributes:
        examples: which of a batch these are.
    """

    def __init__(self, batches: Batches, shardings: Shardings):
        """Finds out which examples this process needs.

        Args:
            batches: what to read.
            shardings: of a batch; with None all of it is read, as for a step in stages, which shares it out itself.
        """
        self._batches, self._shardings = batches, shardings
        self._shapes = batches.shapes() if shardings is not None else {}
        self.examples = np.arange(batches.size)
        if shardings is not None:
            local = [(x.shape, shardings[n].addressable_devices_indices_map(x.shape)) for n, x in self._shapes.items()]
            shards = [(shape[0], index) for shape, found in local for index in found.values() if index is not None]
            self.examples = examples_of(batches.size, shards)

    def own(self) -> grain.MapDataset[Batch]:
        """The batches, with this process's examples only."""
        return self._batches.of(self.examples)

    def batch(self, number: int) -> Any:
        """Batch `number` on the devices."""
        return self.place(self._batches.rows(number, self.examples))

    def place(self, batch: Mapping[str, np.ndarray]) -> Any:
        """An element of `own` on the devices, as shards of the whole batch; on the host without shardings."""
        if self._shardings is None:
            return dict(batch)

        def placed(array: np.ndarray, shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> jax.Array:
            shard = lambda index: shard_at(index, array, shape[0], self._batches.size, self.examples)
            return jax.make_array_from_callback(shape, sharding, shard)

        return {name: placed(x, self._shapes[name].shape, self._shardings[name]) for name, x in batch.items()}


def examples_of(size: int, shards: Iterable[tuple[int, Index]]) -> np.ndarray:
    """The examples of which some shards hold a part.

    Args:
        size: examples of a batch.
        shards: of each, the length of the array's first axis, a multiple of `size`, and where in the array it lies.

    Returns:
        Their numbers, in rising order.
    """
    is_needed = np.zeros(size, np.bool_)
    for length, index in shards:
        start, stop, _ = index[0].indices(length)
        rows = length // size
        is_needed[start // rows : -(-stop // rows)] = True
    return np.flatnonzero(is_needed)


def shard_at(index: Index, array: np.ndarray, length: int, size: int, examples: np.ndarray) -> np.ndarray:
    """A shard of a whole array, from its rows of some examples, which hold the shard.

    Args:
        index: where the shard lies in the whole array.
        array: the rows of `examples`, in their order.
        length: of the first axis of the whole array, a multiple of `size`.
        size: examples of a batch.
        examples: as `examples_of` gives them.
    """
    start, stop, _ = index[0].indices(length)
    rows = length // size
    first = int(np.searchsorted(examples, start // rows)) * rows + start % rows
    return array[(slice(first, first + stop - start), *index[1:])]


@contextlib.contextmanager
def feed(batches: Batches, first: int, shardings: Shardings, read_ahead: int = READ_AHEAD) -> Iterator[Iterator[Fed]]:
    """The batches from number `first` on, read in the background while the block runs.

    Args:
        batches: number n is the batch of step n.
        first: the first one wanted.
        shardings: of a batch; None to leave it on the host.
        read_ahead: batches that are read while a step runs, each in a thread of its own.

    Yields:
        The batches. Its `next` raises TrainingError if a batch cannot be read.
    """
    try:
        reader = BatchReader(batches, shardings)
    except Exception as error:
        raise _unreadable(0, error) from error
    own = reader.own()
    options = grain.ReadOptions(num_threads=read_ahead, prefetch_buffer_size=read_ahead)
    ahead = iter(own.slice(slice(first, len(own))).to_iter_dataset(options))

    def fed() -> Iterator[Fed]:
        step = first
        while True:
            started_s = time.perf_counter()
            try:
                batch = next(ahead)
            except StopIteration:
                raise TrainingError(f"The data end before step {step + 1}. Lower train.steps or give more.") from None
            except Exception as error:
                raise _unreadable(step, error) from error
            yield Fed(reader.place(batch), time.perf_counter() - started_s)
            step += 1

    try:
        yield fed()
    finally:
        ahead.close()


def _unreadable(step: int, error: Exception) -> TrainingError:
    return TrainingError(
        f"The batch of step {step + 1} cannot be read: {type(error).__name__}: {error} Correct the data, then resume."
    )

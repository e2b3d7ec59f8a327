"""Batches on their way to the devices: read ahead of the step, and placed as the plan says."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

from autoshard.errors import TrainingError

READ_AHEAD = 2
"""Batches that are read while a step runs, each in a thread of its own."""


class Fed(NamedTuple):
    """A batch on the devices, and how long the step had to wait for it."""

    batch: Any
    wait_s: float


@contextlib.contextmanager
def feed(dataset: grain.MapDataset, first: int, shardings: Any) -> Iterator[Iterator[Fed]]:
    """The batches from element `first` of `dataset` on, read in the background while the block runs.

    Args:
        dataset: element n is the batch of step n.
        first: the first element wanted.
        shardings: the sharding of each array of a batch; None to leave them on the host.

    Yields:
        The batches. Its `next` raises TrainingError if a batch cannot be read.
    """
    options = grain.ReadOptions(num_threads=READ_AHEAD, prefetch_buffer_size=READ_AHEAD)
    ahead = iter(dataset.slice(slice(first, len(dataset))).to_iter_dataset(options))

    def batches() -> Iterator[Fed]:
        step = first
        while True:
            started_s = time.perf_counter()
            try:
                batch = next(ahead)
            except StopIteration:
                raise TrainingError(f"The data end before step {step + 1}. Lower train.steps or give more.") from None
            except Exception as error:
                raise TrainingError(
                    f"The batch of step {step + 1} cannot be read: {type(error).__name__}: {error} Correct the data, "
                    "then resume."
                ) from error
            yield Fed(place(batch, shardings), time.perf_counter() - started_s)
            step += 1

    try:
        yield batches()
    finally:
        ahead.close()


def place(batch: Mapping[str, np.ndarray], shardings: Any) -> Any:
    """A batch on the devices; of several processes, each places the shards of its own devices.

    With None for shardings the batch stays as it is: a step in stages shares it out itself.
    """
    if shardings is None:
        return dict(batch)

    def placed(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(placed, dict(batch), shardings)

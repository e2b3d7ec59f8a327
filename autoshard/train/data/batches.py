"""Batches as a function of (seed, step), for training and for evaluation."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import grain
import numpy as np

Batch = dict[str, np.ndarray]
"""One step's data by name, over all devices."""

Part = Literal["train", "eval"]
"""What a batch is for; no example is in both parts."""

MAX_STEPS = 2**31
"""Length of a sequence of batches that are drawn."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainData:
    """The data of a run.

    Attributes:
        batches: element n is the batch of step n, counted from 0: arrays of the names, shapes and types that
            `Family.batch_shapes` states, over all devices. It depends on the seed and n alone.
        eval_batches: the same of examples that are never trained on; without end.
        items_per_example: what throughput counts in an example: tokens of a sequence, or 1.
        item: the name of what is counted, in the plural: tokens, images, clicks or graphs.
    """

    batches: grain.MapDataset[Batch]
    eval_batches: grain.MapDataset[Batch]
    items_per_example: int
    item: str

    def batch(self, number: int) -> Batch:
        """Element `number` of `batches`."""
        return _element(self.batches, number)

    def eval_batch(self, number: int) -> Batch:
        """Element `number` of `eval_batches`."""
        return _element(self.eval_batches, number)


def _element(dataset: grain.MapDataset[Batch], number: int) -> Batch:
    """Grain knows elements that a filter has taken out; here none is."""
    batch = dataset[number]
    assert batch is not None, number
    return dict(batch)


def drawn(draw: Callable[[np.random.Generator], Batch], seed: int, part: Part) -> grain.MapDataset:
    """Batches that are made of random numbers, one after another in any order.

    Args:
        draw: a batch from the random numbers of its step.
        seed: not negative; fixes all batches.
        part: the two parts of a seed have different random numbers.
    """
    return grain.MapDataset.range(MAX_STEPS).seed(part_seed(seed, part)).random_map(lambda _, rng: draw(rng))


def part_seed(seed: int, part: Part) -> int:
    """Grain's seed, of 32 bits, for one part of a run's data."""
    return int(np.random.SeedSequence((seed, 0 if part == "train" else 1)).generate_state(1)[0])

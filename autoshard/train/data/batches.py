"""Batches as a function of (seed, step), for training and for evaluation, whole or some of their examples."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import grain
import jax
import numpy as np

Batch = dict[str, np.ndarray]
"""One step's data by name: arrays whose first axis counts examples, or the equally many rows of each example."""

Part = Literal["train", "eval"]
"""What a batch is for; no example is in both parts."""

Examples = np.ndarray | slice
"""Numbers of examples in a batch, in rising order."""

ALL = slice(None)
"""Every example of a batch."""

MAX_STEPS = 2**31
"""Length of a sequence of batches that are drawn."""


@dataclasses.dataclass(frozen=True, slots=True)
class Batches:
    """A sequence of batches, of which each process reads only the examples that its own devices hold.

    Element n is the batch of step n, counted from 0: arrays of the names, shapes and types that `Family.batch_shapes`
    states, over all devices. It depends on the seed and n alone.

    Attributes:
        size: examples of a batch.
        of: the same sequence with only these examples of each batch, bit by bit those of the whole batch.
    """

    size: int
    of: Callable[[Examples], grain.MapDataset[Batch]]

    def __len__(self) -> int:
        return len(self.of(ALL))

    def __getitem__(self, number: int) -> Batch:
        """All examples of batch `number`."""
        return self.rows(number, ALL)

    def rows(self, number: int, examples: Examples) -> Batch:
        """The rows of these examples in batch `number`."""
        batch = self.of(examples)[number]
        assert batch is not None, number  # Grain knows elements that a filter has taken out; here none is
        return dict(batch)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a whole batch, by name; reads one example."""
        one = self.rows(0, np.arange(1))
        return {name: jax.ShapeDtypeStruct((self.size * len(x), *x.shape[1:]), x.dtype) for name, x in one.items()}


def in_parts(batches: Batches, count: int) -> Batches:
    """The same batches, each with the examples of its micro-batches one behind another.

    Micro-batch m of `count` has the examples m, m + count, m + 2 * count and so on (`models/train_step.py`), where a
    step in stages takes those that lie together.
    """
    order = np.arange(batches.size).reshape(-1, count).T.ravel()

    def of(examples: Examples) -> grain.MapDataset[Batch]:
        wanted, every = order[examples], batches.of(ALL)
        return every.map(lambda batch: {name: _rows(x, wanted, batches.size) for name, x in batch.items()})

    return Batches(batches.size, of)


def _rows(array: np.ndarray, examples: np.ndarray, size: int) -> np.ndarray:
    """The rows of some examples; of each there may be several."""
    return array.reshape(size, -1, *array.shape[1:])[examples].reshape(-1, *array.shape[1:])


@dataclasses.dataclass(frozen=True, slots=True)
class TrainData:
    """The data of a run.

    Attributes:
        batches: to train on.
        eval_batches: the same of examples that are never trained on; without end.
        items_per_example: what throughput counts in an example: tokens of a sequence, or 1.
        item: the name of what is counted, in the plural: tokens, images, clicks or graphs.
    """

    batches: Batches
    eval_batches: Batches
    items_per_example: int
    item: str


def drawn(draw: Callable[[np.random.Generator, Examples], Batch], size: int, seed: int, part: Part) -> Batches:
    """Batches that are made of random numbers, one after another in any order.

    Args:
        draw: some examples of a batch, from the random numbers of its step.
        size: examples of a batch.
        seed: not negative; fixes all batches.
        part: the two parts of a seed have different random numbers.
    """
    steps = grain.MapDataset.range(MAX_STEPS).seed(part_seed(seed, part))
    return Batches(size, lambda examples: steps.random_map(lambda _, rng: draw(rng, examples)))


def part_seed(seed: int, part: Part) -> int:
    """Grain's seed, of 32 bits, for one part of a run's data."""
    return int(np.random.SeedSequence((seed, 0 if part == "train" else 1)).generate_state(1)[0])

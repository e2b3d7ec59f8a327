"""Batches of text for each way of learning from it."""

import numpy as np

from autoshard.train.data.batches import Batch


def windows(corpus: np.ndarray, rng: np.random.Generator, batch_size: int, length: int) -> np.ndarray:
    """Random pieces of a corpus of at least `length` bytes: int32 (batch_size, length)."""
    first = rng.integers(corpus.size - length + 1, size=(batch_size, 1))
    return corpus[first + np.arange(length)].astype(np.int32)


def next_token(corpus: np.ndarray, rng: np.random.Generator, batch_size: int, length: int) -> Batch:
    """`inputs` and `targets`, int32 (batch_size, length): the targets are the inputs one byte later."""
    pieces = windows(corpus, rng, batch_size, length + 1)
    return {"inputs": pieces[:, :-1], "targets": pieces[:, 1:]}

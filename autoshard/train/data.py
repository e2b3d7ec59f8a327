"""Batches of bytes: each step reads random windows of a corpus, fixed by (seed, step) alone.

A run that stops and resumes at step n therefore sees the batches that it would have seen without stopping, and no state
of the pipeline has to be kept. Tokens are bytes, 0..255.
"""

import pathlib
import sysconfig
from collections.abc import Iterable

import grain
import numpy as np

from autoshard.errors import ConfigError

MAX_STEPS = 2**31
"""Length of the sequence of batches."""


def python_sources() -> np.ndarray:
    """The top-level modules of this Python's standard library, one after another: uint8 (length,), about 4 to 5 MB.

    Raises:
        ConfigError: this Python has no library sources.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    return _concatenated(folder, folder.glob("*.py"))


def text_files(path: str) -> np.ndarray:
    """The bytes of a file, or of all files of a folder tree in the order of their paths: uint8 (length,).

    Raises:
        ConfigError: the path does not exist or holds no bytes.
    """
    root = pathlib.Path(path)
    return _concatenated(root, root.rglob("*") if root.is_dir() else [root])


def _concatenated(root: pathlib.Path, paths: Iterable[pathlib.Path]) -> np.ndarray:
    try:
        content = b"".join(path.read_bytes() for path in sorted(paths) if path.is_file())
    except OSError as error:
        raise ConfigError(f"Training data under {root} cannot be read: {error}. Check the path.") from error
    if not content:
        raise ConfigError(f"Training data must hold at least one byte; {root} holds none. Check the path.")
    return np.frombuffer(content, np.uint8)


def batches(corpus: np.ndarray, *, batch_size: int, sequence_length: int, seed: int) -> grain.MapDataset:
    """The batch of every step, by its number.

    Args:
        corpus: uint8 (length,), with length > sequence_length.
        batch_size: windows per batch.
        sequence_length: tokens per window.
        seed: fixes the windows of all steps.

    Returns:
        A dataset whose element n is the batch of step n, `inputs` and `targets`: int32 (batch_size, sequence_length);
        targets are the inputs one byte later.

    Raises:
        ConfigError: the corpus is too short for one window.
    """
    starts = corpus.size - sequence_length
    if starts < 1:
        raise ConfigError(
            f"data.sequence_length: a window of {sequence_length} + 1 bytes must fit in the data; the data has "
            f"{corpus.size}. Lower data.sequence_length or give more data."
        )

    def cut(step: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        first = rng.integers(starts, size=(batch_size, 1))
        windows = corpus[first + np.arange(sequence_length + 1)].astype(np.int32)
        return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}

    return grain.MapDataset.range(MAX_STEPS).seed(seed).random_map(cut)

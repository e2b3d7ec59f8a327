"""Bytes of text: the files of a folder, or one file of any size, and the part of them that is held out.

Tokens are bytes, 0..255, so that any file is text.
"""

import os
import pathlib
import sysconfig
from collections.abc import Iterable

import numpy as np

from autoshard.errors import ConfigError
from autoshard.train.data.batches import Part


def python_sources() -> np.ndarray:
    """The top-level modules of this Python's standard library, one after another: uint8 (length,), about 4 to 5 MB.

    Raises:
        ConfigError: this Python has no library sources.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    return _joined(folder, sorted(folder.glob("*.py")))


def text_files(path: str) -> np.ndarray:
    """The bytes of a file, or of all files of a folder tree in the order of their paths: uint8 (length,).

    A file is mapped into memory and read as batches need it; the files of a folder are read at once.

    Raises:
        ConfigError: the path does not exist, something under it cannot be read, or it holds no bytes.
    """
    root = pathlib.Path(path)
    if root.is_dir():
        return _joined(root, _files_under(root))
    try:
        if root.exists() and not root.is_file():
            raise ConfigError(f"data.path: must be a file or a folder; {root} is neither. Choose another.")
        if root.stat().st_size:
            return np.memmap(root, np.uint8, mode="r")
    except OSError as error:
        raise _unreadable(error, root) from error
    return _joined(root, [root])  # empty, or a file of the system that does not tell its size


def _files_under(root: pathlib.Path) -> list[pathlib.Path]:
    def refuse(error: OSError) -> None:
        raise _unreadable(error, root) from error

    paths = [pathlib.Path(folder, name) for folder, _, names in os.walk(root, onerror=refuse) for name in names]
    return sorted(path for path in paths if path.is_file() or path.is_symlink())  # no sockets, no pipes


def _joined(root: pathlib.Path, paths: Iterable[pathlib.Path]) -> np.ndarray:
    contents = []
    for path in paths:
        try:
            contents.append(path.read_bytes())
        except OSError as error:
            raise _unreadable(error, path) from error
    content = b"".join(contents)
    if not content:
        raise ConfigError(f"data.path: training data must hold at least one byte; {root} holds none. Choose another.")
    return np.frombuffer(content, np.uint8)


def _unreadable(error: OSError, path: pathlib.Path) -> ConfigError:
    return ConfigError(
        f"data.path: {error.filename or path} cannot be read: {error.strerror}. Correct the path, or make it readable."
    )


def part_of(corpus: np.ndarray, part: Part, eval_fraction: float, min_length: int) -> np.ndarray:
    """The bytes to train on, or those behind them, which are held out.

    Args:
        corpus: uint8 (length,).
        part: which of both.
        eval_fraction: share of the bytes that is held out.
        min_length: bytes that each part must have.

    Raises:
        ConfigError: the corpus is too short for two such parts.
    """
    if corpus.size < 2 * min_length:
        raise ConfigError(
            f"data.sequence_length: the data must hold {min_length} bytes to train on and as many to evaluate on; it "
            f"holds {corpus.size}. Lower data.sequence_length or give more data."
        )
    held_out = min(max(round(corpus.size * eval_fraction), min_length), corpus.size - min_length)
    return corpus[:-held_out] if part == "train" else corpus[-held_out:]

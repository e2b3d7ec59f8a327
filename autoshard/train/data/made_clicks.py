"""Click logs in Criteo's format whose clicks a hidden model draws, so that how well another one learns means something.

- Category k of a table, counted from 1, has a probability in proportion to k^-s: Zipf's law with exponent s. It is
  written as a hash of 32 bits, no two of a table alike.
- Numbers are counts, exp of a normal number less its fraction; the second may be -1, as in Criteo's logs.
- One field in twenty is missing.
- The logarithm of the odds of a click is 2 * (w x + sum of effects / sqrt(26)) - 2: x are the logarithms of the counts,
  moved and scaled to mean 0 and deviation 1 (0 where missing), w has length 1, and each category has an effect from -1
  to 1 (0 where missing).

The rule is the same for every seed; the seed draws the examples. No model can rank better than the hidden one.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator

import numpy as np

from autoshard.errors import ConfigError
from autoshard.train.data.clicks import GOLDEN_RATIO
from autoshard.train.data.criteo import MISSING, NUM_CATEGORIES, NUM_NUMBERS, Clicks

MISSING_SHARE = 0.05
_LOG_MEAN, _LOG_DEVIATION = 1.5, 1.2
_CHUNK = 65_536
"""Examples drawn at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class MadeClicks:
    """A click log to be made.

    Attributes:
        num_examples: its lines.
        seed: draws them.
        zipf_exponent: of the frequency of categories; 0 for all alike.
        num_categories: categories of each of the 26 tables.
    """

    num_examples: int
    seed: int = 0
    zipf_exponent: float = 1.1
    num_categories: int = 1000

    def __post_init__(self) -> None:
        if self.num_examples < 1 or self.num_categories < 1 or self.zipf_exponent < 0 or self.seed < 0:
            raise ConfigError(
                "a click log has at least one example and one category, and exponent and seed are not negative; "
                f"received {self}. Correct it."
            )

    def chunks(self) -> Iterator[tuple[Clicks, np.ndarray]]:
        """The examples in their order, some at a time, each chunk with the hidden model's log-odds of its clicks."""
        shares = np.arange(1.0, self.num_categories + 1) ** -self.zipf_exponent
        until = np.cumsum(shares) / shares.sum()
        for number, first in enumerate(range(0, self.num_examples, _CHUNK)):
            rng = np.random.default_rng((self.seed, number))
            yield _drawn(rng, min(_CHUNK, self.num_examples - first), until)


def _drawn(rng: np.random.Generator, count: int, until: np.ndarray) -> tuple[Clicks, np.ndarray]:
    """Examples and their log-odds; `until`: the share of the categories up to each."""
    normal = rng.standard_normal((count, NUM_NUMBERS))
    numbers = np.floor(np.exp(_LOG_MEAN + _LOG_DEVIATION * normal)).astype(np.int64)
    numbers[:, 1] -= 1
    categories = np.minimum(np.searchsorted(until, rng.random((count, NUM_CATEGORIES))), until.size - 1)
    has_number = rng.random(numbers.shape) >= MISSING_SHARE
    has_category = rng.random(categories.shape) >= MISSING_SHARE
    weights = np.random.default_rng(0).standard_normal(NUM_NUMBERS)
    weights /= np.linalg.norm(weights)
    effects = np.cos(2 * np.pi * ((categories + 1) * GOLDEN_RATIO + np.arange(NUM_CATEGORIES) * 2**0.5))
    log_odds = 2 * ((normal * has_number) @ weights + (effects * has_category).sum(axis=1) / NUM_CATEGORIES**0.5) - 2
    labels = (rng.random(count) < 1 / (1 + np.exp(-log_odds))).astype(np.int64)
    hashes = _scattered(categories + (np.arange(NUM_CATEGORIES) << 26))
    clicks = Clicks(labels, np.where(has_number, numbers, _NO_NUMBER), np.where(has_category, hashes, MISSING))
    return clicks, log_odds


_NO_NUMBER = np.iinfo(np.int64).min
"""Written as an empty field."""


def _scattered(numbers: np.ndarray) -> np.ndarray:
    """Numbers below 2^32 as others, all different: the last steps of MurmurHash3 (Appleby, public domain)."""
    x = numbers.astype(np.uint64) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> np.uint64(shift))) * np.uint64(factor)) & 0xFFFFFFFF
    return (x ^ (x >> np.uint64(16))).astype(np.int64)


def write_clicks(path: str | os.PathLike[str], made: MadeClicks) -> tuple[np.ndarray, np.ndarray]:
    """Writes a click log; the same one for the same `made`.

    Args:
        path: the file, made anew.
        made: what to write.

    Returns:
        The hidden model's log-odds of each click, float32 (examples,), and the clicks, float32 (examples,).

    Raises:
        OSError: it cannot be written.
    """
    log_odds, labels = [], []
    part = pathlib.Path(f"{os.fspath(path)}.part")
    try:
        with part.open("w", encoding="ascii", newline="\n") as file:
            for clicks, odds in made.chunks():
                file.writelines(_lines(clicks))
                log_odds.append(odds.astype(np.float32))
                labels.append(clicks.labels.astype(np.float32))
        part.replace(path)
    except BaseException:  # Ctrl-C, too: who trains on the folder would read what is there of it
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    return np.concatenate(log_odds), np.concatenate(labels)


def _lines(clicks: Clicks) -> Iterator[str]:
    rows = zip(clicks.labels.tolist(), clicks.numbers.tolist(), clicks.hashes.tolist(), strict=True)
    for label, numbers, hashes in rows:
        counts = "\t".join("" if x == _NO_NUMBER else str(x) for x in numbers)
        yield f"{label}\t{counts}\t" + "\t".join("" if x == MISSING else f"{x:08x}" for x in hashes) + "\n"

"""Click logs in the format of the Criteo data sets.

A line is an example: a label (1: clicked), 13 whole numbers, and 26 categories, joined by tabs. A category is a hash of
32 bits in 1 to 8 hexadecimal digits. Numbers and categories may be missing, as empty fields. So are the files of the
Criteo Display Advertising Challenge (`train.txt`) and of the Criteo 1 TB Click Logs (`day_0` to `day_23`, unpacked).

What a model sees of it:

- a number x as log(max(x, 0) + 1), a missing one as 0, as in the released code of DLRM (Naumov et al. 2019,
  arXiv:1906.00091);
- a category of hash h in a table of n rows as row 1 + h mod (n - 1), a missing one as row 0; in a table of a single row
  as row 0. Hashes of different categories may fall on one row, the more the smaller the table.

Lines are parsed as arrays of bytes, a whole batch at a time.
"""

import dataclasses
from collections.abc import Sequence

import grain
import numpy as np

from autoshard.errors import ConfigError, FileFormatError
from autoshard.train.data.batches import MAX_STEPS, Batch, Batches, Examples, Part, part_seed
from autoshard.train.data.line_files import EVERY, LineFiles, runs_of

NUM_NUMBERS = 13
NUM_CATEGORIES = 26
NUM_FIELDS = 1 + NUM_NUMBERS + NUM_CATEGORIES

MISSING = -1
"""Stands for a category that is missing."""

_MOST_DIGITS = 18
"""Of a number, so that it fits 64 bits."""
_HASH_DIGITS = 8
_TAB, _NEWLINE, _MINUS = b"\t\n-"
_NO_DIGIT = 255
_CHUNK_LINES = 8192
"""Lines parsed at once, so that what is computed stays in caches."""


@dataclasses.dataclass(frozen=True, slots=True)
class Clicks:
    """Examples as they stand in a log.

    Attributes:
        labels: int64 (examples,), 0 or 1.
        numbers: int64 (examples, 13), 0 where missing.
        hashes: int64 (examples, 26), `MISSING` where missing.
    """

    labels: np.ndarray
    numbers: np.ndarray
    hashes: np.ndarray


class MalformedLineError(Exception):
    """A line does not follow the format: its place among the lines given, and what is wrong."""

    def __init__(self, line: int, fault: str):
        super().__init__(fault)
        self.line, self.fault = line, fault


def parsed(text: np.ndarray) -> Clicks:
    """Reads lines, each with its line end.

    Args:
        text: uint8 (length,).

    Raises:
        MalformedLineError: one of them does not follow the format.
    """
    separators = np.flatnonzero((text == _TAB) | (text == _NEWLINE))
    is_end = text[separators] == _NEWLINE
    num_lines = int(is_end.sum())
    if separators.size != num_lines * NUM_FIELDS or not is_end[NUM_FIELDS - 1 :: NUM_FIELDS].all():
        counts = np.diff(np.flatnonzero(is_end), prepend=-1)
        line = int(np.flatnonzero(counts != NUM_FIELDS)[0])
        raise MalformedLineError(line, f"it has {counts[line]} fields")
    stops = separators.reshape(num_lines, NUM_FIELDS)
    starts = np.concatenate([[0], separators[:-1] + 1]).reshape(num_lines, NUM_FIELDS)
    chunks = [
        _fields(text, starts[k : k + _CHUNK_LINES], stops[k : k + _CHUNK_LINES], k)
        for k in range(0, num_lines, _CHUNK_LINES)
    ]
    return Clicks(*(np.concatenate(parts) for parts in zip(*chunks, strict=True)))


def _fields(
    text: np.ndarray, starts: np.ndarray, stops: np.ndarray, first_line: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, numbers and hashes of some lines, whose fields begin and end where it is told: (lines, fields) each."""
    is_negative = (text[starts] == _MINUS) & (starts < stops)
    is_negative[:, 0] = is_negative[:, 1 + NUM_NUMBERS :] = False
    decimal = slice(0, 1 + NUM_NUMBERS)
    begins = starts + is_negative
    values, is_bad = _digits(text, begins[:, decimal], stops[:, decimal], 10, _MOST_DIGITS)
    is_bad |= is_negative[:, decimal] & (begins[:, decimal] == stops[:, decimal])
    is_bad[:, 0] |= (values[:, 0] > 1) | (stops[:, 0] - starts[:, 0] != 1)
    hashes, is_bad_hash = _digits(text, begins[:, decimal.stop :], stops[:, decimal.stop :], 16, _HASH_DIGITS)
    bad = np.concatenate([is_bad, is_bad_hash], axis=1)
    if bad.any():
        line, field = (int(k) for k in np.argwhere(bad)[0])
        received = text[starts[line, field] : stops[line, field]].tobytes().decode("utf-8", "replace")
        kind = "a label, 0 or 1," if field == 0 else "a whole number" if field <= NUM_NUMBERS else "a hash of 32 bits"
        raise MalformedLineError(first_line + line, f"its field {field + 1} is not {kind} but {received!r:.40}")
    values = np.where(is_negative[:, decimal], -values, values)
    is_missing = starts[:, decimal.stop :] == stops[:, decimal.stop :]
    return values[:, 0], values[:, 1:], np.where(is_missing, MISSING, hashes)


def _digits(
    text: np.ndarray, starts: np.ndarray, stops: np.ndarray, base: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Fields as numbers, 0 where empty, and which of them are none: longer than `most` digits, or of other bytes."""
    lengths = stops - starts
    values, is_bad, table = np.zeros(starts.shape, np.int64), lengths > most, _digit_table(base)
    for place in range(min(int(lengths.max(initial=0)), most)):
        is_there = place < lengths
        digits = table[text[np.minimum(starts + place, text.size - 1)]]
        is_bad |= is_there & (digits == _NO_DIGIT)
        values = np.where(is_there, values * base + digits, values)
    return values, is_bad


def _digit_table(base: int) -> np.ndarray:
    """For each byte, the digit that it stands for in this base, or `_NO_DIGIT`: uint8 (256,)."""
    table = np.full(256, _NO_DIGIT, np.uint8)
    for text in (b"0123456789abcdef", b"0123456789ABCDEF"):
        table[list(text[:base])] = np.arange(base)
    return table


def as_batch(clicks: Clicks, table_rows: Sequence[int]) -> Batch:
    """Examples as a model reads them; see the head of this file.

    Args:
        clicks: the examples.
        table_rows: rows of each of the 26 tables.

    Returns:
        The batch of `autoshard_models.dlrm.batch_shapes`.
    """
    hashed = 1 + clicks.hashes % np.maximum(np.array(table_rows) - 1, 1)
    is_first = (clicks.hashes == MISSING) | (np.array(table_rows) == 1)
    return {
        "numbers": np.log1p(np.maximum(clicks.numbers, 0)).astype(np.float32),
        "categories": np.where(is_first, 0, hashed).astype(np.int32),
        "clicks": clicks.labels.astype(np.float32),
    }


def criteo_batches(
    log: LineFiles, part: Part, *, batch_size: int, seed: int, eval_fraction: float, table_rows: Sequence[int]
) -> Batches:
    """Batches of a click log: for training in an order drawn anew for each epoch, for evaluation as they stand.

    The last lines are held out, which in a log are the latest. The others are read in runs of `line_files.EVERY` lines,
    so that a batch takes few accesses to a disk; the order of runs is drawn, a run is read through, and lines behind
    the last whole run come last. Each epoch has each line once.

    Args:
        log: the lines.
        part: to train on, or to evaluate on.
        batch_size: examples of a batch.
        seed: fixes the order.
        eval_fraction: share of the lines that is held out, at least one of them.
        table_rows: rows of each of the 26 tables.

    Returns:
        Batches without end. Reading one raises FileFormatError, with file and line, where a line is malformed.

    Raises:
        ConfigError: the log has fewer than two lines.
    """
    if log.num_lines < 2:
        raise ConfigError("data.path: a click log must have a line to train on and one to evaluate on; it has 1 line.")
    num_held_out = min(max(round(log.num_lines * eval_fraction), 1), log.num_lines - 1)
    num_trained = log.num_lines - num_held_out
    num_runs = num_trained // EVERY
    order = None if num_runs == 0 else grain.MapDataset.range(num_runs).seed(part_seed(seed, part)).shuffle().repeat()

    def trained(places: np.ndarray) -> np.ndarray:
        epoch, within = places // num_trained, places % num_trained
        if order is None:
            return within
        run, is_rest = within // EVERY, within >= num_runs * EVERY
        wanted, which = np.unique(epoch * num_runs + np.where(is_rest, 0, run), return_inverse=True)
        drawn = np.array([order[int(k)] for k in wanted])
        return np.where(is_rest, within, drawn[which] * EVERY + within % EVERY)

    def look_up(step: int, examples: Examples) -> Batch:
        places = step * batch_size + np.arange(batch_size)[examples]
        lines = trained(places) if part == "train" else num_trained + places % num_held_out
        text = np.concatenate([log.read(*run) for run in runs_of(lines)])
        try:
            return as_batch(parsed(text), table_rows)
        except MalformedLineError as error:
            raise FileFormatError(
                f"{log.place(int(lines[error.line]))}: a line must have a label, {NUM_NUMBERS} whole numbers and "
                f"{NUM_CATEGORIES} hexadecimal hashes, joined by tabs; {error.fault}. Correct or remove the line."
            ) from None

    steps = grain.MapDataset.range(MAX_STEPS)
    return Batches(batch_size, lambda examples: steps.map(lambda step: look_up(int(step), examples)))

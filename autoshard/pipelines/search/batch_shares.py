"""The batch shared out between pipelines of unlike speed: whole micro-batches, the greatest time as small as can be."""

import dataclasses
import math
from collections.abc import Sequence

from autoshard.errors import StageError

MOST_MICRO_BATCHES = 1 << 40
"""Of a pipeline that takes no time for each: as many as there are."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinearTime:
    """A way for a pipeline to take a share: M > 0 micro-batches of so many examples take `fixed_s + M each_s`."""

    micro_batch_size: int
    fixed_s: float
    each_s: float

    def time_s(self, num_micro_batches: int) -> float:
        """Time of so many micro-batches; without any, the pipeline is left out and takes none."""
        return self.fixed_s + num_micro_batches * self.each_s if num_micro_batches else 0.0

    def most_within(self, time_s: float) -> int:
        """The most micro-batches that take no more than `time_s`."""
        if self.fixed_s + self.each_s > time_s:
            return 0
        guess = int((time_s - self.fixed_s) / self.each_s) + 1 if self.each_s > 0 else MOST_MICRO_BATCHES
        while guess and self.time_s(guess) > time_s:
            guess -= 1
        return guess


@dataclasses.dataclass(frozen=True, slots=True)
class BatchShare:
    """What one pipeline takes: `num_micro_batches` of `micro_batch_size` examples; `time_model`: index of the way it
    goes.
    """

    time_model: int
    micro_batch_size: int
    num_micro_batches: int

    @property
    def num_examples(self) -> int:
        """Examples of one step."""
        return self.micro_batch_size * self.num_micro_batches


def best_batch_shares(batch_size: int, pipelines: Sequence[Sequence[LinearTime]]) -> tuple[BatchShare, ...]:
    """Shares out a batch so that the slowest pipeline is done as early as can be: exact.

    A time is possible if numbers of examples that the pipelines manage in it add up to the batch. What sums the first
    pipelines can make is a set of whole numbers, held as the bits of one; the least possible time is found by halving
    among all times that a pipeline could take.

    Args:
      batch_size: Examples of one step.
      pipelines: For each pipeline, the ways it could go; it takes one of them, or nothing.

    Returns:
      For each pipeline, its share.

    Raises:
      StageError: If no shares add up to the batch.
    """
    time_models = [p for row in set(map(tuple, pipelines)) for p in row]
    times = sorted({p.time_s(m) for p in time_models for m in range(1, batch_size // p.micro_batch_size + 1)})
    if not times or _reachable(batch_size, pipelines, times[-1]) is None:
        sizes = sorted({p.micro_batch_size for p in time_models})
        step = math.gcd(*sizes) if sizes else 1
        raise StageError(
            f"The shares of all pipelines must add up to the batch, in whole micro-batches; received a batch of "
            f"{batch_size} examples and micro-batches of {', '.join(map(str, sizes)) or 'no size'}. Choose a "
            f"batch that is a multiple of {step}, or allow other sizes of micro-batches."
        )
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if _reachable(batch_size, pipelines, times[middle]) is None:
            low = middle + 1
        else:
            high = middle
    sums = _reachable(batch_size, pipelines, times[low])
    assert sums is not None
    shares: list[BatchShare] = []
    rest = batch_size
    for row, before in zip(reversed(pipelines), reversed(sums), strict=True):
        found = _taken(row, before, rest, times[low])
        shares.append(found)
        rest -= found.num_examples
    return tuple(reversed(shares))


def _reachable(batch_size: int, pipelines: Sequence[Sequence[LinearTime]], time_s: float) -> list[int] | None:
    """Before each pipeline, the sums of examples that those before it can make in `time_s`, as bits; None if all of
    them together cannot make the batch.
    """
    mask = (1 << (batch_size + 1)) - 1
    sums, reached = [], 1
    for row in pipelines:
        sums.append(reached)
        wider = reached
        for time_model in row:
            most = min(time_model.most_within(time_s), batch_size // time_model.micro_batch_size)
            wider |= _with_multiples(reached, time_model.micro_batch_size, most) & mask
        reached = wider
    return sums if reached >> batch_size & 1 else None


def _with_multiples(bits: int, step: int, most: int) -> int:
    """The numbers of a set plus 0, 1, ..., `most` times `step`."""
    done = 0
    while done < most:
        more = min(done + 1, most - done)
        bits |= bits << (more * step)
        done += more
    return bits


def _taken(row: Sequence[LinearTime], before: int, rest: int, time_s: float) -> BatchShare:
    """A share that leaves a number that the pipelines before can make; the greatest, so that few are left with more."""
    for index, time_model in enumerate(row):
        most = min(time_model.most_within(time_s), rest // time_model.micro_batch_size)
        for number in range(most, 0, -1):
            if before >> (rest - number * time_model.micro_batch_size) & 1:
                return BatchShare(index, time_model.micro_batch_size, number)
    return BatchShare(0, row[0].micro_batch_size if row else 1, 0)

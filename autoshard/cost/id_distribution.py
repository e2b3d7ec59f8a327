"""How often which row of a table is looked up, and what follows for B look-ups: distinct rows, loads of owners.

With p_k the probability of the row of rank k = 1..R, and H the sum of all weights:

    p_k = k^-s / H                        Zipf of exponent s; s = 0: all rows alike
    distinct(B) = sum_k 1 - (1 - p_k)^B   the mean number of distinct rows among B look-ups

(Zipf, "Human Behavior and the Principle of Least Effort", 1949; occupied urns: Johnson and Kotz, "Urn Models and Their
Application", 1977, section 3.) Rows are either *ranked*, the most frequent first, as vocabularies are sorted by
frequency, or *hashed*, in no order. Split in N even blocks, the first block of ranked rows is the busiest; blocks of
hashed rows have distinct(B) / N each in the mean. The largest of M such counts has a mean of at most

    m + sqrt(2 m ln M) + ln M / 3

where m is the mean of the busiest (Boucheron, Lugosi, Massart, "Concentration Inequalities", 2013, corollary 2.6 with
v = m and c = 1/3, as for sums of independent events; occupied urns are negatively associated, so that the bound holds
for them too: Dubhashi and Ranjan, "Balls and Bins: A Study in Negative Dependence", 1998).

Sums over ranks are exact up to rank 1,024, and beyond it over blocks of ranks that grow by 1 %, each with the mean of
its weights.
"""

import dataclasses
import functools
import math

import numpy as np

_EXACT_RANKS = 1024
_GROWTH = 1.01


@dataclasses.dataclass(frozen=True, slots=True)
class IdDistribution:
    """How often each row of a table is looked up.

    Attributes:
      zipf_exponent: s above; 0 for rows that are all alike. `fitted` measures that of your data.
      is_ranked: Whether row 0 is the most frequent, row 1 the next, and so on; else they are in no order, as hashed.

    Raises:
      ValueError: The exponent is negative or not finite.
    """

    zipf_exponent: float = 0.0
    is_ranked: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.zipf_exponent) and self.zipf_exponent >= 0):
            raise ValueError(
                f"The exponent of a Zipf distribution of ids is a number of at least 0; received {self.zipf_exponent}. "
                "0 stands for ids that are all alike."
            )

    def expected_distinct(self, num_ids: float, num_rows: int) -> float:
        """The mean number of distinct rows among `num_ids` look-ups of a table of `num_rows`."""
        return self._distinct(num_ids, num_rows, num_rows)

    def hottest_share(self, num_hot: int, num_rows: int) -> float:
        """The share of all look-ups that go to the `num_hot` most frequent of `num_rows` rows: what a cache serves."""
        total, until = (float(self._weights(n).sum()) for n in (num_rows, min(num_hot, num_rows)))
        return until / total

    def busiest_owner(self, num_ids: float, num_rows: int, num_owners: int) -> float:
        """The mean number of distinct rows that `num_ids` look-ups ask of the busiest of `num_owners` even blocks."""
        if self.is_ranked:
            return self._distinct(num_ids, math.ceil(num_rows / num_owners), num_rows)
        return self._distinct(num_ids, num_rows, num_rows) / num_owners

    def largest_load(self, num_ids: float, num_rows: int, num_owners: int) -> float:
        """The mean, or a little more, of the largest number of distinct rows that one of `num_owners` devices asks of
        one of these as owners, each for its own `num_ids` look-ups; never more than there can be.
        """
        mean = self.busiest_owner(num_ids, num_rows, num_owners)
        # of ranked rows, hardly any but the first block competes
        logarithm = math.log(num_owners if self.is_ranked and self.zipf_exponent else num_owners**2)
        largest = mean + math.sqrt(2 * mean * logarithm) + logarithm / 3 if num_owners > 1 else mean
        return min(largest, num_ids, math.ceil(num_rows / num_owners))

    def _distinct(self, num_ids: float, num_first: int, num_rows: int) -> float:
        """The mean number of distinct rows among `num_ids` look-ups that are of the `num_first` first ranks."""
        probabilities = self._weights(num_first) / _counts(num_first) / self._weights(num_rows).sum()
        missed = np.exp(num_ids * np.log1p(-np.minimum(probabilities, 1 - 1e-15)))
        return float((_counts(num_first) * (1 - missed)).sum())

    def _weights(self, num_rows: int) -> np.ndarray:
        """The sums of k^-s over each block of ranks."""
        starts, counts = _starts(num_rows), _counts(num_rows)
        if not self.zipf_exponent:
            return counts
        # beyond the exact ranks, the midpoint rule for the integral from half a rank before to half a rank behind
        low, high, s = starts - 0.5, starts + counts - 0.5, self.zipf_exponent
        integral = np.log(high / low) if s == 1 else (high ** (1 - s) - low ** (1 - s)) / (1 - s)
        return np.where(counts == 1, starts**-s, integral)


@functools.lru_cache(maxsize=64)
def _starts(num_rows: int) -> np.ndarray:
    """The first rank of each block of ranks 1..`num_rows`."""
    exact = np.arange(1, min(num_rows, _EXACT_RANKS) + 1, dtype=np.float64)
    if num_rows <= _EXACT_RANKS:
        return exact
    steps = math.ceil(math.log(num_rows / _EXACT_RANKS) / math.log(_GROWTH))
    growing = np.unique(np.floor((_EXACT_RANKS + 1) * _GROWTH ** np.arange(steps)))
    return np.concatenate([exact, growing[growing <= num_rows]])


def _counts(num_rows: int) -> np.ndarray:
    """How many ranks each block has."""
    return np.diff(_starts(num_rows), append=num_rows + 1)


def fitted(ids: np.ndarray, num_rows: int) -> IdDistribution:
    """The distribution that gives as many distinct ids as a sample has, with rows ranked or hashed, whichever fits.

    Args:
      ids: Rows that were looked up, of any shape; the more, the better: some millions tell the exponent to 0.01.
      num_rows: The rows of the table.

    Raises:
      ValueError: There are no ids, or some are no rows of the table.
    """
    ids = np.asarray(ids).reshape(-1)
    if not ids.size or ids.min() < 0 or ids.max() >= num_rows:
        found = f"{ids.size} ids from {ids.min()} to {ids.max()}" if ids.size else "none"
        raise ValueError(
            f"A distribution is fitted to ids that are rows of the table, 0 to {num_rows - 1}; received {found}. "
            "Drop what stands for no id, and pass the table's number of rows."
        )
    distinct = len(np.unique(ids))
    low, high = 0.0, 8.0
    for _ in range(40):  # more skew, fewer distinct ids
        middle = (low + high) / 2
        if IdDistribution(middle).expected_distinct(ids.size, num_rows) > distinct:
            low = middle
        else:
            high = middle
    exponent = round(low, 3)
    first = float((ids < math.ceil(num_rows / 8)).mean())
    if_ranked = IdDistribution(exponent).hottest_share(math.ceil(num_rows / 8), num_rows)
    return IdDistribution(exponent, exponent > 0.1 and abs(first - if_ranked) < abs(first - 1 / 8))

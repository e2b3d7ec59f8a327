"""Speeds of single pairs of nodes or devices, as stated or measured, for hardware that no levels describe."""

import dataclasses
import math

from autoshard.cluster.checks import require_number, require_text
from autoshard.errors import ClusterError

Matrix = tuple[tuple[float, ...], ...]
"""A figure for each pair; the diagonal has no meaning and is 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class PairSpeeds:
    """How fast each unit, a node or a device, reaches each other one; both ways alike.

    Attributes:
      bandwidth_bytes_per_s: One-way bandwidth of one device, while all other devices of the two units are as busy.
      latency_s: Time of a message of no bytes.
      source: Where the figures come from.
    """

    bandwidth_bytes_per_s: Matrix
    latency_s: Matrix
    source: str

    def __post_init__(self) -> None:
        require_text("pairs", "source", self.source)
        count = len(self.bandwidth_bytes_per_s)
        for field, is_least in (("bandwidth_bytes_per_s", True), ("latency_s", False)):
            rows = getattr(self, field)
            if len(rows) != count or any(len(row) != count for row in rows):
                raise ClusterError(
                    f"pairs: {field} must have as many rows and columns as there are units; received {len(rows)} rows "
                    f"of {sorted({len(row) for row in rows})} where bandwidth_bytes_per_s has {count}."
                )
            checked = [
                [
                    0.0 if i == j else require_number(f"pairs[{i}][{j}]", field, x, zero_allowed=not is_least)
                    for j, x in enumerate(row)
                ]
                for i, row in enumerate(rows)
            ]
            worse = min if is_least else max
            both = tuple(tuple(worse(checked[i][j], checked[j][i]) for j in range(count)) for i in range(count))
            object.__setattr__(self, field, both)

    @property
    def num_units(self) -> int:
        """Number of nodes or devices."""
        return len(self.bandwidth_bytes_per_s)

    @property
    def slowest(self) -> tuple[float, float]:
        """(latency, bandwidth): the worst of any pair."""
        off = [(i, j) for i in range(self.num_units) for j in range(self.num_units) if i != j]
        return (
            max((self.latency_s[i][j] for i, j in off), default=0.0),
            min((self.bandwidth_bytes_per_s[i][j] for i, j in off), default=math.inf),
        )

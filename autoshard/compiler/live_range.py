"""The time for which a value occupies memory."""

import dataclasses

LARGE_BYTES = 2**23
"""From which size on, of all devices together, it matters enough how long a value is there to order or store anything
for it: a choice."""


@dataclasses.dataclass(frozen=True, slots=True)
class LiveRange:
    """A value, or a copy of it, occupies memory during `start <= t < stop` (operation indices)."""

    value: int
    start: int
    stop: int

"""The time for which a value occupies memory."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class LiveRange:
    """A value, or a copy of it, occupies memory during `start <= t < stop` (operation indices)."""

    value: int
    start: int
    stop: int

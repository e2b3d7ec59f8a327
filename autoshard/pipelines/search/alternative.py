"""What a search tells of the kinds of arrangements that it looked at."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Alternative:
    """A kind of arrangement that was looked at: its best time, or None and why there is none."""

    description: str
    step_s: float | None
    reason: str = ""

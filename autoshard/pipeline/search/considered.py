"""What a search tells of the forms of a step that it looked at."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Considered:
    """A form of the step that was looked at: its best time, or None and why there is none."""

    description: str
    step_s: float | None
    reason: str = ""

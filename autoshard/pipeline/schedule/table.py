"""A timeline as a table for a terminal: what each place does with its time and its memory."""

import math

from autoshard.pipeline.schedule.timeline import PlaceSummary, Timeline
from autoshard.printing import PAGE_WIDTH, TextConsole, amount, seconds, table


def timeline_text(timeline: Timeline, most: int = 32, width: int = PAGE_WIDTH) -> str:
    """One line for each place, in lines of `width`; of more than `most` places, only the first."""
    console = TextConsole(width)
    several = len({p.pipeline for p in timeline.places}) > 1
    columns = [("pipeline", "right")] if several else []
    columns += [("place", "left"), ("busy", "right"), ("idle", "right"), ("peak memory", "right"), ("limit", "right")]
    made = table(f"Step of {seconds(timeline.step_s)}, {timeline.origin}", [*columns, ("in flight", "right")])
    for place in timeline.places[:most]:
        made.add_row(*([str(place.pipeline)] if several else []), *_cells(place))
    console.print(made)
    if len(timeline.places) > most:
        console.print(f"and {len(timeline.places) - most} more places")
    return console.text


def _cells(place: PlaceSummary) -> tuple[str, ...]:
    is_over = place.peak_bytes > place.limit_bytes
    return (
        place.name,
        seconds(place.busy_s),
        f"{place.bubble_share:.1%}",
        amount(place.peak_bytes) + (" (over)" if is_over else ""),
        amount(place.limit_bytes) if math.isfinite(place.limit_bytes) else "unknown",
        str(place.most_in_flight),
    )

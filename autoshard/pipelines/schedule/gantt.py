"""What a picture of a timeline shows: for each submesh a row of coloured pieces, whatever draws them."""

import collections
import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence

from autoshard.pipelines.schedule.tasks import Phase
from autoshard.pipelines.schedule.timeline import GRADIENTS, UPDATE, WEIGHTS, Event, SubmeshSummary, Timeline
from autoshard.printing import seconds

_MOST_TASKS_OF_ROW = 420
_MOST_EVENTS = 12_000
"""Of more, tasks would be too thin to tell apart, or files large: then spans of time are summed up."""
_COLUMNS = 120
_MOST_ROWS = 96
_SAME = 0.02
"""Shares that differ by less look the same."""
_MOST_LANES = 3
_LONGEST_NAME = 26


class Colour(enum.Enum):
    """What a piece stands for, and the colour that says so.

    Colours that people with colour blindness can tell apart (Okabe and Ito, "Color Universal Design", 2008); forward,
    backward and weight tasks differ in brightness too.
    """

    FORWARD = "#0072b2"
    BACKWARD = "#e69f00"
    WEIGHT = "#009e73"
    UPDATE = "#d55e00"
    TRANSFER = "#cc79a7"
    COPY = "#56b4e9"


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """One rectangle of a row.

    Attributes:
      colour: What it stands for.
      start_s, stop_s: From left to right.
      low, high: From the bottom of its row or lane, 0, to the top, 1.
      fade: From 0, the full colour, towards 1, white: stages of one submesh differ in it.
      label: What to write into it if there is room. tip: What to say about it.
    """

    colour: Colour
    start_s: float
    stop_s: float
    low: float = 0.0
    high: float = 1.0
    fade: float = 0.0
    label: str = ""
    tip: str = ""

    @property
    def fill(self) -> str:
        """Its colour, as `#rrggbb`."""
        parts = (int(self.colour.value[i : i + 2], 16) for i in (1, 3, 5))
        return "#" + "".join(f"{round(p + (255 - p) * self.fade):02x}" for p in parts)

    @property
    def is_dark(self) -> bool:
        """Whether white text is read better on it than black text: by its luminance (ITU-R BT.601)."""
        red, green, blue = (int(self.fill[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue < 128


@dataclasses.dataclass(frozen=True, slots=True)
class GanttRow:
    """One submesh.

    Attributes:
      submesh: Its summary.
      work: What it computes; where there is nothing, it waits.
      lanes: Thin strips below: what it sends, and copies of weights and sums of gradients.
    """

    submesh: SubmeshSummary
    work: tuple[Bar, ...]
    lanes: tuple[tuple[Bar, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class GanttChart:
    """A whole picture.

    Attributes:
      rows: The first submeshes. num_left_out: How many more there are.
      is_summed: Whether pieces are shares of spans of time rather than events.
      step_s: What the whole width stands for. most_bytes: What the longest bar of memory stands for.
    """

    rows: tuple[GanttRow, ...]
    num_left_out: int
    is_summed: bool
    step_s: float
    most_bytes: float

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know to understand the picture, in sentences."""
        notes = []
        if self.is_summed:
            notes.append(
                "There are too many tasks to show each: the height of a colour is the share of time that goes into it."
            )
        elif any(p.fade for row in self.rows for p in row.work):
            notes.append("Numbers are micro-batches; paler tasks are those of later stages on the same submesh.")
        else:
            notes.append("Numbers are micro-batches.")
        if self.num_left_out:
            notes.append(f"{self.num_left_out} more submeshes are left out.")
        return tuple(notes)

    @property
    def colours(self) -> tuple[Colour, ...]:
        """Those that occur, in the order of a legend."""
        used = {p.colour for row in self.rows for part in (row.work, *row.lanes) for p in part}
        return tuple(c for c in Colour if c in used)


def gantt_chart(timeline: Timeline) -> GanttChart:
    """One row for each submesh, in the order of the summaries."""
    shown = timeline.submeshes[:_MOST_ROWS]
    num_submeshes = collections.Counter(p.pipeline for p in timeline.submeshes)
    num_stages = dict.fromkeys(num_submeshes, 0)
    by_submesh: dict[tuple[int, int], list[Event]] = {(p.pipeline, p.submesh): [] for p in shown}
    for event in timeline.events:
        num_stages[event.pipeline] = max(num_stages[event.pipeline], event.stage + 1)
        if (event.pipeline, event.submesh) in by_submesh:
            by_submesh[event.pipeline, event.submesh].append(event)
    is_summed = sum(map(len, by_submesh.values())) > _MOST_EVENTS or any(
        sum(e.is_work for e in events) > _MOST_TASKS_OF_ROW for events in by_submesh.values()
    )
    rows = []
    for summary in shown:
        events = by_submesh[summary.pipeline, summary.submesh]
        here, total = num_submeshes[summary.pipeline], num_stages[summary.pipeline]
        work = [_piece(e, here, total) for e in events if e.is_work]
        lanes = _lanes([_piece(e, here, total) for e in events if not e.is_work])
        if is_summed:
            work = _summed(work, timeline.step_s, 1)
            lanes = [_summed([p for lane in lanes for p in lane], timeline.step_s, len(lanes))] if lanes else []
        rows.append(GanttRow(summary, tuple(work), tuple(map(tuple, lanes))))
    known = [p.limit_bytes for p in shown if math.isfinite(p.limit_bytes)]
    most_bytes = max([p.peak_bytes for p in shown] + known, default=0.0) or 1.0
    return GanttChart(tuple(rows), len(timeline.submeshes) - len(shown), is_summed, timeline.step_s, most_bytes)


def ticks(step_s: float) -> tuple[float, ...]:
    """Round times, about ten of them, for the axis of a step."""
    if not step_s > 0:
        return (0.0,)
    unit = 10.0 ** math.floor(math.log10(step_s))
    apart_s = next(unit * part for part in (0.1, 0.2, 0.5, 1.0) if step_s / (unit * part) <= 12)
    return tuple(i * apart_s for i in range(int(step_s / apart_s * (1 + 1e-9)) + 1))


def meaning(colour: Colour) -> str:
    """What a colour stands for, in the words of a legend."""
    return {
        Colour.FORWARD: "forward",
        Colour.BACKWARD: "backward",
        Colour.WEIGHT: "gradients of weights",
        Colour.UPDATE: "optimizer's update",
        Colour.TRANSFER: "sent to another submesh",
        Colour.COPY: "copies of weights, sums of gradients",
    }[colour]


def short_name(name: str) -> str:
    """A submesh's name as far as there is room for it."""
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _piece(event: Event, num_submeshes: int, num_stages: int) -> Bar:
    span = f"{seconds(event.start_s)} to {seconds(event.stop_s)} ({seconds(event.stop_s - event.start_s)})"
    stage = f" of stage {event.stage}" if event.stage >= 0 else ""
    if event.to_submesh is not None:
        what = f"micro-batch {event.micro_batch} to submesh {event.to_submesh} for {event.name}"
        return Bar(Colour.TRANSFER, event.start_s, event.stop_s, tip=f"{what}\n{span}")
    if event.phase is None:
        what, colour = {
            UPDATE: ("optimizer's update", Colour.UPDATE),
            WEIGHTS: ("copies of weights", Colour.COPY),
            GRADIENTS: ("sums of gradients", Colour.COPY),
        }.get(event.name, (event.name, Colour.COPY))
        return Bar(colour, event.start_s, event.stop_s, tip=f"{what}{stage}\n{span}")
    colour = {Phase.FORWARD: Colour.FORWARD, Phase.BACKWARD: Colour.BACKWARD, Phase.WEIGHT: Colour.WEIGHT}[event.phase]
    per_submesh = -(-num_stages // num_submeshes)
    return Bar(
        colour,
        event.start_s,
        event.stop_s,
        fade=0.55 * (event.stage // num_submeshes) / (per_submesh - 1) if per_submesh > 1 else 0.0,
        label=str(event.micro_batch),
        tip=f"{event.phase.value} of micro-batch {event.micro_batch} on stage {event.stage}\n{span}",
    )


def _lanes(pieces: Sequence[Bar]) -> list[list[Bar]]:
    """Each piece in the first lane that is free; in the last one if there would be too many lanes."""
    lanes: list[list[Bar]] = []
    for piece in sorted(pieces, key=lambda p: p.start_s):
        free = next((lane for lane in lanes if lane[-1].stop_s <= piece.start_s), None)
        if free is not None:
            free.append(piece)
        elif len(lanes) < _MOST_LANES:
            lanes.append([piece])
        else:
            lanes[-1].append(piece)
    return lanes


def _summed(pieces: Iterable[Bar], step_s: float, most: int) -> list[Bar]:
    """Time cut into columns; in each, the share that each colour takes is its height. `most` pieces can overlap."""
    width_s = step_s / _COLUMNS or 1.0
    shares: list[dict[Colour, float]] = [{} for _ in range(_COLUMNS)]
    for piece in pieces:
        first = min(int(piece.start_s / width_s), _COLUMNS - 1)
        last = min(int(piece.stop_s / width_s), _COLUMNS - 1)
        for c in range(first, last + 1):
            inside_s = min(piece.stop_s, (c + 1) * width_s) - max(piece.start_s, c * width_s)
            if inside_s > 0:
                shares[c][piece.colour] = shares[c].get(piece.colour, 0.0) + inside_s / width_s / most
    found: list[Bar] = []
    open_ones: dict[Colour, Bar] = {}  # pieces that go on to the column before
    for c, column in enumerate(shares):
        low, going_on = 0.0, {}
        for colour in Colour:
            if colour not in column:
                continue
            high = min(1.0, low + column[colour])
            before = open_ones.get(colour)
            if before and abs(before.low - low) < _SAME and abs(before.high - high) < _SAME:
                going_on[colour] = dataclasses.replace(before, stop_s=(c + 1) * width_s)
            else:
                if before:
                    found.append(before)
                going_on[colour] = Bar(colour, c * width_s, (c + 1) * width_s, low, high)
            low = high
        found += [p for colour, p in open_ones.items() if colour not in column]
        open_ones = going_on
    return found + list(open_ones.values())

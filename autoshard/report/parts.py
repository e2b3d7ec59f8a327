"""What a page is made of: sections of paragraphs, tables, figures and panels, as data that the template lays out."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Paragraph:
    """A sentence or two; `is_warning` where the reader should act on it."""

    text: str
    is_warning: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """The first figures of a section, large: (what, how much, more about it)."""

    cards: tuple[tuple[str, str, str], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a caption.

    Attributes:
      columns: Their names; those in `numeric` are aligned to the right.
      emphasised: Numbers of rows that stand out.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    emphasised: frozenset[int] = frozenset()
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """A figure of Bokeh.

    Attributes:
      name: Distinct in the page.
      caption: What it shows, for those who see it and for those who do not.
      model: Bokeh's.
      legend: (what, colour), for what is drawn in colours.
    """

    name: str
    caption: str
    model: Any
    legend: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Devices:
    """Devices in their nodes, as a drawing: for each node its name and the coordinates of its devices."""

    caption: str
    nodes: tuple[tuple[str, tuple[str, ...]], ...]
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """A place that the page's script fills from the data of a program: `step`, `model` or `collectives`."""

    kind: str


Part = Paragraph | Figures | Table | Figure | Devices | Panel


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A part of the page with a heading.

    Attributes:
      name: Its place in the page's address. title: Its heading. lead: What it tells, in a sentence or two.
      program: The number of the program that it tells about; None where it tells about all.
    """

    name: str
    title: str
    lead: str
    parts: tuple[Part, ...]
    program: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A program that the page's script can show: its title, and its data as JSON (`program_view.py`)."""

    title: str
    data: str


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """A whole page."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    programs: tuple[Program, ...] = ()

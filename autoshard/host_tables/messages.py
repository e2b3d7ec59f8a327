"""What the pool tells its workers, and what they answer."""

import dataclasses
import pathlib

from autoshard.host_tables.sharding import Layout, Spans


@dataclasses.dataclass(frozen=True, slots=True)
class Begin:
    """The first message: what this worker owns.

    Attributes:
      layout: Of all. worker: Its number. memory: Descriptor of the shared memory.
      cpus: CPUs that it may use.
      most_bytes: Limit of its memory (RLIMIT_DATA); None for no other than it has.
    """

    layout: Layout
    worker: int
    memory: int
    cpus: tuple[int, ...] | None = None
    most_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Fill:
    """Sets own rows of an array; their bytes follow as a message of their own. array: Its number. first: The first."""

    number: int
    array: int
    first: int


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """Copies rows into a slot."""

    number: int
    slot: int
    spans: Spans


@dataclasses.dataclass(frozen=True, slots=True)
class Write:
    """Copies rows from a slot, but adds some to what is there. added: Which of the spans, from the start of each on."""

    number: int
    slot: int
    spans: Spans
    added: Spans


@dataclasses.dataclass(frozen=True, slots=True)
class Save:
    """Writes own rows to a folder."""

    number: int
    folder: pathlib.Path


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Reads own rows from a folder that so many workers have written."""

    number: int
    folder: pathlib.Path
    num_workers: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """Answers with own rows of an array, as bytes, from `first` to `stop`."""

    number: int
    array: int
    first: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """A message was obeyed. result: Of `Fetch`, bytes."""

    number: int
    result: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """A message could not be obeyed."""

    number: int
    why: str


Order = Fill | Read | Write | Save | Load | Fetch
"""Messages to a worker after the first; all are answered, in turn."""

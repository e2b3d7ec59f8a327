"""Buffers under all choices: what takes memory on a device, when, and how much of it under each choice."""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autoshard.graph.layout_columns import LayoutColumn


class BufferKind(enum.Enum):
    """What a buffer holds, and so what owns it."""

    VALUE = "value"  # owned by a value
    PARTIAL_SUM = "partial sum"  # owned by a group
    WORKSPACE = "workspace"  # owned by a group
    HOST_COPY = "host copy"  # of what lies in the memory of the host; owned by a value
    AROUND_HOST = "value on its way to the host or back"  # owned by a value
    OPERAND_COPY = "operand copy"  # owned by an operand's move: its position among them


_OF_VALUES = (BufferKind.VALUE, BufferKind.HOST_COPY, BufferKind.AROUND_HOST)


@dataclasses.dataclass(frozen=True, slots=True)
class BufferUse:
    """A buffer that is there during `start <= t < stop` (operation indices).

    Attributes:
      kind: What it holds. owner: Whose it is; see `BufferKind`.
      start, stop: When it is there; nothing if `start == stop`.
      size_bytes: On one device, 0 where there is none: [K] under each choice of what defines the value, or of the
        group; of an operand's copy as in `CopySizes`; of a value that may lie on the host meanwhile, for each layout,
        (if it stays, if it goes).
    """

    kind: BufferKind
    owner: int
    start: int
    stop: int
    size_bytes: np.ndarray

    @property
    def value(self) -> int | None:
        """The value that it holds; None for other buffers."""
        return self.owner if self.kind in _OF_VALUES else None


@dataclasses.dataclass(frozen=True, slots=True)
class GroupChoices:
    """What the choices of a group mean for memory; one object for groups alike.

    Attributes:
      reads: For each read of the group, its layouts.
      partial_bytes: [K] bytes of a partial result that waits for its reduce-scatter.
      workspace_bytes: [K] bytes of ids and rows that a look-up exchanges, or of what a region holds inside.
    """

    reads: tuple[LayoutColumn, ...]
    partial_bytes: np.ndarray
    workspace_bytes: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class HostChoices:
    """Under which choices an argument lies in the memory of the host, and when it is on the device then.

    Attributes:
      is_in_host: bool [K] for each choice of the argument.
      start, stop: When it, or its successor, is on the device, if it lies on the host (operation indices).
    """

    is_in_host: np.ndarray
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Choices:
    """What the choices of a whole program mean.

    Attributes:
      mesh_shape: The size of each mesh axis.
      layouts_of: The layouts of a value under the choices of what defines it; None for a constant.
      groups: Of each group.
      in_host: For values of arguments that may lie in the memory of the host, when they do.
    """

    mesh_shape: tuple[int, ...]
    layouts_of: Callable[[int], LayoutColumn | None]
    groups: Sequence[GroupChoices]
    in_host: Mapping[int, HostChoices] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class CopySizes:
    """Bytes of a resharded copy for each layout of the value and each in which it is read; 0 where nothing is moved.

    Attributes:
      size_bytes: Any copy. sent_bytes: Those that take a collective; a slice takes none.
    """

    size_bytes: np.ndarray
    sent_bytes: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class OperandRead:
    """One way in which a group reads a value.

    Attributes:
      group, read: It is `groups[group].reads[read]`.
      sizes: What a resharded copy takes.
      given_bytes: Of what a scan slices, what it is given (`scanned_inputs.py`), as in `CopySizes`; None of others.
    """

    group: int
    read: int
    sizes: CopySizes
    given_bytes: np.ndarray | None = None


def spans_of(uses: Sequence[BufferUse]) -> np.ndarray:
    """int64 [n, 2]: the first operation of each buffer, and the one after its last."""
    return np.array([(use.start, use.stop) for use in uses], np.int64).reshape(-1, 2)

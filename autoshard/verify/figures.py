"""The parts of a verification, as data: collectives and memory, predicted and compiled."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """The collectives of one kind over the same mesh axes: how often a step runs them, and what a device sends.

    The compiler joins collectives, so that it may run fewer for the same bytes.
    """

    kind: str
    axes: tuple[str, ...]
    predicted_count: float
    compiled_count: float
    predicted_bytes: float
    compiled_bytes: float


@dataclasses.dataclass(frozen=True, slots=True)
class Stray:
    """Collectives that only one side has.

    Attributes:
      predicted: Whether the plan has them and the program lacks them, or the reverse.
      kind, axes: What they are.
      tensor: What they move: an argument's path, or the operation that makes it.
      shape: Of that tensor: whole in the plan, one device's part in the program.
      source: The user's line; empty where the compiler does not tell.
      count: How often a step runs them. wire_bytes: What a device sends for all of them.
      only_sliced: Whether the program gathers it only to slice it again: a full rematerialisation.
      equations: Numbers of the planned program's equations that they serve, where that is known.
    """

    predicted: bool
    kind: str
    axes: tuple[str, ...]
    tensor: str
    shape: tuple[int, ...]
    source: str
    count: float
    wire_bytes: float
    only_sliced: bool = False
    equations: tuple[int, ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Rematerialisation:
    """A tensor that XLA's partitioner gathered whole on every device, because it knew no way between two layouts.

    Attributes:
      operation: In the compiled program, with its line if the compiler tells it.
      source: The user's line.
      shape: The tensor, as the compiler writes it.
      before, after: The shardings, as the compiler writes them.
    """

    operation: str
    source: str
    shape: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes on one device: of arguments, of all outputs, of those that take the place of arguments, of everything else,
    and the most in use at once.
    """

    argument_bytes: float
    output_bytes: float
    alias_bytes: float
    temporary_bytes: float
    peak_bytes: float

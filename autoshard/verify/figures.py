"""The parts of a verification, as data: collectives, memory and schedule, predicted and compiled."""

import dataclasses

from autoshard.execution.candidates import CandidateFigures


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
    and the most in use at once; and of arguments in the memory of the host, which are in none of the others.
    """

    argument_bytes: float
    output_bytes: float
    alias_bytes: float
    temporary_bytes: float
    peak_bytes: float
    host_bytes: float = 0.0


_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class StepTimes:
    """A step and its parts: kernels one after another, collectives beside them where that is possible.

    Attributes:
      step_s: kernel_s, exposed_s and host_s. kernel_s: Of all kernels. collective_s: Of all collectives.
      exposed_s: The part of collective_s that kernels wait for.
      host_s: What kernels wait for copies of state from and to the host.
    """

    step_s: float
    kernel_s: float
    collective_s: float
    exposed_s: float
    host_s: float = 0.0

    @property
    def hidden_s(self) -> float:
        """The part of collective_s that runs beside kernels; 0 for what is but the rounding of two sums."""
        beside_s = self.collective_s - self.exposed_s
        return beside_s if abs(beside_s) > _ROUNDING * self.collective_s else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class FlowTimes:
    """The collectives of one kind over the same mesh axes: their time in a step, and what of it kernels wait for."""

    kind: str
    axes: tuple[str, ...]
    predicted_s: float
    predicted_exposed_s: float
    compiled_s: float
    compiled_exposed_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledFlow:
    """Collectives of one kind over the same mesh axes that move the same tensor for the same line, as scheduled.

    Attributes:
      kind, axes, tensor, source: As of a `Stray`. count: How often a step runs them.
      time_s: Of all runs in a step. exposed_s: The part of it that kernels wait for.
    """

    kind: str
    axes: tuple[str, ...]
    tensor: str
    source: str
    count: float
    time_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        """The part of time_s that runs beside kernels."""
        return self.time_s - self.exposed_s


@dataclasses.dataclass(frozen=True, slots=True)
class BesideProducts:
    """Of the collectives of one kind in the compiled program, how many have a product between begin and end."""

    kind: str
    count: int
    beside: int


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleFigures:
    """The compiled schedule beside the prediction.

    Attributes:
      predicted: By the plan. compiled: Of the compiled schedule, replayed by the cost model; None where it cannot be.
      not_replayed: Why not.
      flow_times: Collectives by kind and axes, on both sides; flows: as scheduled, also by tensor and line. Those that
        are exposed most come first; empty where the schedule is not replayed.
      beside_products: By kind of collective.
      candidates: The ways in which the program was scheduled, and chosen: the fastest that fits the memory, which all
        other figures are of. Empty and None where the compiler was asked for one way only.
    """

    predicted: StepTimes
    compiled: StepTimes | None
    not_replayed: str
    flow_times: tuple[FlowTimes, ...]
    flows: tuple[ScheduledFlow, ...]
    beside_products: tuple[BesideProducts, ...]
    candidates: tuple[CandidateFigures, ...] = ()
    chosen: CandidateFigures | None = None

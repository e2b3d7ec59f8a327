"""What a plan is expected to cost, and where."""

import dataclasses

HOST_COPIES, RESIDUAL_COPIES = "host copies", "residual copies"
"""The kinds of a `CommunicationItem` that is no collective: state in the memory of the host on its way to the device
and back, and residuals on their way to the host and back."""


@dataclasses.dataclass(frozen=True, slots=True)
class CommunicationItem:
    """One predicted collective, or copies between a device and its host (`HOST_COPIES`, `RESIDUAL_COPIES`).

    Attributes:
      kind: XLA's name of it. axes: Mesh axes it runs over.
      value: The tensor it moves: an argument's path, or the operation that makes it. shape: Its global shape.
      source: The user's line.
      wire_bytes, time_s: Per device and call of the program, all trips together.
      count: How often it runs in one call.
      equation: Number of the equation that it serves; None on the way to an output.
      hidden_s: The part of its time that runs beside kernels.
    """

    kind: str
    axes: tuple[str, ...]
    value: str
    shape: tuple[int, ...]
    source: str
    wire_bytes: float
    time_s: float
    count: float
    equation: int | None = None
    hidden_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """The part of its time that kernels wait for."""
        return self.time_s - self.hidden_s

    @property
    def held_bytes(self) -> float:
        """Of what is copied to the host and back: what lies there at once."""
        return self.wire_bytes / 2 / self.count

    @property
    def is_collective(self) -> bool:
        """Whether it is between devices."""
        return self.kind not in (HOST_COPIES, RESIDUAL_COPIES)


@dataclasses.dataclass(frozen=True, slots=True)
class ComputeItem:
    """The local computation of one group of operations, per device and call of the program."""

    name: str
    equation: int
    source: str
    flops: float
    compute_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryItem:
    """One tensor alive at the peak: its name, class and bytes on one device."""

    name: str
    memory_class: str
    shape: tuple[int, ...]
    size_bytes: float


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted figures of one call of the planned program, each per device.

    Attributes:
      step_s: compute_s + comm_s - hidden_s. compute_s: Local computation.
      comm_s: Collectives, and copies between a device and its host.
      comm_bytes: Bytes each device sends to others. peak_bytes: Most memory alive at once.
      flops: Floating-point operations.
      peak_at: The line that runs at the memory peak.
      compute: Breakdown of compute_s by group of equations, largest first.
      communication: Breakdown of comm_s by collective, longest exposed first.
      memory: What is alive at the peak, largest first.
      reserved_bytes: What must be there for the program to run: peak_bytes and the gaps that stay between buffers with
        fixed places (`compiler/buffer_assignment.py`); None in a plan from a file that does not tell.
      hidden_s: The part of comm_s that runs beside kernels.
    """

    step_s: float
    compute_s: float
    comm_s: float
    comm_bytes: float
    peak_bytes: float
    flops: float
    peak_at: str
    compute: tuple[ComputeItem, ...]
    communication: tuple[CommunicationItem, ...]
    memory: tuple[MemoryItem, ...]
    reserved_bytes: float | None = None
    hidden_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """The time of collectives and host copies that kernels wait for."""
        return self.comm_s - self.hidden_s

    @property
    def collectives(self) -> tuple[CommunicationItem, ...]:
        """What is sent between devices."""
        return tuple([c for c in self.communication if c.is_collective])

    @property
    def host_copies(self) -> tuple[CommunicationItem, ...]:
        """What is copied between a device and its host."""
        return tuple([c for c in self.communication if not c.is_collective])

    @property
    def state_copies(self) -> tuple[CommunicationItem, ...]:
        """Of these, the copies of state."""
        return tuple([c for c in self.host_copies if c.kind == HOST_COPIES])

    @property
    def residual_copies(self) -> tuple[CommunicationItem, ...]:
        """Of these, the copies of residuals."""
        return tuple([c for c in self.host_copies if c.kind == RESIDUAL_COPIES])

    @property
    def host_exposed_s(self) -> float:
        """The time of host copies that kernels wait for."""
        return sum(c.exposed_s for c in self.host_copies)

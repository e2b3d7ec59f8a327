"""The parts of a difference between two plans, as data; `diff.py` finds them."""

import dataclasses
import json
from typing import ClassVar, Generic, Protocol, TypeVar


class Figures(Protocol):
    """What one of two plans is told by, of whatever kind it is."""

    @property
    def step_s(self) -> float: ...

    @property
    def peak_bytes(self) -> float: ...


F = TypeVar("F", bound=Figures)


@dataclasses.dataclass(frozen=True, slots=True)
class Difference(Generic[F]):
    """What differs between plan A and plan B; every figure is B less A.

    Attributes:
      a, b: Figures of the two plans.
    """

    FORMAT: ClassVar[str]
    """The name of the format of the JSON."""

    a: F
    b: F

    @property
    def step_s(self) -> float:
        """Step time of B less that of A."""
        return self.b.step_s - self.a.step_s

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest device of B less that of A."""
        return self.b.peak_bytes - self.a.peak_bytes

    def json(self) -> str:
        """Everything here as JSON."""
        document = dataclasses.asdict(self) | {"step_s": self.step_s, "peak_bytes": self.peak_bytes}
        return json.dumps({"format": self.FORMAT, "version": 2} | document, indent=2, ensure_ascii=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """The figures of one of the plans; see `ProgramPlan` and `Estimate`. Times in seconds a step, bytes a device.

    `choice` tells what layers keep for the backward pass, and chosen micro-batches. `order`: the device at each
    coordinate of the mesh; empty if they are in turn.
    """

    name: str
    cluster: str
    axes: tuple[tuple[str, int], ...]
    step_s: float
    compute_s: float
    comm_s: float
    comm_bytes: float
    peak_bytes: float
    budget_bytes: float | None
    choice: str
    order: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutChange:
    """Arguments or outputs that have another layout in B than in A.

    Attributes:
      path: Their path; `*` for numbers, `{mu,nu}` where several paths have the same change.
      count: How many they are. shape: Shape of each.
      before, after: Mesh axes on each dimension in A and in B; None where the plan has no such tensor.
      comm_s, comm_bytes: What is exposed and sent of the collectives that move these tensors in B, less that in A.
      memory_bytes: The same of their memory at the peak, resharded copies included.
    """

    path: str
    count: int
    shape: tuple[int, ...]
    before: str | None
    after: str | None
    comm_s: float
    comm_bytes: float
    memory_bytes: float


@dataclasses.dataclass(frozen=True, slots=True)
class CommunicationChange:
    """Collectives of tensors that have no layout change of their own.

    Attributes:
      tensor: The argument's path, or the operation that makes the tensor. source: The user's line.
      before, after: The collectives in A and in B, such as `48 all-gather data`; empty for none.
      comm_s, comm_bytes: What is exposed, and sent: B less A.
    """

    tensor: str
    source: str
    before: str
    after: str
    comm_s: float
    comm_bytes: float


@dataclasses.dataclass(frozen=True, slots=True)
class ComputeChange:
    """Computation that takes another time: operation, line, and B less A."""

    operation: str
    source: str
    compute_s: float
    flops: float


@dataclasses.dataclass(frozen=True, slots=True)
class OrderChange:
    """Orders of one kind, of tensors of one name and line, that A and B do not have equally often.

    Attributes:
      order: What is ordered or kept. tensor: The argument's path, or operand or result of which operation.
      source: The user's line.
      before, after: How many in A and in B.
    """

    order: str
    tensor: str
    source: str
    before: int
    after: int


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryChange:
    """Memory at the peak of tensors without a layout change of their own: class, tensor, and B less A."""

    memory_class: str
    tensor: str
    memory_bytes: float

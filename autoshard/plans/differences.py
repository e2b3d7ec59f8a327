"""The parts of a difference between two plans, as data; `diff.py` finds them, `diff_text.py` shows them."""

import dataclasses
import json


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """The figures of one of the two plans; see `Plan` and `Estimate`. Times in seconds a step, bytes a device."""

    name: str
    cluster: str
    axes: tuple[tuple[str, int], ...]
    step_s: float
    compute_s: float
    comm_s: float
    comm_bytes: float
    peak_bytes: float
    budget_bytes: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutChange:
    """Arguments or outputs that have another layout in B than in A.

    Attributes:
      path: Their path; `*` for numbers, `{mu,nu}` where several paths have the same change.
      count: How many they are. shape: Shape of each.
      before, after: Mesh axes on each dimension in A and in B; None where the plan has no such tensor.
      comm_s, comm_bytes: What the collectives that move these tensors take in B, less what they take in A.
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
      comm_s, comm_bytes: B less A.
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
class MemoryChange:
    """Memory at the peak of tensors without a layout change of their own: class, tensor, and B less A."""

    memory_class: str
    tensor: str
    memory_bytes: float


@dataclasses.dataclass(frozen=True, slots=True)
class PlanDiff:
    """What differs between plan A and plan B; every difference is B less A, largest first.

    Attributes:
      a, b: Figures of the two plans.
      is_same_program: Whether both were made for the same equations and arguments.
      inside: How many equations enforce other layouts inside the program; None where programs or meshes differ.
      layouts: Arguments and outputs with other layouts.
      communication: Collectives of other tensors. compute: Computation. memory: Other tensors at the peak.
      rest_s, rest_bytes: What of the differences of step time and peak the items of the estimates do not account for.
    """

    a: Side
    b: Side
    is_same_program: bool
    inside: int | None
    layouts: tuple[LayoutChange, ...]
    communication: tuple[CommunicationChange, ...]
    compute: tuple[ComputeChange, ...]
    memory: tuple[MemoryChange, ...]
    rest_s: float
    rest_bytes: float

    @property
    def is_empty(self) -> bool:
        """Whether the plans decide the same and cost the same."""
        return not (
            self.layouts
            or self.communication
            or self.compute
            or self.memory
            or self.inside
            or self.rest_s
            or self.rest_bytes
            or not self.is_same_program
            or dataclasses.replace(self.a, name=self.b.name) != self.b
        )

    @property
    def step_s(self) -> float:
        """Step time of B less that of A; the sum of all `comm_s` and `compute_s` here, and of `rest_s`."""
        return self.b.step_s - self.a.step_s

    @property
    def peak_bytes(self) -> float:
        """Peak memory of B less that of A; the sum of all `memory_bytes` here, and of `rest_bytes`."""
        return self.b.peak_bytes - self.a.peak_bytes

    def json(self) -> str:
        """Everything here as JSON."""
        document = dataclasses.asdict(self) | {"step_s": self.step_s, "peak_bytes": self.peak_bytes}
        return json.dumps({"format": "autoshard-diff", "version": 1} | document, indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        from autoshard.plans.diff_text import diff_text  # the one upward step: the text is made of this

        return diff_text(self)

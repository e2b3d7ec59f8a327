"""What a verification found: predictions beside what the compiler made of the plan, as data."""

import dataclasses
from pathlib import Path

import pydantic

from autoshard.errors import FileFormatError
from autoshard.files import read_json, write_text_atomically
from autoshard.printing import amount

BYTES_TOLERANCE = 0.05
"""Share of all bytes on the wire by which predicted and compiled traffic over the same mesh axes may differ."""
MEMORY_TOLERANCE = 0.03
"""Share of the predicted memory by which the compiled one may exceed it."""
NEGLIGIBLE = 0.001
"""Share of all bytes below which a collective over axes that were not predicted is told, but confirms nothing less."""


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


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """A plan beside the program that a compiler made of it for one kind of devices.

    Attributes:
      plan, cluster: Their names. target: The device type compiled for. axes: The mesh.
      flows: Collectives by kind and axes.
      strays: Those without a counterpart, those that send most first.
      rematerialised: XLA's fall-backs to gathering a whole tensor.
      predicted_memory, compiled_memory: Of one device.
      reserved_bytes: What must be there for the program to run, with the gaps that the compiler leaves.
      predicted_reserved_bytes: The same as the plan has it; None for a plan that does not tell.
      predicted_flops, compiled_flops: Of matrix products and convolutions, per device and step.
      estimated_cycles: What XLA:TPU expects the kernels to take; None elsewhere.
      compile_s: Seconds from the trace to the compiled program.
      jax_version: Which JAX, and XLA, it was.
    """

    plan: str
    cluster: str
    target: str
    axes: tuple[tuple[str, int], ...]
    flows: tuple[Flow, ...]
    strays: tuple[Stray, ...]
    rematerialised: tuple[Rematerialisation, ...]
    predicted_memory: MemoryFigures
    compiled_memory: MemoryFigures
    reserved_bytes: float
    predicted_flops: float
    compiled_flops: float
    estimated_cycles: float | None
    compile_s: float
    jax_version: str
    predicted_reserved_bytes: float | None = None

    @property
    def predicted_bytes(self) -> float:
        """Bytes that a device is predicted to send in a step."""
        return sum(f.predicted_bytes for f in self.flows)

    @property
    def compiled_bytes(self) -> float:
        """Bytes that a device sends in a step of the compiled program."""
        return sum(f.compiled_bytes for f in self.flows)

    @property
    def disagreements(self) -> tuple[str, ...]:
        """Where the two differ beyond tolerance, in words; empty if the prediction is confirmed."""
        found = []
        most = max(self.predicted_bytes, self.compiled_bytes)
        for axes in dict.fromkeys(f.axes for f in self.flows):
            flows = [f for f in self.flows if f.axes == axes]
            ours, theirs = sum(f.predicted_bytes for f in flows), sum(f.compiled_bytes for f in flows)
            if not ours and theirs > NEGLIGIBLE * most:
                found.append(
                    f"no collective over {_named(axes)} was predicted, and the program sends {amount(theirs)} there"
                )
            elif abs(ours - theirs) > BYTES_TOLERANCE * most:
                found.append(
                    f"over {_named(axes)}, {amount(ours)} were predicted, and the program sends {amount(theirs)}"
                )
        ours, theirs = self.predicted_memory.peak_bytes, self.compiled_memory.peak_bytes
        reserved = self.predicted_reserved_bytes
        if (self.tells_peak or reserved is None) and theirs > (1 + MEMORY_TOLERANCE) * ours:
            found.append(f"{amount(ours)} of memory were predicted, and the program needs {amount(theirs)}")
        if reserved is not None and self.reserved_bytes > (1 + MEMORY_TOLERANCE) * reserved:
            found.append(
                f"{amount(reserved)} of memory were predicted with the gaps between buffers, and the program reserves "
                f"{amount(self.reserved_bytes)}"
            )
        return tuple(found)

    @property
    def tells_peak(self) -> bool:
        """Whether the compiler tells the most in use at once, and not only what it reserves."""
        return self.compiled_memory.peak_bytes != self.reserved_bytes

    @property
    def is_confirmed(self) -> bool:
        """Whether the compiled program does what was predicted, within tolerance."""
        return not self.disagreements

    def __str__(self) -> str:
        from autoshard.verify.text import verification_text  # the one upward step: text formats Verifications

        return verification_text(self)


def _named(axes: tuple[str, ...]) -> str:
    return "+".join(axes) or "no axis"


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A target that the plan could not be verified for, and why."""

    target: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The outcomes of verifying one plan for several targets, in order."""

    outcomes: tuple[Verification | Failure, ...]

    @property
    def exit_status(self) -> int:
        """0 if all are confirmed, 1 if one disagrees, 2 if one could not be verified."""
        if any(isinstance(o, Failure) for o in self.outcomes):
            return 2
        return int(any(isinstance(o, Verification) and not o.is_confirmed for o in self.outcomes))

    def save(self, path: str | Path) -> None:
        """Writes JSON; the file appears whole or not at all."""
        document = _Document(
            format="autoshard-verification",
            version=1,
            verified=tuple(o for o in self.outcomes if isinstance(o, Verification)),
            failed=tuple(o for o in self.outcomes if isinstance(o, Failure)),
            disagreements=self._disagreements(),
            exit_status=self.exit_status,
        )
        write_text_atomically(path, document.model_dump_json(indent=1) + "\n")

    def _disagreements(self) -> dict[str, tuple[str, ...]]:
        """By target; where several plans were verified for one, by plan and target."""
        verified = [o for o in self.outcomes if isinstance(o, Verification)]
        are_alone = len({o.target for o in verified}) == len(verified)
        return {o.target if are_alone else f"{o.plan} for {o.target}": o.disagreements for o in verified}

    @classmethod
    def load(cls, path: str | Path) -> "Report":
        """Reads what `save` wrote: first the verifications, then the failures.

        Raises:
          FileFormatError: It is something else.
        """
        try:
            document = _Document.model_validate(read_json(path))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise FileFormatError(
                f"`{path}` is not the JSON of a verification: at `{'.'.join(map(str, first['loc']))}`: {first['msg']}. "
                "Verify again."
            ) from error
        return cls((*document.verified, *document.failed))


class _Document(pydantic.BaseModel):
    """The file: both kinds of outcomes, and what follows from them for readers that know no tolerances."""

    model_config = pydantic.ConfigDict(extra="forbid")
    format: str
    version: int
    verified: tuple[Verification, ...]
    failed: tuple[Failure, ...]
    disagreements: dict[str, tuple[str, ...]]
    exit_status: int

"""What a compiler made of a plan, as the plan tells it."""

import dataclasses

from autoshard.execution.candidates import CandidateFigures
from autoshard.printing import amount, seconds


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledOtherwise:
    """Collectives over the same mesh axes, for the same line, that the compiler made otherwise than predicted.

    Attributes:
      tensor: What they move. source: The user's line. axes: Mesh axes.
      predicted, compiled: Their kinds, joined by `+`; empty where one side has none.
      predicted_bytes, compiled_bytes: What a device sends for them in a step.
    """

    tensor: str
    source: str
    axes: tuple[str, ...]
    predicted: str
    compiled: str
    predicted_bytes: float
    compiled_bytes: float

    def __str__(self) -> str:
        side = lambda kinds, size_bytes: f"{kinds} of {amount(size_bytes)}" if kinds else "nothing"
        return (
            f"over {'+'.join(self.axes) or 'no axis'}, {self.tensor} at {self.source or 'an unknown line'}: "
            f"{side(self.predicted, self.predicted_bytes)} predicted, {side(self.compiled, self.compiled_bytes)} "
            "compiled"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayedMesh:
    """A mesh whose plan was compiled and replayed as well.

    Attributes:
      axes: (name, size) of its axes. step_s: What its plan predicts.
      fastest: The fastest way in which its program was scheduled.
    """

    axes: tuple[tuple[str, int], ...]
    step_s: float
    fastest: CandidateFigures

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.axes)
        return f"{axes}: {seconds(self.fastest.step_s)} simulated, {seconds(self.step_s)} predicted"


@dataclasses.dataclass(frozen=True, slots=True)
class Confirmation:
    """Whether a compiler does what a plan predicts, and within the memory (`PlanOptions.compile_check`).

    Attributes:
      compiler: Which, such as `XLA:GPU of jax 0.10.2`; empty if the plan was not compiled.
      is_confirmed: Whether it sends what was predicted, and reserves no more than the budget.
      reason: Why it is not confirmed; empty if it is.
      num_compilations: How many plans were compiled until this one was taken.
      solved_budget_bytes: The budget under which this plan was found, tightened by what earlier ones exceeded it; None
        for no limit.
      compiled_reserved_bytes: What the compiled program needs on a device, gaps between buffers included.
      predicted_sent_bytes, compiled_sent_bytes: What a device sends in a step.
      otherwise: Where the two differ.
      forbidden: The choices that were forbidden, since earlier plans with them were compiled otherwise.
      first_step_s: The predicted step of the plan before anything was corrected.
      candidates: The ways in which its program was scheduled; empty where there is one only.
      chosen: The fastest of them that fits the memory.
      meshes: The meshes whose plans were compiled and replayed, this one included; empty where there is one only.
    """

    compiler: str
    is_confirmed: bool
    reason: str = ""
    num_compilations: int = 0
    solved_budget_bytes: float | None = None
    compiled_reserved_bytes: float | None = None
    predicted_sent_bytes: float | None = None
    compiled_sent_bytes: float | None = None
    otherwise: tuple[CompiledOtherwise, ...] = ()
    forbidden: tuple[str, ...] = ()
    first_step_s: float | None = None
    candidates: tuple[CandidateFigures, ...] = ()
    chosen: CandidateFigures | None = None
    meshes: tuple[ReplayedMesh, ...] = ()

    def __str__(self) -> str:
        """One line on the outcome, then one for each collective that was compiled otherwise."""
        reserved, sent, predicted = self.compiled_reserved_bytes, self.compiled_sent_bytes, self.predicted_sent_bytes
        if reserved is None or sent is None or predicted is None:
            return f"not checked: {self.reason}"
        figures = f"{amount(reserved)} reserved per device, {amount(sent)} sent ({amount(predicted)} predicted)"
        plans = f"{self.num_compilations} plan{'s' * (self.num_compilations != 1)} compiled"
        head = f"confirmed by {self.compiler}: {figures}; {plans}"
        if not self.is_confirmed:
            head = f"not confirmed by {self.compiler}: {self.reason}; {figures}; {plans}"
        lines = [head, *map(str, self.otherwise)]
        if self.chosen is not None:
            others = "; ".join(str(c) for c in self.candidates if c != self.chosen)
            lines.append(f"scheduled for {self.chosen}" + (f" (not for {others})" if others else ""))
        if self.meshes:
            lines.append(f"the fastest by replay of {len(self.meshes)} meshes: {'; '.join(map(str, self.meshes))}")
        if self.forbidden:
            lines.append(f"forbidden, since compiled otherwise: {'; '.join(self.forbidden)}")
        return "\n".join(lines)

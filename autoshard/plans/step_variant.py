"""The forms that a training step can take without being another: what its layers recompute, and its micro-batches.

As data, and as a plan tells what was decided. Which may be tried is in
`autoshard/plans/variant_space.py`, which are in `variant_search.py`.
"""

import dataclasses

from autoshard.remat.policy import RematPolicy
from autoshard.remat.rewrite import rematerialised
from autoshard.train_step import TrainStep


@dataclasses.dataclass(frozen=True, slots=True)
class StepVariant:
    """A form of a training step.

    Attributes:
      policy: What its layers keep for the backward pass; None for what the step says itself.
      parts: Numbers of examples of the micro-batches that the batch is run in; None for what the step says itself.
    """

    policy: RematPolicy | None = None
    parts: tuple[int, ...] | None = None

    def of(self, step: TrainStep) -> TrainStep:
        """The step in this form."""
        step = step if self.parts is None else step.in_parts(self.parts)
        return step if self.policy is None else rematerialised(step, self.policy)

    @property
    def is_as_written(self) -> bool:
        """Whether the step is left as it is."""
        return self.policy is None and self.parts is None

    @property
    def num_micro_batches(self) -> int | None:
        """How many there are; None for what the step says itself."""
        return None if self.parts is None else len(self.parts)

    def __str__(self) -> str:
        kept = "as written" if self.policy is None else str(self.policy)
        return kept if self.parts is None else f"{kept}, in {len(self.parts)} micro-batches"


@dataclasses.dataclass(frozen=True, slots=True)
class VariantCandidate:
    """One form that was considered.

    Attributes:
      variant: What the layers keep, and how many micro-batches there are, in words.
      step_s: The step of the best plan found of it; None where its bound ruled it out, or nothing fits the memory.
      bound_s: No plan of it takes less, on the meshes that were searched for it; for one that was ruled out, not
        less than what it had to beat.
      needed_bytes: Memory per device of that plan, gaps included.
      verdict: What became of it.
    """

    variant: str
    step_s: float | None
    bound_s: float
    needed_bytes: float | None
    verdict: str


@dataclasses.dataclass(frozen=True, slots=True)
class VariantChoice:
    """The form of a step that was chosen, where it was searched (`PlanOptions.remat`, `PlanOptions.micro_batches`).

    Attributes:
      variant: The form.
      candidates: All that were considered, in the order in which they were.
      note: Why no more were, or none.
    """

    variant: StepVariant
    candidates: tuple[VariantCandidate, ...]
    note: str = ""

    def __str__(self) -> str:
        return str(self.variant)

"""What was decided on recomputation, as a plan tells it."""

import dataclasses

from autoshard.remat.policy import RematPolicy


@dataclasses.dataclass(frozen=True, slots=True)
class RematCandidate:
    """One policy that was considered.

    Attributes:
      policy: What the layers keep.
      step_s: The step of the best plan found with it; None where its bound ruled it out, or nothing fits the memory.
      bound_s: No plan with it takes less, on the meshes that were searched for it; for one that was ruled out, not
        less than what it had to beat.
      needed_bytes: Memory per device of that plan, gaps included.
      verdict: What became of it.
    """

    policy: str
    step_s: float | None
    bound_s: float
    needed_bytes: float | None
    verdict: str


@dataclasses.dataclass(frozen=True, slots=True)
class RematChoice:
    """What the layers of a step keep for the backward pass, where that was searched (`PlanOptions.remat`).

    Attributes:
      policy: What they keep; None for what the step says itself.
      candidates: All policies that were considered, in the order in which they were.
      note: Why no more were, or none.
    """

    policy: RematPolicy | None
    candidates: tuple[RematCandidate, ...]
    note: str = ""

    def __str__(self) -> str:
        return "as written" if self.policy is None else str(self.policy)

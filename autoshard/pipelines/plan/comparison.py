"""A plan in stages beside the other forms of the step that its search looked at: single slices, even shares, Whale's.

The search compares all of them by the costs of single layers, and so do these figures.
"""

import dataclasses
import json

from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.printing import PAGE_WIDTH, TextConsole, seconds, table

NAME = "autoshard"
"""The name of the form that the plan has."""


@dataclasses.dataclass(frozen=True, slots=True)
class StagedContender:
    """One form of the step.

    Attributes:
      name: What it is, such as `fast alone: 2 x 1 stage` or `a replica group on each slice: even shares`.
      step_s: Its step time; None where it was not found, or does not fit.
      relative_step: As a multiple of that of the plan.
      reason: Why there is no time; empty otherwise.
    """

    name: str
    step_s: float | None
    relative_step: float | None
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class StagedComparison:
    """A plan in stages beside other forms of the step.

    Attributes:
      title: What is compared. cluster: Name of the cluster. devices: Its parts, such as `8 x V100, 8 x P100`.
      batch_size: Examples of a step.
      bound_s: No form in the space of the search takes less, by the same costs; 0 if that is not known.
      contenders: The plan first, then the others, the fastest first.
    """

    title: str
    cluster: str
    devices: str
    batch_size: int
    bound_s: float
    contenders: tuple[StagedContender, ...]

    def json(self) -> str:
        """All figures as JSON; null for what is not known. Times are seconds a step."""
        document = {"format": "autoshard-staged-comparison", "version": 1, **dataclasses.asdict(self)}
        return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)

    def text(self, width: int = PAGE_WIDTH) -> str:
        """One line for each form."""
        rows = table("", [("form of the step", "left"), ("step", "right"), ("vs plan", "right"), ("", "left")])
        rows.title = None
        for c in self.contenders:
            told = "-" if c.step_s is None else seconds(c.step_s)
            relative = "-" if c.relative_step is None else f"{c.relative_step:.3g}x"
            rows.add_row(c.name, told, relative, c.reason)
        head = (
            f"{self.title} on cluster `{self.cluster}`: {self.devices}, {self.batch_size} examples a step; times by "
            "the costs of single layers"
        )
        console = TextConsole(width)
        for part in (head, rows, "", self.verdict):
            console.print(part)
        return console.text

    @property
    def verdict(self) -> str:
        """One sentence: how much the plan gains on the best other form."""
        own = self.contenders[0]
        best = next((c for c in self.contenders[1:] if c.step_s is not None), None)
        if own.step_s is None or best is None or best.step_s is None:
            return "The search found no other form of the step."
        proof = f"; no form in the space of the search is below {seconds(self.bound_s)}" if self.bound_s else ""
        saved = 1 - own.step_s / best.step_s if best.step_s else 0.0
        return (
            f"autoshard's plan takes {seconds(own.step_s)} a step, the best other form ({best.name}) "
            f"{seconds(best.step_s)}: {saved:.1%} less time{proof}."
        )

    def __str__(self) -> str:
        return self.text()


def compare_forms(plan: PipelinePlan, title: str) -> StagedComparison:
    """A plan beside what else was considered when it was searched for.

    Args:
      plan: The plan; one whose arrangement was given has nothing beside it. title: What is compared, for people.
    """
    own_s = plan.certificate.searched_s
    relative = lambda step_s: step_s / own_s if step_s is not None and own_s else None
    others = sorted(plan.considered, key=lambda c: (c.step_s is None, c.step_s or 0.0))
    is_own = next((c for c in others if c.step_s == own_s), None)
    name = NAME if is_own is None else f"{NAME} ({is_own.description})"
    contenders = [StagedContender(name, own_s, relative(own_s))]
    contenders += [
        StagedContender(c.description, c.step_s, relative(c.step_s), c.reason) for c in others if c is not is_own
    ]
    devices = ", ".join(f"{s.num_devices} x {s.device}" for s in plan.slices)
    return StagedComparison(title, plan.cluster, devices, plan.batch_size, plan.certificate.bound_s, tuple(contenders))

"""The price of memory as a curve: what a step takes at least with how much memory, and the plans that were found.

The prices p of memory that prove a plan's bound L at its budget B hold for every budget: a plan for C bytes takes at
least L - p (C - B), since the minimum that they bound does not depend on the budget (Everett, Operations Research 11,
1963; `solver.problem.CapacityPrice`). The greatest of several plans' lines is a convex curve below every plan.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from bokeh.models import Span

from autoshard.plans.program_plan import ProgramPlan
from autoshard.printing import amount, seconds
from autoshard.report.colours import BOUND, LIMIT, OTHERS, OWN
from autoshard.report.figures import axis_range, plain_figure, source_of
from autoshard.report.parts import Figure, Paragraph, Part, Table
from autoshard.report.units import byte_unit, time_unit

_POINTS = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Tangent:
    """No plan for C bytes takes less than `bound_s - s_per_byte (C - budget_bytes)`."""

    budget_bytes: float
    bound_s: float
    s_per_byte: float

    def at(self, memory_bytes: float) -> float:
        """The bound for another budget, in seconds."""
        return self.bound_s - self.s_per_byte * (memory_bytes - self.budget_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class PricedPlan:
    """A plan that was found: its name, what it needs on a device, its step, and whether it is the page's own."""

    name: str
    memory_bytes: float
    step_s: float
    is_own: bool = False


def tangent_of(plan: ProgramPlan) -> Tangent | None:
    """What the plan's certificate proves for other budgets; None where it has no prices."""
    price, budget_bytes = plan.certificate.capacity_price, plan.budget_bytes
    if price is None or budget_bytes is None or not math.isfinite(price.bound):
        return None
    return Tangent(budget_bytes, price.bound, price.per_unit)


def least_step_s(tangents: Sequence[Tangent], memory_bytes: float) -> float:
    """No plan for so much memory takes less: the greatest of the lines, at least 0."""
    return max([0.0, *(t.at(memory_bytes) for t in tangents)])


def memory_price_parts(plan: ProgramPlan, others: Sequence[tuple[str, ProgramPlan]], name: str) -> tuple[Part, ...]:
    """The curve with this plan and `others` of the same program for other budgets, by the names of their files."""
    tangents = [t for t in (tangent_of(p) for p in (plan, *(p for _, p in others))) if t is not None]
    needed = lambda p: p.estimate.reserved_bytes or p.estimate.peak_bytes
    found = [PricedPlan("this plan", needed(plan), plan.estimate.step_s, True)]
    found += [PricedPlan(path, needed(p), p.estimate.step_s) for path, p in others]
    if plan.choice is not None:
        found += [
            PricedPlan(f"layers keep {c.variant}", c.needed_bytes, c.step_s)
            for c in plan.choice.candidates
            if c.step_s is not None and c.needed_bytes is not None and c.variant != str(plan.choice)
        ]
    if plan.budget_bytes is None:
        return (Paragraph("Memory was not limited, so it has no price."),)
    parts: list[Part] = [Paragraph(_words(plan))]
    if any(t.s_per_byte for t in tangents) or len(found) > 1:
        parts.append(_figure(plan, tangents, found, name))
    if len(found) > 1:
        rows = tuple(
            (p.name, amount(p.memory_bytes), seconds(p.step_s), seconds(least_step_s(tangents, p.memory_bytes)))
            for p in sorted(found, key=lambda p: p.memory_bytes)
        )
        columns = ("plan", "memory", "step", "no plan below")
        parts.append(Table("Plans by memory", columns, rows, frozenset({1, 2, 3})))
    return tuple(parts)


def _words(plan: ProgramPlan) -> str:
    price = plan.certificate.capacity_price
    if price is None:
        return "No prices of memory were found with this plan, so it is not known what more of it would gain."
    if price.per_unit == 0:
        return "At this budget memory does not bind: to first order, more of it would gain nothing."
    return (
        f"At this budget one more GB per device would gain about {seconds(price.per_unit * 1e9)} a step, to first "
        "order. Below the line there is no plan, as the prices prove that found it."
    )


def _figure(plan: ProgramPlan, tangents: Sequence[Tangent], found: Sequence[PricedPlan], name: str) -> Figure:
    budgets = [t.budget_bytes for t in tangents]
    low = min([*(0.5 * b for b in budgets), *(0.9 * p.memory_bytes for p in found)])
    high = max([*(1.5 * b for b in budgets), *(1.1 * p.memory_bytes for p in found)])
    grid = np.linspace(low, high, _POINTS)
    corners = np.unique([*grid, *budgets])
    bound_s = [least_step_s(tangents, c) for c in corners]
    most_s = max([*bound_s, *(p.step_s for p in found)])
    time, memory = time_unit(most_s), byte_unit(high)
    made = plain_figure(280, x_range=axis_range(low / memory.size, high / memory.size))
    made.y_range = axis_range(0, 1.12 * most_s / time.size)
    line = source_of({"x": corners / memory.size, "y": np.array(bound_s) / time.size})
    if tangents:
        made.varea(x="x", y1=0, y2="y", fill_color=BOUND, fill_alpha=0.18, source=line)
        made.line(x="x", y="y", line_color=BOUND, line_width=2, source=line)
    for is_own, colour, size in ((False, OTHERS, 9), (True, OWN, 13)):
        shown = [p for p in found if p.is_own == is_own]
        made.scatter(
            [p.memory_bytes / memory.size for p in shown],
            [p.step_s / time.size for p in shown],
            color=colour,
            size=size,
        )
    made.add_layout(
        Span(
            location=(plan.budget_bytes or 0.0) / memory.size,
            dimension="height",
            line_color=LIMIT,
            line_width=2,
            line_dash="dashed",
        )
    )
    made.xaxis.axis_label = f"memory of a device [{memory.name}]"
    made.yaxis.axis_label = f"step [{time.name}]"
    legend = [("this plan", OWN), *[("no plan below", BOUND)] * bool(tangents), ("budget", LIMIT)]
    if len(found) > 1:
        legend.insert(1, ("other plans", OTHERS))
    return Figure(
        f"{name}-price", "Step time over memory: plans found, and what no plan can be below", made, tuple(legend)
    )

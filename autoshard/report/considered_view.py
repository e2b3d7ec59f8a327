"""What was considered and why it lost: meshes, policies of recomputation, close decisions, forms of a staged step."""

import math

from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.text import pattern
from autoshard.printing import amount, seconds
from autoshard.report.colours import OTHERS, OWN
from autoshard.report.figures import time_bars
from autoshard.report.parts import Figure, Paragraph, Part, Table

_MOST_BARS, _MOST_CLOSE = 16, 12


def _time(value_s: float | None) -> str:
    return "-" if value_s is None or not math.isfinite(value_s) else seconds(value_s)


def considered_parts(plan: ProgramPlan, name: str) -> tuple[Part, ...]:
    """Of a program: logical meshes, what layers keep, decisions that were nearly ties."""
    parts: list[Part] = []
    if len(plan.candidates) > 1:
        ranked = sorted(plan.candidates, key=lambda c: (c.step_s is None, c.step_s or 0.0, c.bound_s))
        meshes = [", ".join(f"{a}={n}" for a, n in c.axes) for c in ranked]
        own = {n for n, c in enumerate(ranked) if c.axes == plan.axes}
        timed = [(mesh, c.step_s, n in own) for n, (mesh, c) in enumerate(zip(meshes, ranked, strict=True)) if c.step_s]
        if len(timed) > 1:
            bars = [{"this plan" if is_own else "best found on the mesh": t} for _, t, is_own in timed[:_MOST_BARS]]
            colours = {"this plan": OWN, "best found on the mesh": OTHERS}
            model, legend = time_bars([mesh for mesh, _, _ in timed[:_MOST_BARS]], bars, colours)
            parts.append(
                Figure(f"{name}-meshes", "Step time of the best plan found on each logical mesh", model, legend)
            )
        rows = tuple(
            (mesh, _time(c.step_s), _time(c.bound_s), c.verdict) for mesh, c in zip(meshes, ranked, strict=True)
        )
        columns = ("mesh", "step", "no plan below", "verdict")
        parts.append(Table("Logical meshes", columns, rows, frozenset({1, 2}), frozenset(own)))
    if plan.choice is not None and plan.choice.candidates:
        rows = tuple(
            (
                c.variant,
                _time(c.step_s),
                _time(c.bound_s),
                amount(c.needed_bytes) if c.needed_bytes is not None else "-",
                c.verdict,
            )
            for c in plan.choice.candidates
        )
        chosen = frozenset(n for n, c in enumerate(plan.choice.candidates) if c.variant == str(plan.choice))
        columns = ("form", "step", "no plan below", "memory", "verdict")
        parts.append(
            Table(
                "Recomputation, micro-batches and stages", columns, rows, frozenset({1, 2, 3}), chosen, plan.choice.note
            )
        )
    if plan.close_choices and plan.estimate.step_s:
        kinds: dict[tuple[str, str, str], list[float]] = {}
        for c in plan.close_choices:
            kinds.setdefault((pattern(c.name), c.chosen, c.alternative), []).append(c.extra_s)
        rows = tuple(
            (path, chosen, other, f"+{seconds(extra[0])}", f"{extra[0] / plan.estimate.step_s:.2%}", str(len(extra)))
            for (path, chosen, other), extra in list(kinds.items())[:_MOST_CLOSE]
        )
        columns = ("tensor", "planned", "instead", "costs", "of step", "tensors")
        note = "Each changed alone, with all else as planned."
        if len(kinds) > _MOST_CLOSE:
            note += f" {len(kinds) - _MOST_CLOSE} more kinds are left out."
        parts.append(Table("Closest decisions", columns, rows, frozenset({3, 4, 5}), note=note))
    return tuple(parts) or (Paragraph("There was nothing to choose from: one mesh, and no decision that was close."),)


def considered_in_stages(plan: PipelinePlan) -> tuple[Part, ...]:
    """Of a plan in stages: the forms of the step that its search compared."""
    if not plan.considered:
        return (Paragraph("Nothing: the arrangement was given, not searched for."),)
    searched_s = plan.certificate.searched_s
    ranked = sorted(plan.considered, key=lambda c: (c.step_s is None, c.step_s or 0.0))
    own = frozenset(n for n, c in enumerate(ranked) if c.step_s == searched_s)
    timed = [(c.description, c.step_s, n in own) for n, c in enumerate(ranked) if c.step_s is not None]
    parts: list[Part] = []
    if len(timed) > 1:
        bars = [{"this plan" if is_own else "other form": t} for _, t, is_own in timed[:_MOST_BARS]]
        model, legend = time_bars(
            [text for text, _, _ in timed[:_MOST_BARS]], bars, {"this plan": OWN, "other form": OTHERS}
        )
        parts.append(
            Figure("forms", "Step time of each form of the step, by the costs of single layers", model, legend)
        )
    rows = tuple(
        (
            c.description,
            _time(c.step_s),
            f"{c.step_s / searched_s:.2f} x" if c.step_s is not None and searched_s else "-",
            c.reason,
        )
        for c in ranked
    )
    bound_s = plan.certificate.bound_s
    note = f"No arrangement in the space of the search takes less than {seconds(bound_s)}." if bound_s else ""
    columns = ("form of the step", "step", "of the plan's", "why not")
    parts.append(Table("Forms of the step", columns, rows, frozenset({1, 2}), own, note))
    return tuple(parts)

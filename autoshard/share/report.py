"""What is shown of decisions and simulations, as rows of text."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from autoshard.printing import duration
from autoshard.share.explain import Alternative, Explained
from autoshard.share.simulation.outcome import Figures
from autoshard.share.situation import Decision

FIGURE_COLUMNS = (
    "policy", "mean", "99th percentile", "makespan", "in use", "efficiency", "failed", "late", "moves", "a decision",
)  # fmt: skip
EXPLAINED_COLUMNS = ("job", "gets", "nodes", "steps/s", "ends in", "why", "next best")


def figure_rows(figures: Sequence[Figures]) -> tuple[Sequence[str], list[list[str]]]:
    """Columns and rows of a comparison of policies."""
    rows = [
        [
            own.policy,
            duration(own.mean_completion_s),
            duration(own.p99_completion_s),
            duration(own.makespan_s),
            f"{own.utilisation:.0%}",
            f"{own.efficiency:.0%}",
            str(own.num_failed),
            str(own.num_late),
            str(own.num_moves),
            f"{own.mean_decision_s * 1e3:.0f} ms",
        ]
        for own in figures
    ]
    return FIGURE_COLUMNS, rows


def explained_rows(explained: Sequence[Explained]) -> tuple[Sequence[str], list[list[str]]]:
    """Columns and rows of a decision. A rate that lies between two plans is marked with `~`."""
    rows = []
    for own in explained:
        mark = "~" if own.source is not None and own.source.value == "interpolated" else ""
        rows.append(
            [
                own.state.job.name,
                "-" if own.footprint is None else str(own.footprint),
                _ranges(own.nodes),
                "-" if own.footprint is None else f"{mark}{own.steps_per_s:.3g}",
                "-" if math.isinf(own.ends_in_s) else duration(own.ends_in_s),
                own.why,
                _next_best(own.alternative),
            ]
        )
    return EXPLAINED_COLUMNS, rows


def decision_line(decision: Decision, objective: str) -> str:
    """How good a decision provably is."""
    if decision.value is None or decision.bound is None or decision.gap is None:
        return "Nothing is proven of this decision."
    return (
        f"{objective}: value {decision.value:.4g}, none above {decision.bound:.4g} (gap {decision.gap:.2%}), "
        f"decided in {decision.decided_in_s:.2f} s"
    )


def decision_document(decision: Decision, explained: Sequence[Explained]) -> dict[str, Any]:
    """A decision as plain data."""
    return {
        "value": decision.value,
        "bound": decision.bound,
        "gap": decision.gap,
        "decided_in_s": decision.decided_in_s,
        "jobs": [
            {
                "name": own.state.job.name,
                "footprint": None if own.footprint is None else str(own.footprint),
                "nodes": list(own.nodes),
                "steps_per_s": own.steps_per_s,
                "source": None if own.source is None else own.source.value,
                "ends_in_s": None if math.isinf(own.ends_in_s) else own.ends_in_s,
                "why": own.why,
                "next_best": _next_best(own.alternative),
            }
            for own in explained
        ],
    }


def figures_document(figures: Sequence[Figures]) -> list[dict[str, Any]]:
    """A comparison as plain data."""
    return [dataclasses.asdict(own) for own in figures]


def _next_best(alternative: Alternative | None) -> str:
    if alternative is None:
        return ""
    what = "waits" if alternative.footprint is None else str(alternative.footprint)
    others = f", with {len(alternative.others)} other{'s' * (len(alternative.others) > 1)} changed"
    return f"{what}: {max(alternative.loss, 0.0):.1%} worse{others if alternative.others else ''}"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 6` for numbers in order."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)

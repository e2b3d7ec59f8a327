"""A comparison as a table for a terminal."""

import math
import textwrap

from autoshard.comparison.compare import Comparison, Contender
from autoshard.printing import PAGE_WIDTH, TextConsole, amount, seconds, table

COLUMNS = ("mesh", "step", "vs plan", "compute", "comm.", "sent", "memory", "fits", "gap")
"""What `cells` returns."""


def comparison_text(comparison: Comparison, width: int = PAGE_WIDTH) -> str:
    """One line a contender, as `ranked`; then the verdict, and in short why others have no plan that fits."""
    console = TextConsole(width)
    console.print(heading(comparison))
    rows = table("", [("strategy", "left"), ("mesh", "left"), *((name, "right") for name in COLUMNS[1:])])
    for contender in ranked(comparison):
        rows.add_row(contender.name, *cells(comparison, contender))
    console.print(rows)
    console.print()
    console.print(verdict(comparison))
    for contender in ranked(comparison):
        if contender.reason:
            console.print(f"{contender.name}: {textwrap.shorten(contender.reason, 180, placeholder=' ...')}")
    return console.text


def heading(comparison: Comparison) -> str:
    """What is compared, on which devices, under which limit."""
    limit = comparison.limit_bytes
    allowed = "without a memory limit" if limit is None else f"{amount(limit)} allowed on each"
    devices = f"{comparison.num_devices} x {comparison.device}"
    return f"{comparison.title} on cluster `{comparison.cluster}`: {devices}, {allowed}"


def ranked(comparison: Comparison) -> list[Contender]:
    """autoshard's own plan, then the strategies: those that fit before those that do not, and by step time."""

    def rank(c: Contender) -> tuple[bool, float]:
        return not c.fits, math.inf if c.plan is None else c.plan.estimate.step_s

    return [comparison.own, *sorted(comparison.contenders[1:], key=rank)]


def cells(comparison: Comparison, contender: Contender) -> tuple[str, ...]:
    """The figures of a contender as text."""
    plan = contender.plan
    if plan is None:
        return ("-",) * (len(COLUMNS) - 2) + ("no plan", "-")
    e, relative = plan.estimate, comparison.relative_step(contender)
    return (
        ", ".join(f"{name}={size}" for name, size in plan.axes),
        seconds(e.step_s),
        "-" if relative is None else f"{relative:.3g}x",
        seconds(e.compute_s),
        seconds(e.comm_s),
        amount(e.comm_bytes),
        amount(e.peak_bytes),
        "yes" if contender.fits else "no",
        f"{plan.certificate.gap:.2%}" if math.isfinite(plan.certificate.gap) else "-",
    )


def verdict(comparison: Comparison) -> str:
    """One sentence: how much autoshard's plan gains on the best strategy that fits."""
    own, best = comparison.own, comparison.best_other
    if not own.fits:
        return "No plan found fits the memory."
    if best is None:
        return "None of the strategies fits the memory; autoshard's plan does."
    saved = 1 - own.plan.estimate.step_s / best.plan.estimate.step_s if best.plan.estimate.step_s else 0.0
    bound = own.plan.certificate.bound
    proof = f"; no plan on its meshes is below {seconds(max(bound, 0.0))}" if math.isfinite(bound) else ""
    return (
        f"autoshard's plan takes {seconds(own.plan.estimate.step_s)} a step, the best strategy that fits "
        f"({best.name}) {seconds(best.plan.estimate.step_s)}: {saved:.1%} less time{proof}."
    )

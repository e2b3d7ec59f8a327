"""Which device is at which coordinate of a plan's mesh, why, and what crosses which level of the hardware, as text."""

from collections.abc import Sequence

from rich.console import Console

from autoshard.placement.level_bytes import level_bytes
from autoshard.plans.placing import flows_of
from autoshard.plans.program_plan import ProgramPlan
from autoshard.printing import amount, seconds, table

MOST_ROWS = 8
"""Rows of the mesh of which the devices are shown."""
_MOST_SHOWN = 16


def placement_line(plan: ProgramPlan) -> str:
    """What the order of the devices gains, in one line; empty where it was not sought."""
    p = plan.placement
    if p is None:
        return ""
    order = "devices in turn" if not plan.logical_mesh.order else "devices in an order of their own"
    gain = ""
    if p.listed_s is not None and p.listed_s > p.comm_s * (1 + 1e-6):
        gain = f" instead of {seconds(p.listed_s)} as listed ({p.comm_s / p.listed_s - 1:+.1%})"
    proof = "of all orders the best" if p.is_exact else f"no order below {seconds(p.bound_s)}"
    return f"{order}: collectives take {seconds(p.comm_s)}{gain}; {proof}"


def print_placement(console: Console, plan: ProgramPlan) -> None:
    """What crosses each level, and the devices along the last axis of the mesh."""
    mesh = plan.logical_mesh
    levels = level_bytes(flows_of(plan.estimate.communication, mesh), mesh.axes)
    if len({level.link.level for axis in mesh.axes for level in axis.levels}) > 1 and levels:
        rows = table(
            "What each device sends over each level of the hardware",
            [("level", "right"), ("sent", "right"), ("link", "right")],
        )
        for level in levels:
            rate = f"{amount(level.bandwidth_bytes_per_s)}/s"
            rows.add_row(str(level.level), amount(level.sent_bytes), rate)
        console.print(rows)
        console.print()
    if mesh.order:
        _print_order(console, plan)


def _print_order(console: Console, plan: ProgramPlan) -> None:
    mesh = plan.logical_mesh
    last = mesh.shape[-1]
    lines = [mesh.order[k : k + last] for k in range(0, len(mesh.order), last)]
    what = f"chips of the torus {'x'.join(map(str, mesh.torus))}" if mesh.torus else "devices of the cluster"
    console.print(f"Order of the {what}; a line for each group of `{mesh.axes[-1].name}`:")
    for line in lines[:MOST_ROWS]:
        console.print(f"  {_numbers(line)}")
    if lines[MOST_ROWS:]:
        console.print(f"  and {len(lines) - MOST_ROWS} more lines; `plan.logical_mesh.order` has all")
    console.print()


def _numbers(line: Sequence[int]) -> str:
    shown = " ".join(map(str, line[:_MOST_SHOWN]))
    return f"{shown} ..." if len(line) > _MOST_SHOWN else shown

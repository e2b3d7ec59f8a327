"""What lies in the memory of the hosts, as text: how much, and what bringing it to the devices takes."""

import collections
from collections.abc import Sequence

from rich.console import Console

from autoshard.planner.estimate import CommunicationItem
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.text import pattern
from autoshard.printing import amount, seconds, table


def host_line(plan: ProgramPlan) -> str:
    """One line: what lies on the hosts, over which link it goes, and what the step waits for it; empty for nothing."""
    e, link = plan.estimate, plan.logical_mesh.host_link
    if not e.host_copies or link is None:
        return ""
    copied_bytes = _copied_bytes(e.host_copies)
    parts = [(e.state_copies, "state"), (e.residual_copies, "residuals")]
    held = " and ".join(f"{amount(sum(c.held_bytes for c in copies))} of {what}" for copies, what in parts if copies)
    return (
        f"{held} per device in host memory: {amount(copied_bytes)} copied in and out a step at "
        f"{amount(link.bandwidth_bytes_per_s)}/s, {seconds(e.host_exposed_s)} exposed"
    )


def print_in_host(console: Console, plan: ProgramPlan, most: int) -> None:
    """Rows for what lies in host memory, the longest to copy first; nothing where nothing does."""
    e = plan.estimate
    _print_copies(console, "State in host memory, copied to the device for its update and back", e.state_copies, most)
    _print_copies(console, "Residuals in host memory between the passes", e.residual_copies, most)


def _print_copies(console: Console, title: str, copies: Sequence[CommunicationItem], most: int) -> None:
    """A row for each kind of tensor; nothing where there is none."""
    groups: dict[tuple[str, str], list[CommunicationItem]] = collections.defaultdict(list)
    for item in copies:
        groups[pattern(item.value), item.source].append(item)
    if not groups:
        return
    rows = table(
        title,
        [
            ("exposed", "right"),
            ("time", "right"),
            ("copied", "right"),
            ("n", "right"),
            ("tensor", "left"),
            ("line", "left"),
        ],
    )
    ranked = sorted(groups.items(), key=lambda group: -sum(c.time_s for c in group[1]))
    for (name, source), items in ranked[:most]:
        exposed_s, time_s = sum(c.exposed_s for c in items), sum(c.time_s for c in items)
        rows.add_row(seconds(exposed_s), seconds(time_s), amount(_copied_bytes(items)), str(len(items)), name, source)
    console.print(rows)
    if ranked[most:]:
        console.print(f"and {len(ranked) - most} more kinds")
    console.print()


def _copied_bytes(copies: Sequence[CommunicationItem]) -> float:
    return sum(c.wire_bytes for c in copies)

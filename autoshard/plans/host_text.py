"""State in the memory of the hosts, as text: how much lies there, and what bringing it to its update takes."""

import collections

from rich.console import Console

from autoshard.planner.estimate import CommunicationItem
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.text import pattern
from autoshard.printing import amount, seconds, table


def host_line(plan: ProgramPlan) -> str:
    """One line: what lies on the hosts, over which link it goes, and what the step waits for it; empty for nothing."""
    copies, link = plan.estimate.host_copies, plan.logical_mesh.host_link
    if not copies or link is None:
        return ""
    copied_bytes, time_s = sum(c.wire_bytes for c in copies), sum(c.time_s for c in copies)
    return (
        f"{amount(copied_bytes / 2)} of state per device in host memory: {amount(copied_bytes)} copied in and out a "
        f"step at {amount(link.bandwidth_bytes_per_s)}/s, {seconds(time_s)} exposed"
    )


def print_host_state(console: Console, plan: ProgramPlan, most: int) -> None:
    """A row for each kind of state in host memory, the longest to copy first; nothing where there is none."""
    groups: dict[str, list[CommunicationItem]] = collections.defaultdict(list)
    for item in plan.estimate.host_copies:
        groups[pattern(item.value)].append(item)
    if not groups:
        return
    rows = table(
        "State in host memory, copied to the device for its update and back",
        [("time", "right"), ("copied", "right"), ("n", "right"), ("tensor", "left"), ("line", "left")],
    )
    ranked = sorted(groups.items(), key=lambda group: -sum(c.time_s for c in group[1]))
    for name, items in ranked[:most]:
        time_s, copied_bytes = sum(c.time_s for c in items), sum(c.wire_bytes for c in items)
        rows.add_row(seconds(time_s), amount(copied_bytes), str(len(items)), name, items[0].source)
    console.print(rows)
    if ranked[most:]:
        console.print(f"and {len(ranked) - most} more kinds")
    console.print()

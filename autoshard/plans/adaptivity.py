r"""How much slowdown of one device a plan can absorb by moving units between devices, and what memory that takes.

Along an axis with T ranks, each rank computes C seconds a step, of which M on units that can move. If one rank is s
times slower and gives units away until all end together, the others get a share x more, $x \le$ their free places:

$$C + xM = s\,(C - \min(1, (T-1)\,x)\,M)$$

and the step takes what that is, beside collectives; without moves it takes $sC$.
"""

import dataclasses
import math
from collections.abc import Sequence

from autoshard.balance.options import Balance
from autoshard.balance.places import Room
from autoshard.graph.graph import Graph
from autoshard.plans.balanced import platform_of, rooms_for, units_of
from autoshard.plans.movable_work import busiest_axis, island_seconds
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.slack import Slack

OFTEN = 0.1
"""Of how many steps an adaptive plan assumes that one device is slow in them, by `SLOWDOWN`."""
SLOWDOWN = 2.0


def slack_of(plan: ProgramPlan, graph: Graph, balance: Balance | None = None) -> Slack | None:
    """What moving units can even out in a plan; None if nothing can move.

    Args:
      plan: The plan. graph: Its program.
      balance: What the places are for; None for the usual.
    """
    dims = units_of(plan, graph)
    if not dims.found:
        return None
    rooms = rooms_for(dims, balance or Balance(mode="migrate"), platform_of(plan))
    own_s = island_seconds(plan, graph, dims)
    axis, movable_s = busiest_axis(dims.found, own_s)
    if not movable_s:
        return None
    own = [room for room in rooms if room.unit.axis == axis]
    free = sum(own_s[r.unit.index] * (r.capacity * r.unit.ways / r.unit.size - 1) for r in own) / movable_s
    return Slack(
        axis,
        own[0].unit.ways,
        plan.estimate.compute_s,
        min(movable_s, plan.estimate.compute_s),
        plan.estimate.exposed_s,
        free,
        _places_bytes(plan, graph, own),
    )


def _places_bytes(plan: ProgramPlan, graph: Graph, rooms: Sequence[Room]) -> float:
    """What the free places take of a device's memory at the peak, while shares are uneven."""
    more = {graph.values[t.value].name: room.places / room.unit.size - 1 for room in rooms for t in room.unit.tensors}
    return sum(item.size_bytes * more.get(item.name, 0.0) for item in plan.estimate.memory)


def expected_s(plan: ProgramPlan, slack: Slack | None) -> float:
    """The step of a plan on average, if one device is `SLOWDOWN` times slower in a share `OFTEN` of all steps."""
    healthy = plan.estimate.compute_s + plan.estimate.exposed_s
    if slack is None:
        slow = SLOWDOWN * plan.estimate.compute_s + plan.estimate.exposed_s
    else:
        slow = slack.step_s(SLOWDOWN)
    return math.fsum(((1 - OFTEN) * healthy, OFTEN * slow))


def with_slack(plan: ProgramPlan, slack: Slack | None) -> ProgramPlan:
    """The plan, telling what it can even out."""
    if slack is not None:
        return dataclasses.replace(plan, slack=slack)
    warning = (
        "adaptive: nothing in this plan can move between devices, and no plan in which something can is better on "
        "average; plan.jit(step, balance=...) says why of this one."
    )
    return dataclasses.replace(plan, warnings=(*plan.warnings, warning))

"""From a situation to a decision: formulated, solved, and no device left idle that somebody waits for."""

import time
from collections.abc import Sequence

from autoshard.share.allocation.build import allowed_rates, formulate
from autoshard.share.allocation.cp_sat import SolveLimits, solve_allocation
from autoshard.share.allocation.job_values import JobValues, job_values
from autoshard.share.allocation.objective import DecisionRules
from autoshard.share.pool import FreeDevices, Placement
from autoshard.share.situation import Decision, Situation


def decide(situation: Situation, rules: DecisionRules, limits: SolveLimits) -> Decision:
    """Who runs where from now on.

    Raises:
        ShareError: jobs that may not be stopped do not fit, or no decision was found in time.
    """
    started_s = time.perf_counter()
    if not situation.jobs:
        return Decision({}, 0.0, 0.0)
    values = job_values(situation, rules)
    problem = formulate(situation, rules, values)
    solution = solve_allocation(problem, limits, started_s)
    placements = {
        job.name: placement
        for job, placement in zip(problem.jobs, solution.placements, strict=True)
        if placement is not None
    }
    started = _started_on_idle(situation, values, placements)
    return Decision({**placements, **started}, solution.value, solution.bound, time.perf_counter() - started_s)


def _started_on_idle(
    situation: Situation, every: Sequence[JobValues], placements: dict[str, Placement]
) -> dict[str, Placement]:
    """Jobs that would wait and fit on devices that nobody has: the most valuable first, each at its best size there.

    The optimum for now leaves none; a plan over a horizon may prefer to wait, and a search that ends early may miss
    one.
    """
    free = FreeDevices(situation.nodes, placements.values())
    waiting = [
        (values, allowed_rates(values.state, situation.nodes))
        for values in every
        if values.state.job.name not in placements
    ]
    found: dict[str, Placement] = {}
    for values, rates in sorted(waiting, key=lambda one: -one[0].price):
        for rate in sorted(rates, key=lambda own: -values.move(own).value):
            if (placement := free.place(rate.footprint)) is not None:
                free.take(placement)
                found[values.state.job.name] = placement
                break
    return found

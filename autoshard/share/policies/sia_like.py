"""A policy after Sia (Jayaram Subramanya et al., "Sia: Heterogeneity-aware, goodput-optimized ML-cluster scheduling",
SOSP 2023), for comparison.

What is taken over: rounds of 60 s; sizes that are powers of two within a node, or whole nodes; rates divided by each
job's least rate; the restart factor (age - moves * S) / (age + S) on every choice but staying, with S the time of a
move; sizes that at most double from round to round, beginning with the least; the objective

    minimise  sum_j [ sum_c x[j,c] (r[j,c] G[j,c])^p  +  lambda (1 - sum_c x[j,c]) ]     with p = -0.5, lambda = 1.1,

its published defaults. What is not: Sia adapts batch sizes to the statistical efficiency that it measures, where our
jobs keep their batch, so that goodput is throughput; and it learns throughputs, where ours are given to all policies.
It does not know how much work is left. Placement, which Sia settles after the sizes, evicting jobs where they do not
fit, is here part of the same program, which can only help it.
"""

import dataclasses

from autoshard.share.allocation.build import allowed_rates, kept_placement
from autoshard.share.allocation.cp_sat import SolveLimits, solve_allocation
from autoshard.share.allocation.problem import AllocationProblem, Choice, JobChoices
from autoshard.share.pool import Node
from autoshard.share.situation import Decision, JobState, Situation


@dataclasses.dataclass(frozen=True, slots=True)
class SiaLike:
    """Decides as described above.

    Attributes:
        exponent: p.
        waiting_price: lambda.
        limits: of each search.
    """

    exponent: float = -0.5
    waiting_price: float = 1.1
    limits: SolveLimits = SolveLimits()
    name: str = "sia-like"
    round_s: float = 60.0

    def decide(self, situation: Situation) -> Decision:
        """Solves a round."""
        if not situation.jobs:
            return Decision({})
        jobs = tuple(
            JobChoices(
                state.job.name,
                self._choices(state, situation.nodes, situation.now_s),
                kept_placement(state, situation.nodes),
            )
            for state in situation.jobs
        )
        problem = AllocationProblem(situation.nodes, jobs)
        solution = solve_allocation(problem, self.limits)
        placed = zip(jobs, solution.placements, strict=True)
        placements = {job.name: placement for job, placement in placed if placement is not None}
        return Decision(placements, solution.value, solution.bound, solution.solved_in_s)

    def _choices(self, state: JobState, nodes: tuple[Node, ...], now_s: float) -> tuple[Choice, ...]:
        entries = state.job.rates.entries
        least = min(rate.steps_per_s for rate in entries)
        placement = kept_placement(state, nodes)
        may_stop = placement is None or state.job.is_preemptible
        choices = [Choice(None, 0.0)] if may_stop else []
        if placement is not None:
            choices.append(Choice(placement.footprint, self._value(state.rate / least), is_kept=True))
            if not state.job.is_elastic and not state.job.is_preemptible:
                return tuple(choices)
        size = min(r.footprint.num_devices for r in entries)
        most = max(2 * placement.footprint.num_devices, size) if placement is not None else size
        factor = self._restart_factor(state, now_s)
        for rate in allowed_rates(state, nodes):
            if rate.footprint.num_devices <= most or not state.job.is_elastic:
                choices.append(Choice(rate.footprint, self._value(factor * rate.steps_per_s / least)))
        return tuple(choices)

    def _value(self, goodput: float) -> float:
        """What a choice saves over waiting."""
        return self.waiting_price - goodput**self.exponent

    def _restart_factor(self, state: JobState, now_s: float) -> float:
        """1 for a job that does not run: it restarts anyway."""
        if state.placement is None:
            return 1.0
        age_s, move_s = now_s - state.job.arrival_s, state.job.move_s
        return max((age_s - state.num_moves * move_s) / (age_s + move_s), 1e-3)

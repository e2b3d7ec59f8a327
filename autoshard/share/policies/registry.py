"""The policies by name."""

from autoshard.errors import ShareError
from autoshard.share.allocation.cp_sat import SolveLimits
from autoshard.share.allocation.objective import DecisionRules
from autoshard.share.policies.optimal import Optimal
from autoshard.share.policies.policy import Policy
from autoshard.share.policies.queues import FifoBackfill, ShortestJobFirst
from autoshard.share.policies.sia_like import SiaLike

POLICIES = ("autoshard", "fifo", "sjf", "rigid", "sia-like")


def make_policy(name: str, rules: DecisionRules, limits: SolveLimits) -> Policy:
    """A policy by its name.

    Raises:
        ShareError: there is none of that name.
    """
    if name not in POLICIES:
        raise ShareError(f"Policies are {', '.join(POLICIES)}; received {name!r:.40}. Name one of them.")
    if name in ("autoshard", "rigid"):
        return Optimal(rules, limits, is_rigid=name == "rigid")
    if name == "sia-like":
        return SiaLike(limits=limits)
    return FifoBackfill() if name == "fifo" else ShortestJobFirst()

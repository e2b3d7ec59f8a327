"""Sharding rules: how the dimensions of one leaf equation's operands and results are tied by factors.

`rule_of` asks autoshard's own table (one small function a family of primitives) first, then Shardy, the partitioner
that will execute the plan; what neither knows stays whole.
"""

from jax.extend import core

from autoshard.graph.graph import FactorRule
from autoshard.trace.rules.leaf import leaf_of
from autoshard.trace.rules.shardy import shardy_rule
from autoshard.trace.rules.signature import signature_of
from autoshard.trace.rules.table import table_rule

__all__ = ["rule_of", "signature_of"]


def rule_of(eqn: core.JaxprEqn) -> FactorRule:
    """States how an equation can be split with no communication but one reduction of partial results.

    Args:
      eqn: A leaf equation, i.e. none that calls another jaxpr of the program (`jit`, `scan`, `cond`, ...).

    Returns:
      The rule; `origin` tells whether it comes from the table, from Shardy, or is `replicated` because neither knows
      the primitive. Remember it under `signature_of(eqn)`: asking Shardy takes about 10 ms.
    """
    rule = table_rule(leaf_of(eqn))
    return shardy_rule(eqn) if rule is None else rule

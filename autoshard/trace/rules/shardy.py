"""Rules read from Shardy, XLA's partitioner, for primitives that the table does not know."""

from jax.extend import core

from autoshard.graph.graph import FactorRule
from autoshard.trace.rules.iteration_space import REPLICATED, IterationSpace, whole
from autoshard.trace.rules.operation import operation_of


def replicated_rule(eqn: core.JaxprEqn) -> FactorRule:
    """The rule of an equation of which nothing is known: all of it stays whole."""
    operation = operation_of(eqn)
    return IterationSpace().close(
        tuple(whole(operand.shape) for operand in operation.operands),
        tuple(whole(result.shape) for result in operation.results),
        is_heavy=True,
        origin=REPLICATED,
    )


def shardy_rule(eqn: core.JaxprEqn) -> FactorRule:
    """Placeholder until the partitioner is asked."""
    return replicated_rule(eqn)

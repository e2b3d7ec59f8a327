"""When two equations have the same rule: same primitive, parameters, shapes and element types."""

from collections.abc import Hashable
from typing import Any

from jax.extend import core

from autoshard.trace.rules.leaf import leaf_of


def _stable(value: Any) -> Any:
    """A parameter as something that compares by content; a jaxpr is known by its text."""
    if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
        return str(value)
    if isinstance(value, dict):
        return tuple((key, _stable(item)) for key, item in sorted(value.items(), key=lambda pair: str(pair[0])))
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return tuple(_stable(item) for item in value)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def signature_of(eqn: core.JaxprEqn) -> Hashable:
    """A key under which the rule of an equation can be remembered.

    Args:
      eqn: A leaf equation.

    Returns:
      A hashable value; equations for which it is equal have the same rule.
    """
    leaf = leaf_of(eqn)
    params = tuple((name, _stable(leaf.params[name])) for name in sorted(leaf.params))
    return (leaf.name, params, leaf.operands, leaf.results)

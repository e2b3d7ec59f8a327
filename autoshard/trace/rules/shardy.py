"""Rules read from Shardy, XLA's partitioner, for primitives that the table does not know.

The equation is lowered alone to StableHLO, Shardy annotates every operation of the module with its rule, and
`composition` joins these.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.extend.mlir import ir, passmanager

from autoshard.graph.graph import FactorRule
from autoshard.trace.rules.composition import compose
from autoshard.trace.rules.leaf import leaf_of
from autoshard.trace.rules.rigid import replicated

_ANNOTATE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"


def function_of(eqn: core.JaxprEqn) -> tuple[Callable[..., list[jax.Array]], list[jax.ShapeDtypeStruct]]:
    """Turns an equation into a function of its own.

    Args:
      eqn: Any equation whose operands are arrays.

    Returns:
      A function from all operands (literals too) to the list of results, and the types of the operands.
    """
    new_var = core.gensym()
    invars: list[Any] = [new_var(var.aval) for var in eqn.invars]
    source = core.DebugInfo("jit", str(eqn.primitive), ("",) * len(invars), ("",) * len(eqn.outvars))
    alone = core.Jaxpr((), invars, eqn.outvars, [eqn.replace(invars=invars)], eqn.effects, source)
    operands = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in invars]
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, ())), operands


def annotated_module(eqn: core.JaxprEqn) -> ir.Module:
    """Lowers one equation and lets Shardy annotate every operation with its rule.

    Args:
      eqn: Any equation whose operands are arrays.

    Returns:
      A StableHLO module; its operations carry the attribute `sdy.sharding_rule`.

    Raises:
      Exception: Whatever JAX or Shardy raises for an equation that it cannot lower.
    """
    function, operands = function_of(eqn)
    module: Any = jax.jit(function, keep_unused=True).lower(*operands).compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse(_ANNOTATE).run(module.operation)
    return module


def shardy_rule(eqn: core.JaxprEqn) -> FactorRule:
    """Asks Shardy.

    Args:
      eqn: A leaf equation.

    Returns:
      The rule with the origin `shardy`, or with the origin `replicated` (all dimensions whole) if the equation cannot
      be lowered alone or Shardy knows nothing of it. Never raises: the tracer reports replicated equations.
    """
    leaf = leaf_of(eqn)
    try:
        module = annotated_module(eqn)
        with module.context:
            rule = compose(module, leaf)
    except Exception:  # noqa: BLE001 - primitives come from any library, and their lowering may fail in any way
        rule = None
    return replicated(leaf) if rule is None else rule

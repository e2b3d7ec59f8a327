"""Optimization barriers: what waits for what, as a plan says.

A tensor that is gathered for use in two places far apart (a weight in the forward and in the backward pass) would be
gathered once and kept by the compiler's common-subexpression elimination, and a weight would be gathered as soon as the
step begins. Such a use is tied to the other operands, so that the copy is made when it is read, as the plan's memory
assumes. The zeros into which a gradient is scattered are tied likewise, to what is added: they would else be made with
all others of their type, when the first is needed. And what reads an operand later may have to wait for a product.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex

from autoshard.execution.by_shards import run_by_shards
from autoshard.execution.placement import Placed, Placement, is_moved, partition_spec
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.layout import is_slice
from autoshard.trace.rules.leaf import leaf_of
from autoshard.trace.rules.table import table_rule

Environment = dict[Any, Placed]
"""The values of a program's variables."""


def delay(
    env: Environment, equation: jex.JaxprEqn, placed: list[Placed], plan: EquationPlan, placement: Placement
) -> None:
    """Ties the operands that are `delayed` to the others, so that their copies cannot be made before these are there;
    what reads them next shares the new copies.

    Slices that the equation reads are taken first: the whole ones would else be kept. What the program fills with a
    scalar is filled anew. XLA ignores operands of a barrier that nothing reads behind it, so all are replaced.
    """
    if not plan.delayed:
        return
    for slot, steps in plan.operands:
        own = placed[slot].entries
        if slot not in plan.delayed and own is not None and is_slice(own, steps[-1]):
            placed[slot] = placement.place(placed[slot].value, steps[-1])
    for slot in plan.delayed:
        own, entries, filled = placed[slot][:3]
        others = [s for s, p in enumerate(placed) if s != slot and isinstance(p.value, jax.Array)]
        if others:
            first = own if filled is None else jax.numpy.asarray(filled, own.dtype)
            tied, *rest = jax.lax.optimization_barrier((first, *[placed[s].value for s in others]))
            placed[slot] = placement.place(tied if filled is None else jax.lax.broadcast(tied, own.shape), entries)
            for s, value in zip(others, rest, strict=True):
                placed[s] = placement.place(value, placed[s].entries)
        env[equation.invars[slot]] = placed[slot]


def send_behind(operands: list[Placed], plan: EquationPlan, placement: Placement) -> None:
    """Makes the operands that are sent wait for the copies of those that are `gathered_first`, which are there."""
    sent = []
    for slot, steps in plan.operands:
        lies = operands[slot].entries
        if slot not in plan.gathered_first and lies is not None and not is_slice(lies, steps[-1]):
            sent.append(slot)
    if sent:
        tied = [*plan.gathered_first, *sent]
        values = jax.lax.optimization_barrier([operands[slot].value for slot in tied])
        for slot, value in zip(tied, values, strict=True):
            operands[slot] = placement.tied(value, operands[slot])


def gather_behind(
    env: Environment, copies: list[Placed], behind: Sequence[tuple[int, Any]], placement: Placement
) -> None:
    """Makes what is gathered later of variables wait for copies: of `behind`, (slot of the copy, variable)."""
    for slot, v in behind:
        if v in env and copies[slot].entries is not None:
            copy, waiting = jax.lax.optimization_barrier((copies[slot].value, env[v].value))
            copies[slot], env[v] = placement.tied(copy, copies[slot]), placement.tied(waiting, env[v])


def share_copies(
    env: Environment, equation: jex.JaxprEqn, operands: Sequence[Placed], plan: EquationPlan, tied: Sequence[Any]
) -> None:
    """Keeps the copies of the variables `tied` that an equation reads in another layout for those that read them so
    later."""
    for slot, steps in plan.operands:
        v = equation.invars[slot]
        if v in tied and is_moved(env[v].entries, steps[-1]):
            env[v] = env[v]._replace(copy=(operands[slot].value, steps[-1]))


def wait(env: Environment, tied: Sequence[Any], results: Sequence[Any], placement: Placement) -> None:
    """Makes later readers of the variables `tied` wait for the variables `results`."""
    for v in tied:
        bound = [v, *results]
        copy, layout = env[v].copy or (None, None)
        values, copy = jax.lax.optimization_barrier(([env[b].value for b in bound], copy))
        env.update((b, placement.tied(x, env[b])) for b, x in zip(bound, values, strict=True))
        if layout is not None:
            env[v] = env[v]._replace(copy=(placement.constrain(copy, layout), layout))


def wait_for_part(
    env: Environment,
    tied: Sequence[Any],
    equation: jex.JaxprEqn,
    operands: Sequence[Placed],
    plan: EquationPlan,
    placement: Placement,
) -> list[Placed]:
    """The result of a product, with later readers of the variables `tied` waiting for what each device makes of it, and
    not for the sum."""
    if (rule := table_rule(leaf_of(equation))) is None:
        name = equation.primitive.name
        raise ValueError(f"Nothing can wait for a device's part of `{name}`: the rule table does not know this form.")
    ready = [v for v in tied if env[v].entries is not None]
    copies = [(v, copy) for v in ready if (copy := env[v].copy) is not None]
    waiting = [*(env[v][:2] for v in ready), *(copy for _, copy in copies)]
    specs = [(x, partition_spec(entries)) for x, entries in waiting]
    result, *bound = run_by_shards(equation, [o.value for o in operands], rule, plan, placement.mesh, specs)
    env.update((v, env[v]._replace(value=x)) for v, x in zip(ready, bound, strict=False))
    moved = zip(copies, bound[len(ready) :], strict=True)
    env.update((v, env[v]._replace(copy=(x, entries))) for (v, (_, entries)), x in moved)
    return [Placed(result, None)]

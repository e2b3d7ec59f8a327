"""Scans whose stacked results lie in buffers that are filled when their operands are there.

XLA fills the buffers in which a scan stacks its results with zeros, which wait for nothing: those of all scans of a
program at once, and early. Here they are carried through the scan, and begin with a zero that waits for its operands.
"""

from collections.abc import Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from autoshard.trace.walk import scan_counts, type_of


def scan_with_late_stacks(
    equation: jex.JaxprEqn, body: jex.ClosedJaxpr, operands: Sequence[jax.Array], late: Sequence[int]
) -> list[jax.Array]:
    """The results of a scan.

    Args:
      equation: The scan. body: Its program, as it is to run. operands: Its constants, first carry and slices.
      late: The result slots whose buffers are filled late; each is a stack.
    """
    params, (num_consts, num_carry) = equation.params, scan_counts(equation)
    length, is_reversed = params["length"], params["reverse"]
    kept = [type_of(v) for v in equation.outvars]
    run = jex.jaxpr_as_fun(body)
    consts = operands[:num_consts]
    zeros = [jnp.zeros((), kept[slot].dtype) for slot in late]
    tied = jax.lax.optimization_barrier((*zeros, *operands[num_consts:]))
    zeros, carry, slices = tied[: len(late)], tied[len(late) : len(late) + num_carry], tied[len(late) + num_carry :]
    stacks = [jax.lax.broadcast(zero, kept[slot].shape) for zero, slot in zip(zeros, late, strict=True)]

    def step(state: tuple, here: tuple) -> tuple:
        number, carried, filled = state
        results = run(*consts, *carried, *here)
        row = length - 1 - number if is_reversed else number
        filled = [
            jax.lax.dynamic_update_index_in_dim(s, results[slot], row, 0) for s, slot in zip(filled, late, strict=True)
        ]
        others = [r for slot, r in enumerate(results) if slot >= num_carry and slot not in late]
        return (number + 1, results[:num_carry], filled), others

    first = jnp.zeros((), jnp.int32), list(carry), stacks
    (_, carried, filled), others = jax.lax.scan(
        step, first, tuple(slices), length=length, reverse=is_reversed, unroll=params["unroll"]
    )
    of_slot, rest = dict(zip(late, filled, strict=True)), iter(others)
    return [*carried, *(of_slot[s] if s in of_slot else next(rest) for s in range(num_carry, len(kept)))]

"""Programs that write into mutable references (`jax.new_ref`) become programs of values, as JAX makes them itself.

A reference that is made inside a program is a name for a value that changes. When JAX lowers a program, it puts the
value that a reference has there in place of each read and write; loops then carry it. A plan gives layouts to values,
so here that is done when the program is traced. JAX has no public way, and what it calls itself is private.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
from jax._src.core import internal_mutable_array_effect
from jax._src.state.discharge import discharge_state
from jax.ref import AbstractRef

from autoshard.errors import TraceError


def refuse_references(closed: jex.ClosedJaxpr, names: Sequence[str]) -> None:
    """Refuses a program that writes into references made outside of it.

    Args:
      closed: A program.
      names: The path of each of its inputs.

    Raises:
      TraceError: An input or a constant of it is a reference.
    """
    taken = [f"argument `{name}`" for name, v in zip(names, closed.jaxpr.invars, strict=True) if _is_reference(v)]
    if any(map(_is_reference, closed.jaxpr.constvars)):
        taken.append("one that the function closes over")
    if taken:
        raise TraceError(
            "A planned function takes arrays and returns new ones, since a plan moves them to other devices; received "
            f"mutable references (`jax.new_ref`): {', '.join(taken)}. Pass the value of each (`reference[...]`) and "
            "return the new one; references that are made inside of the function may stay."
        )


def references_discharged(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """`closed` without the references that it makes, in the programs that it nests too; itself if it makes none."""
    if internal_mutable_array_effect not in closed.jaxpr.effects:
        return closed
    made: Any = discharge_state  # JAX 0.10.1 takes and returns open programs
    if "consts" in inspect.signature(made).parameters:
        return jex.ClosedJaxpr(*made(closed.jaxpr, closed.consts))
    return made(closed)


def _is_reference(v: Any) -> bool:
    return isinstance(v.aval, AbstractRef)

"""Arrays whose buffers a call may reuse: those that an earlier call reused, and those that are given twice."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from autoshard.errors import TraceError
from autoshard.trace.trace import argument_paths


def refuse_deleted(fn: Callable[..., Any], args: Sequence[Any], flat: Sequence[Any]) -> None:
    """Raises the error where an array is gone: XLA ends the process where several devices are given one.

    Args:
      fn: What is called. args: Its arguments. flat: Their leaves.

    Raises:
      TraceError: An array was given to an earlier call to reuse; names the first.
    """
    gone = [n for n, x in enumerate(flat) if _is_array(x) and x.is_deleted()]
    if gone:
        name, x = argument_paths(fn, args)[gone[0]], flat[gone[0]]
        are = f" and {len(gone) - 1} more arrays are" if gone[1:] else " is"
        raise TraceError(
            f"`{name}` [{', '.join(map(str, x.shape))}]{are} deleted: an earlier call reused the memory, since the "
            "argument is donated (donate_argnums). Pass what that call returned, make the state again, or plan "
            "without donate_argnums."
        )


def given_again(args: Sequence[Any], flat: Sequence[Any], donate_argnums: Sequence[int]) -> list[int]:
    """The leaves whose array an earlier leaf is, too, where one of the two is donated.

    An average of weights often begins as the weights themselves. Moved arrays may share the buffers of what they were,
    and XLA ends the process where a buffer that it may reuse comes twice.
    """
    if not donate_argnums or len(set(map(id, flat))) == len(flat):
        return []
    donated = {id(x) for n in donate_argnums for x in jax.tree_util.tree_leaves(args[n])}
    first = {id(x): n for n, x in reversed(list(enumerate(flat)))}
    return [n for n, x in enumerate(flat) if first[id(x)] != n and id(x) in donated and _is_array(x)]


def _is_array(x: Any) -> bool:
    """Whether it is an array in memory, and not one of a trace."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)

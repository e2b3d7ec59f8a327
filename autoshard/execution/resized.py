"""Binds an equation on operands of other sizes than it was traced with."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from autoshard.trace.walk import shape_of


def bind_resized(equation: jex.JaxprEqn, operands: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """The results of `equation` on `operands`; the results have these `shapes`."""
    params = {k: None if k in ("sharding", "out_sharding") else v for k, v in equation.params.items()}
    match equation.primitive.name:
        case "broadcast_in_dim":
            params["shape"] = tuple(shapes[0])
        case "reshape":
            params["new_sizes"] = tuple(shapes[0])
        case "slice":  # dimensions of which nothing is cut off
            starts, limits = equation.params["start_indices"], equation.params["limit_indices"]
            sizes = zip(starts, limits, shape_of(equation.invars[0]), operands[0].shape, strict=True)
            params["limit_indices"] = tuple(
                now if start == 0 and limit == before else limit for start, limit, before, now in sizes
            )
        case _:
            pass
    results = equation.primitive.bind(*operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]

"""Which products are turned right away, so that the compiler may make them as they are wanted.

The gradient of the weights of several experts comes out of its product with rows and columns exchanged, and a
transposition puts them right. XLA makes the product the other way round instead, if nothing is between the two. Where
the product's result is to have a layout, its partial sums are added there, and the transposition moves on into the
update: all that the optimizer keeps of the weight is turned, changed, and turned back, and not changed in place.
XLA:TPU does so with the gradient of every weight, which is a product without batches; XLA:GPU with none of those.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from autoshard.graph.equation_plan import EquationPlan


def turned_at_once(
    equations: Sequence[jex.JaxprEqn],
    numbers: Sequence[int],
    shardings: Mapping[int, EquationPlan],
    is_tpu: bool = False,
) -> frozenset[Any]:
    """The results of products that only a transposition of rows and columns reads, as they are laid out.

    Its own result has that layout as well, so that none needs to be demanded of the product. Sums that are scattered
    are made by shards, and are left alone.

    Args:
      equations: Those of one jaxpr, in order. numbers: Of each. shardings: What the plan says, by equation number.
      is_tpu: Whether to look for all such products, and not for those over batches alone.
    """
    readers: dict[Any, list[tuple[jex.JaxprEqn, int]]] = {}
    for equation, number in zip(equations, numbers, strict=True):
        for v in equation.invars:
            if not isinstance(v, jex.Literal):
                readers.setdefault(v, []).append((equation, number))
    found: set[Any] = set()
    for equation, number in zip(equations, numbers, strict=True):
        after = readers.get(equation.outvars[0], []) if equation.primitive.name == "dot_general" else []
        if len(after) != 1 or not _exchanges_rows(equation, after[0][0], is_tpu):
            continue
        (turning, next_number), wanted = after[0], shardings.get(number, EquationPlan())
        own, then = dict(wanted.results).get(0), shardings.get(next_number, EquationPlan())
        if own is None or wanted.scatters or then.operands:
            continue
        if dict(then.results).get(0) == tuple(own[d] for d in turning.params["permutation"]):
            found.add(equation.outvars[0])
    return frozenset(found)


def _exchanges_rows(product: jex.JaxprEqn, after: jex.JaxprEqn, is_tpu: bool) -> bool:
    """Whether `after` transposes a product, over batches but for TPUs, and leaves the batches in front."""
    num_batch = len(product.params["dimension_numbers"][1][0])
    if after.primitive.name != "transpose" or not (num_batch or is_tpu):
        return False
    return tuple(after.params["permutation"][:num_batch]) == tuple(range(num_batch))

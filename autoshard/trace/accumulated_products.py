"""Products that a loop adds up are made at once, behind it, of what the loop stacks.

The gradient of a weight that each step of a recurrent layer reads is a sum over the steps, which `scan` carries round:
in each step a product of few rows, an addition to all of it, and its reduction over the devices that share the batch.
Where both operands are slices of what the loop takes, or are stacked by it, one product of the stacks sums over the
steps too. That is what libraries of recurrent layers do; XLA leaves the loop as it is. The sum differs by its rounding
alone: it is made in the product's precision, not in that of what the loop carries.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from autoshard.trace.outer_products import open_numbers
from autoshard.trace.walk import open_jaxpr, scan_counts, size_bytes, variables

_SUMS = frozenset({"add", "add_any"})
_LINEAR = frozenset({"transpose", "convert_element_type"})
"""What may stand between a product and its sum."""


@dataclasses.dataclass(frozen=True)
class _Accumulated:
    """A product that a loop adds up.

    Attributes:
      carry: Which of what the loop carries is the sum. addition, product: The equations.
      between: Those between them, from the product on.
    """

    carry: int
    addition: jex.JaxprEqn
    product: jex.JaxprEqn
    between: tuple[jex.JaxprEqn, ...]

    @property
    def equations(self) -> tuple[jex.JaxprEqn, ...]:
        return self.addition, self.product, *self.between

    def total(self, first: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        """The sum that began as `first`, of the stacks of both operands."""
        (summed, batch), stacked = self.product.params["dimension_numbers"], []
        for own in (*summed, *batch):
            stacked.append(tuple(d + 1 for d in own))
        numbers = ((0, *stacked[0]), (0, *stacked[1])), tuple(stacked[2:])
        value = self.product.primitive.bind(left, right, **{**self.product.params, "dimension_numbers": numbers})
        for equation in self.between:
            value = equation.primitive.bind(value, **equation.params)
        return self.addition.primitive.bind(first, value)


def products_behind_loop(equation: jex.JaxprEqn) -> Callable[..., Any] | None:
    """What runs a scan, and behind it the products that it adds up; None of all else.

    An operand that the loop does not stack yet is stacked if that takes no more than what the loop takes slices of, and
    each slice no more than the sum: so not the activations of micro-batches, which a loop over these is there to free.
    """
    if equation.primitive.name != "scan" or equation.effects:
        return None
    body = open_jaxpr(equation.params["jaxpr"])
    num_consts, num_carry = scan_counts(equation)
    found = _found(body, num_consts, num_carry, equation.params["length"])
    return functools.partial(_run, equation, num_consts, num_carry, found) if found else None


def _found(body: jex.Jaxpr, num_consts: int, num_carry: int, length: int) -> list[_Accumulated]:
    made_by = {v: e for e in body.eqns for v in variables(e.outvars)}
    uses = collections.Counter(v for e in body.eqns for v in variables(e.invars))
    uses.update(variables(body.outvars))
    sliced = body.invars[num_consts + num_carry :]
    stacked, room_bytes = {*sliced, *variables(body.outvars[num_carry:])}, length * math.fsum(map(size_bytes, sliced))
    found: list[_Accumulated] = []
    for n, (before, after) in enumerate(zip(body.invars[num_consts:], body.outvars[:num_carry], strict=False)):
        one = _accumulated(n, before, after, made_by, uses)
        if one is None:
            continue
        operands = variables(one.product.invars)
        new = [v for v in operands if v not in stacked]
        if len(operands) < 2 or any(v not in made_by or size_bytes(v) > size_bytes(after) for v in new):
            continue
        new_bytes = length * sum(map(size_bytes, new))
        if new_bytes <= room_bytes:
            room_bytes -= new_bytes
            stacked.update(new)
            found.append(one)
    return found


def _accumulated(n: int, before: Any, after: Any, made_by: dict[Any, Any], uses: dict[Any, int]) -> _Accumulated | None:
    """What is added to the carry `n`, which the body has as `before` and hands on as `after`; None if no product."""
    is_variable = isinstance(after, jex.Var) and after in made_by
    if not is_variable or made_by[after].primitive.name not in _SUMS or uses[before] != 1 or uses[after] != 1:
        return None
    addition, between = made_by[after], []
    if before not in variables(addition.invars):
        return None
    (value,) = [v for v in addition.invars if v is not before]
    while isinstance(value, jex.Var) and value in made_by and uses[value] == 1:
        made = made_by[value]
        if made.primitive.name in _LINEAR:
            between.insert(0, made)
            (value,) = made.invars
        elif open_numbers(made) is not None:
            return _Accumulated(n, addition, made, tuple(between))
        else:
            break
    return None


def _run(
    equation: jex.JaxprEqn, num_consts: int, num_carry: int, found: Sequence[_Accumulated], *operands: jax.Array
) -> list[jax.Array]:
    closed, params = equation.params["jaxpr"], equation.params
    body = open_jaxpr(closed)
    gone = {id(e) for one in found for e in one.equations}
    sums = {one.carry for one in found}
    kept = [n for n in range(num_carry) if n not in sums]
    consts, first, whole = operands[:num_consts], operands[num_consts:][:num_carry], operands[num_consts + num_carry :]
    sliced = dict(zip(body.invars[num_consts + num_carry :], whole, strict=True))
    stacked = {*sliced, *variables(body.outvars[num_carry:])}
    needed = dict.fromkeys(v for one in found for v in one.product.invars if v not in stacked)
    results = [*(body.outvars[n] for n in kept), *body.outvars[num_carry:], *needed]
    equations = [e for e in body.eqns if id(e) not in gone]
    read = {*variables(results), *(v for e in equations for v in variables(e.invars))}
    scanned = [v for v in sliced if v in read]
    inputs = [*body.invars[:num_consts], *(body.invars[num_consts + n] for n in kept), *scanned]
    names = jex.DebugInfo("loop", "loop", ("",) * len(inputs), ("",) * len(results))
    rest = jex.ClosedJaxpr(
        body.replace(invars=inputs, outvars=results, eqns=equations, debug_info=names), getattr(closed, "consts", ())
    )

    def step(carry: Sequence[jax.Array], slices: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        values = jex.jaxpr_as_fun(rest)(*consts, *carry, *slices)
        return list(values[: len(kept)]), list(values[len(kept) :])

    carried, stacks = jax.lax.scan(
        step,
        [first[n] for n in kept],
        [sliced[v] for v in scanned],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    stack_of = {**sliced, **dict(zip(results[len(kept) :], stacks, strict=True))}
    last = dict(zip(kept, carried, strict=True))
    for one in found:
        left, right = one.product.invars
        last[one.carry] = one.total(first[one.carry], stack_of[left], stack_of[right])
    return [*(last[n] for n in range(num_carry)), *stacks[: len(body.outvars) - num_carry]]

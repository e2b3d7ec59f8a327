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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from autoshard.trace.outer_products import open_numbers
from autoshard.trace.walk import open_jaxpr, scan_counts, size_bytes, type_of, variables

_SUMS = frozenset({"add", "add_any"})
_LINEAR = frozenset({"transpose", "convert_element_type", "slice", "split", "reshape"})
"""What may stand between a product and its sums: of weights that the body puts side by side, slices are added up."""


_HANDED_ON = -1
"""Stands for the body's own result among the readers of a value."""


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


@dataclasses.dataclass(frozen=True)
class _Behind:
    """What runs behind a loop.

    Attributes:
      operands: Of the products, as the body names them. program: Of what the sums begin with, and stacks of `operands`.
    """

    operands: tuple[Any, ...]
    program: jex.ClosedJaxpr


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
    readers: dict[Any, list[int]] = collections.defaultdict(list)
    for e in body.eqns:
        for v in variables(e.invars):
            readers[v].append(id(e))
    for v in variables(body.outvars):
        readers[v].append(_HANDED_ON)
    carries = enumerate(zip(body.invars[num_consts:], body.outvars[:num_carry], strict=False))
    summed = [_accumulated(n, before, after, made_by, readers) for n, (before, after) in carries]
    found, count = [one for one in summed if one is not None], -1
    while len(found) != count:  # what goes must have no other readers
        count, gone = len(found), {id(e) for one in found for e in one.equations}
        found = [
            one
            for one in found
            if all(gone.issuperset(readers[v]) for e in one.equations[1:] for v in variables(e.outvars))
        ]
    sliced = body.invars[num_consts + num_carry :]
    stacked, room_bytes = {*sliced, *variables(body.outvars[num_carry:])}, length * math.fsum(map(size_bytes, sliced))
    left_out: set[int] = set()
    for product in {id(one.product): one.product for one in found}.values():
        operands = variables(product.invars)
        new = [v for v in dict.fromkeys(operands) if v not in stacked]
        new_bytes = length * sum(map(size_bytes, new))
        is_small = all(v in made_by and size_bytes(v) <= size_bytes(product.outvars[0]) for v in new)
        if len(operands) == 2 and is_small and new_bytes <= room_bytes:
            room_bytes -= new_bytes
            stacked.update(new)
        else:
            left_out.add(id(product))
    return [one for one in found if id(one.product) not in left_out]


def _accumulated(
    n: int, before: Any, after: Any, made_by: Mapping[Any, jex.JaxprEqn], readers: Mapping[Any, Sequence[int]]
) -> _Accumulated | None:
    """What is added to the carry `n`, which the body has as `before` and hands on as `after`; None if no product."""
    addition = made_by.get(after) if isinstance(after, jex.Var) else None
    if addition is None or addition.primitive.name not in _SUMS or before not in variables(addition.invars):
        return None
    others, between = [v for v in addition.invars if v is not before], list[jex.JaxprEqn]()
    if len(others) != 1 or list(readers[before]) != [id(addition)] or list(readers[after]) != [_HANDED_ON]:
        return None
    value = others[0]
    while isinstance(value, jex.Var) and value in made_by:
        made = made_by[value]
        if open_numbers(made) is not None:
            return _Accumulated(n, addition, made, tuple(between))
        if made.primitive.name not in _LINEAR or len(made.invars) != 1:
            break
        between.insert(0, made)
        (value,) = made.invars
    return None


def _behind(body: jex.Jaxpr, found: Sequence[_Accumulated], before: Sequence[Any], length: int) -> _Behind:
    """What runs behind the loop; `before`: what the sums begin with, as the body names it."""
    gone = {id(e) for one in found for e in one.equations}
    products = {id(one.product) for one in found}
    stack_of: dict[Any, jex.Var] = {}
    equations = []
    for equation in body.eqns:
        if id(equation) in products:
            for v in equation.invars:
                if v not in stack_of:
                    own = type_of(v)
                    stack_of[v] = jex.Var(own.update(shape=(length, *own.shape)))
            equations.append(_of_stacks(equation, [stack_of[v] for v in equation.invars]))
        elif id(equation) in gone:
            equations.append(equation)
    inputs, outs = [*before, *stack_of.values()], [body.outvars[one.carry] for one in found]
    names = jex.DebugInfo("behind_loop", "behind_loop", ("",) * len(inputs), ("",) * len(outs))
    program = body.replace(constvars=[], invars=inputs, outvars=outs, eqns=equations, debug_info=names)
    return _Behind(tuple(stack_of), jex.ClosedJaxpr(program, []))


def _of_stacks(product: jex.JaxprEqn, stacks: Sequence[Any]) -> jex.JaxprEqn:
    """The product that sums over stacks of its operands, too."""
    summed, batch = ([tuple(d + 1 for d in dims) for dims in own] for own in product.params["dimension_numbers"])
    numbers = ((0, *summed[0]), (0, *summed[1])), tuple(batch)
    return product.replace(invars=list(stacks), params={**product.params, "dimension_numbers": numbers})


def _run(
    equation: jex.JaxprEqn, num_consts: int, num_carry: int, found: Sequence[_Accumulated], *operands: jax.Array
) -> list[jax.Array]:
    """The results of a scan, of which those `found` are made behind it."""
    closed, params = equation.params["jaxpr"], equation.params
    body = open_jaxpr(closed)
    inner = body.invars[num_consts : num_consts + num_carry]
    behind = _behind(body, found, [inner[one.carry] for one in found], params["length"])
    gone, sums = {id(e) for one in found for e in one.equations}, {one.carry for one in found}
    kept = [n for n in range(num_carry) if n not in sums]
    consts, first, whole = operands[:num_consts], operands[num_consts:][:num_carry], operands[num_consts + num_carry :]
    sliced = dict(zip(body.invars[num_consts + num_carry :], whole, strict=True))
    is_stacked = {*sliced, *variables(body.outvars[num_carry:])}
    new = [v for v in behind.operands if v not in is_stacked]
    results = [*(body.outvars[n] for n in kept), *body.outvars[num_carry:], *new]
    equations = [e for e in body.eqns if id(e) not in gone]
    read = {*variables(results), *(v for e in equations for v in variables(e.invars))}
    scanned = [v for v in sliced if v in read]
    inputs = [*body.invars[:num_consts], *(inner[n] for n in kept), *scanned]
    names = jex.DebugInfo("loop", "loop", ("",) * len(inputs), ("",) * len(results))
    rest = body.replace(invars=inputs, outvars=results, eqns=equations, debug_info=names)
    run = jex.jaxpr_as_fun(jex.ClosedJaxpr(rest, getattr(closed, "consts", ())))

    def step(carry: Sequence[jax.Array], slices: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        values = run(*consts, *carry, *slices)
        return list(values[: len(kept)]), list(values[len(kept) :])

    carried, stacks = jax.lax.scan(
        step,
        [first[n] for n in kept],
        [sliced[v] for v in scanned],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    outs = zip(results[len(kept) :], stacks, strict=True)
    stack_of = {**sliced, **{v: stack for v, stack in outs if isinstance(v, jex.Var)}}
    sums_made = jex.jaxpr_as_fun(behind.program)(
        *(first[one.carry] for one in found), *(stack_of[v] for v in behind.operands)
    )
    last = dict(zip(kept, carried, strict=True)) | dict(zip([one.carry for one in found], sums_made, strict=True))
    return [*(last[n] for n in range(num_carry)), *stacks[: len(body.outvars) - num_carry]]

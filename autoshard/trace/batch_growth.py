"""How what a program computes grows with the batch, told by its traces for a batch and for a part of that.

Both traces are read side by side, number by number: what one mean divides by and another multiplies with stands in them
as a literal, as a constant, or as the sizes that a sum runs over. A value has the growth w if it is w times the mean of
what it is over equal parts of the batch, as long as no operation mixes examples
(`autoshard/graph/example_mean.py`): a mean over examples, and what depends on none, has 1, a sum over them as many as
there are parts, and what is divided by their number 1 over that. Sums and differences demand one growth of their terms,
products multiply growths, and any other function leaves a growth of 1 alone. The growth of anything else is not known.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from autoshard.trace.source import SourceLines
from autoshard.trace.walk import (
    EquationKind,
    called_operands,
    kind_of,
    nested_programs,
    open_jaxpr,
    scan_counts,
    shape_of,
    type_of,
    variables,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Growth:
    """How a value grows with the batch.

    Attributes:
      factor: What it is over the batch, in the mean of what it is over equal parts. None: any, as of zeros.
      why: The operation because of which it is not known, or an empty string.
    """

    factor: float | None = 1.0
    why: str = ""

    def is_(self, factor: float) -> bool:
        """Whether it is known to grow so. Zeros grow as one likes."""
        return not self.why and (self.factor is None or math.isclose(self.factor, factor, rel_tol=1e-6))


SAME, ANY = Growth(), Growth(None)

_LINEAR = frozenset(
    "add add_any sub neg copy copy_p reshape squeeze expand_dims transpose broadcast_in_dim slice split unstack tile "
    "concatenate pad rev convert_element_type reduce_precision real imag complex conj fft abs max min clamp reduce_sum "
    "reduce_max reduce_min cumsum cummax cummin reduce_window_sum reduce_window_max reduce_window_min "
    "select_and_gather_add select_and_scatter_add".split()
)
"""Operations that are as many times as large where all their operands are."""
_COMPARING = frozenset("eq ne lt le gt ge eq_to lt_to le_to sign is_finite argmax argmin".split())
"""Operations that stay the same where all their operands are as many times as large."""
_BY_INDEX = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2, "select_n": 0}
"""Linear operations that read indices: the number of operands in front of these; of `select_n` they come first."""
_ALONG = frozenset("cumsum cummax cummin cumprod cumlogsumexp sort".split())
_LINEAR_IN_LAST = frozenset({"triangular_solve", "dot_product_attention_bwd_wrapper"})
"""Operations that are linear in their last operand; all others of theirs must stay the same."""
_POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3}


class OtherProgramError(Exception):
    """A program has other operations for fewer examples; its text tells the first."""


def growths(whole: jex.ClosedJaxpr, part: jex.ClosedJaxpr) -> list[Growth]:
    """How each result of a program grows from a part of the batch to the whole.

    Args:
      whole, part: One function's program for the batch, and for fewer examples. Its arguments, numbers of the batch
        among them, are taken to be the same for each example.

    Raises:
      OtherProgramError: The two have other operations.
    """
    constants = [_of_numbers(a, b) for a, b in zip(whole.consts, part.consts, strict=False)]
    a, b = open_jaxpr(whole), open_jaxpr(part)
    if len(whole.consts) != len(part.consts) or len(a.invars) != len(b.invars):
        raise OtherProgramError("other constants")
    return _Reading().run(a, b, [*constants, *[SAME] * len(a.invars)])


def _of_numbers(whole: Any, part: Any) -> Growth:
    """The growth of what stands in a program as numbers."""
    if jnp.issubdtype(jax.dtypes.result_type(whole), jax.dtypes.extended):
        return SAME  # keys
    a, b = _plain(whole), _plain(part)
    if a.shape != b.shape:  # numbers for each example: known if they are the same for all
        a, b = np.unique(a), np.unique(b)
        if a.size != 1 or b.size != 1:
            return Growth(why="numbers for each example, which it closes over")
    if np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
        return ANY if a.dtype.kind in "iuf" and a.size and not np.any(np.isfinite(a) & (a != 0)) else SAME
    if a.dtype.kind in "iuf" and np.array_equal(a == 0, b == 0):
        ratios = a[b != 0].astype(np.float64) / b[b != 0]
        if np.all(ratios > 0) and np.allclose(ratios, ratios[0], rtol=1e-6, atol=0.0):
            return Growth(float(ratios[0]))
    return Growth(why="a number that changes with that of the examples")


def _plain(numbers: Any) -> np.ndarray:
    """Numbers as NumPy knows them, which has no short floats."""
    own = np.asarray(numbers)
    return own.astype(np.float64) if jnp.issubdtype(own.dtype, jnp.floating) else own


class _Reading:
    """Reads two programs side by side."""

    def __init__(self) -> None:
        self.lines = SourceLines()
        self.callers: list[str] = []

    def label(self, equation: jex.JaxprEqn) -> str:
        """The name of an operation and the user's line, as of `Operation.label`."""
        line = self.lines.of(equation) or next((line for line in reversed(self.callers) if line), "")
        name = equation.primitive.name
        return f"{name} at {line}" if line else name

    def run(self, whole: jex.Jaxpr, part: jex.Jaxpr, inputs: Sequence[Growth]) -> list[Growth]:
        """The growths of the results of a program, from those of its constants and arguments."""
        given = [*whole.constvars, *whole.invars]
        known: dict[Any, Growth] = dict(zip(given, inputs, strict=True))
        twin: dict[Any, Any] = dict(zip([*part.constvars, *part.invars], given, strict=True))

        def operand(a: Any, b: Any, where: str) -> Growth:
            if isinstance(a, jex.Literal) and isinstance(b, jex.Literal):
                return _of_numbers(a.val, b.val)
            if isinstance(a, jex.Literal) or isinstance(b, jex.Literal) or twin[b] is not a:
                raise OtherProgramError(where)
            return known[a]

        equations, others = _needed(whole), _needed(part)
        for a, b in zip(equations, others, strict=False):
            label = self.label(a)
            if a.primitive is not b.primitive or len(a.invars) != len(b.invars) or len(a.outvars) != len(b.outvars):
                raise OtherProgramError(label)
            operands = [operand(v, w, label) for v, w in zip(a.invars, b.invars, strict=True)]
            made = self.results(a, b, operands)
            known.update(zip(a.outvars, made, strict=True))
            twin.update(zip(b.outvars, a.outvars, strict=True))
        if len(equations) != len(others):
            longer = equations if len(equations) > len(others) else others
            raise OtherProgramError(self.label(longer[min(len(equations), len(others))]))
        return [operand(v, w, "what it returns") for v, w in zip(whole.outvars, part.outvars, strict=True)]

    def results(self, a: jex.JaxprEqn, b: jex.JaxprEqn, operands: list[Growth]) -> list[Growth]:
        """The growths of the results of an equation; `b`: the same for fewer examples."""
        kind = kind_of(a)
        if kind is EquationKind.LEAF:
            made = _leaf(a, b, operands, self.label(a))
            return made if isinstance(made, list) else [made] * len(a.outvars)
        if kind is EquationKind.OPAQUE:
            is_same = _shapes(a) == _shapes(b) and str(a.params) == str(b.params) and all(o.is_(1.0) for o in operands)
            return [SAME if is_same else _unknown(operands, self.label(a))] * len(a.outvars)
        programs = [(open_jaxpr(p), open_jaxpr(q)) for p, q in zip(nested_programs(a), nested_programs(b), strict=True)]
        self.callers.append(self.lines.of(a))
        consts = [
            list(map(_of_numbers, _consts(p), _consts(q)))
            for p, q in zip(nested_programs(a), nested_programs(b), strict=True)
        ]
        run = lambda k, own: self.run(programs[k][0], programs[k][1], [*consts[k], *own])
        match kind:
            case EquationKind.CALL:
                made = run(0, called_operands(a, operands))
            case EquationKind.SCAN:
                made = self.scan(a, b, operands, run)
            case EquationKind.WHILE:
                made = self.while_loop(a, operands, run)
            case _:
                each = [run(k, operands[1:]) for k in range(len(programs))]
                made = [_joined(own, self.label(a)) for own in zip(*each, strict=True)]
                if not operands[0].is_(1.0):
                    made = [_unknown(operands[:1], self.label(a))] * len(made)
        self.callers.pop()
        return made

    def scan(self, a: jex.JaxprEqn, b: jex.JaxprEqn, operands: list[Growth], run: Any) -> list[Growth]:
        if a.params["length"] != b.params["length"]:
            return [Growth(why=self.label(a))] * len(a.outvars)
        num_consts, num_carried = scan_counts(a)
        consts, carried, scanned = (
            operands[:num_consts],
            operands[num_consts : num_consts + num_carried],
            operands[num_consts + num_carried :],
        )
        while True:
            made = run(0, [*consts, *carried, *scanned])
            joined = [_joined(pair, self.label(a)) for pair in zip(carried, made[:num_carried], strict=True)]
            if joined == carried:
                return [*carried, *made[num_carried:]]
            carried = joined

    def while_loop(self, a: jex.JaxprEqn, operands: list[Growth], run: Any) -> list[Growth]:
        of_test, of_body = a.params["cond_nconsts"], a.params["body_nconsts"]
        test, body = operands[:of_test], operands[of_test : of_test + of_body]
        carried = operands[of_test + of_body :]
        while True:
            (again,) = run(0, [*test, *carried])
            if not again.is_(1.0):
                return [_unknown([again], self.label(a))] * len(carried)
            made = run(1, [*body, *carried])
            joined = [_joined(pair, self.label(a)) for pair in zip(carried, made, strict=True)]
            if joined == carried:
                return carried
            carried = joined


def _needed(jaxpr: jex.Jaxpr) -> list[jex.JaxprEqn]:
    """The equations on which results of a program depend."""
    wanted, found = set(variables(jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if wanted.intersection(equation.outvars):
            wanted.update(variables(equation.invars))
            found.append(equation)
    return found[::-1]


def _consts(nested: Any) -> Sequence[Any]:
    """The constants of a nested program that brings its own."""
    return nested.consts if isinstance(nested, jex.ClosedJaxpr) else ()


def _shapes(equation: jex.JaxprEqn) -> list[tuple[int, ...]]:
    return [shape_of(v) for v in (*equation.invars, *equation.outvars)]


def _unknown(operands: Sequence[Growth], label: str) -> Growth:
    """What is not known: because of an operand of which that is said already, or else of the operation at hand."""
    return next((o for o in operands if o.why), Growth(why=f"{label}, of what changes with the number of examples"))


def _joined(terms: Sequence[Growth], label: str) -> Growth:
    """The growth that all terms have."""
    for term in terms:
        if term.why:
            return term
    first = next((t for t in terms if t.factor is not None), ANY)
    if first.factor is None or all(t.is_(first.factor) for t in terms):
        return first
    return Growth(why=f"{label}, where what changes with the number of examples meets what changes otherwise")


def _leaf(a: jex.JaxprEqn, b: jex.JaxprEqn, operands: list[Growth], label: str) -> Growth | list[Growth]:
    """The growth of the results of an equation that nests none; `b`: the same for fewer examples."""
    name = a.primitive.name
    times = [_size(v) / _size(w) for v, w in zip(a.invars, b.invars, strict=True)]
    made = [_size(v) / _size(w) for v, w in zip(a.outvars, b.outvars, strict=True)]
    if name.startswith("random_") or name in ("threefry2x32", "rng_bit_generator"):
        return SAME  # other random numbers, which parts of the batch draw anyway
    if name == "iota":
        along = a.params["dimension"]
        return Growth(why=label) if a.params["shape"][along] != b.params["shape"][along] else SAME
    if name == "optimization_barrier":
        return operands
    if name in _ALONG and _along(a) != _along(b):
        return Growth(why=label)
    if name == "sort":
        return operands
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return _product(a, b, operands, [*times, *made], label)
    if name == "div" and _is_inexact(a):
        return _divided(operands, label)
    if name in _POWERS or name == "integer_pow" and a.params["y"] == b.params["y"]:
        (own,) = operands
        exponent = _POWERS.get(name) or float(a.params["y"])
        return own if own.why or own.factor is None else Growth(own.factor**exponent)
    if name in _BY_INDEX or name.startswith("scatter"):
        return _by_index(name, operands, times, label)
    if name in _LINEAR_IN_LAST:
        return operands[-1] if all(o.is_(1.0) for o in operands[:-1]) else _unknown(operands[:-1], label)
    if name in _COMPARING:
        own = _joined(operands, label)
        is_even = name not in ("argmax", "argmin") or made[0] == times[0]
        return (own if own.why else SAME) if is_even else Growth(why=label)
    if name in _LINEAR:
        return _linear(a, name, operands, times, made, label)
    sizes = {x for x in (*times, *made) if x != 1}
    is_even = not sizes or len(sizes) == 1 and all(x != 1 for x in made)
    if is_even and all(o.is_(1.0) for o in operands) and _numbers(a) == _numbers(b):
        return SAME
    return _unknown(operands, label)


def _size(v: Any) -> int:
    """Elements of a value; 1 for none, so that sizes can be compared."""
    return max(math.prod(getattr(v.aval, "shape", ())), 1)


def _is_inexact(equation: jex.JaxprEqn) -> bool:
    return jnp.issubdtype(type_of(equation.outvars[0]).dtype, jnp.inexact)


def _along(equation: jex.JaxprEqn) -> int:
    """The extent along which an operation counts, or sorts."""
    along = equation.params["dimension" if equation.primitive.name == "sort" else "axis"]
    return shape_of(equation.invars[0])[along]


def _numbers(equation: jex.JaxprEqn) -> list[tuple[str, Any]]:
    """The numbers and names among the parameters of an equation."""
    return [(k, v) for k, v in sorted(equation.params.items()) if isinstance(v, int | float | str)]


def _linear(
    a: jex.JaxprEqn, name: str, operands: list[Growth], times: list[float], made: list[float], label: str
) -> Growth:
    own = _joined(operands, label)
    if own.why or own.factor is None:
        return own
    if name == "reduce_sum":
        return Growth(own.factor * times[0] / made[0])
    if name in ("reduce_max", "reduce_min") and made[0] != times[0]:
        return Growth(why=label)
    if name == "convert_element_type" and not _is_inexact(a) and _is_inexact_type(a.invars[0]):
        return own if own.is_(1.0) else _unknown([own], label)
    return own


def _is_inexact_type(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)


def _product(a: jex.JaxprEqn, b: jex.JaxprEqn, operands: list[Growth], sizes: list[float], label: str) -> Growth:
    """Of a product, which is linear in each operand; `sizes`: how many times larger operands and result are."""
    if any(o.factor is None and not o.why for o in operands):
        return ANY
    if any(o.why for o in operands):
        return _unknown(operands, label)
    factor = math.prod(o.factor or 1.0 for o in operands)
    match a.primitive.name:
        case "dot_general":
            (contracted, _), _ = a.params["dimension_numbers"]
            left, fewer = shape_of(a.invars[0]), shape_of(b.invars[0])
            return Growth(factor * math.prod(max(left[d], 1) / max(fewer[d], 1) for d in contracted))
        case "conv_general_dilated":
            left, right, result = sizes
            if left * right == result or left == right == result:
                return Growth(factor)
            return Growth(factor * left) if left == right and result == 1 else Growth(why=label)
        case _:
            return Growth(factor)


def _divided(operands: list[Growth], label: str) -> Growth:
    above, below = operands
    if above.why or below.why:
        return _unknown(operands, label)
    if above.factor is None:
        return ANY
    return Growth(above.factor / (below.factor or 1.0))


def _by_index(name: str, operands: list[Growth], times: list[float], label: str) -> Growth:
    """Of an operation that reads or writes by indices, which must not depend on the number of examples."""
    if name == "select_n":
        indices, moved = operands[:1], operands[1:]
    elif name.startswith("scatter"):
        target, *indices, updates = operands
        if name in ("scatter-add", "scatter_add") and not updates.why and updates.factor is not None:
            updates = Growth(updates.factor * times[-1] / times[0])
        elif name in ("scatter-mul", "scatter_mul"):
            return _joined([target], label) if updates.is_(1.0) else _unknown([updates], label)
        moved = [target, updates]
    else:
        moved, indices = operands[: _BY_INDEX[name]], operands[_BY_INDEX[name] :]
    if any(not o.is_(1.0) for o in indices):
        return _unknown([o for o in indices if not o.is_(1.0)], label)
    return _joined(moved, label)

"""Exchanges the operands of products that the compiler would otherwise transpose something large for.

`einsum` makes a product, whose result has the free dimensions of the left operand and then those of the right, and
transposes that. Which operand is left is up to it, and it does not look at sizes. Of attention whose heads share keys
(`bqhgd,bkhd->bhgqk`) the keys are left, so that scores lie in memory with the queries of a group innermost, four or
eight of them: what a softmax reduces is then far apart, a kernel that turns such short rows takes several times as long
as its bytes, and the gradients of the scores, which come out of their product the other way, are turned, too. XLA
exchanges operands where this is all that a transposition does; with several dimensions on a side it never is.

Compiled by XLA:GPU for an H100 (`benchmarks/grouped_attention.py`), grouped attention takes a third less kernel time
so, and a third less memory.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex
from jax.core import ShapedArray

from autoshard.trace.walk import (
    EquationKind,
    called_jaxpr,
    is_checkpoint,
    kind_of,
    open_jaxpr,
    shape_of,
    size_bytes,
    type_of,
)

_SHORT_ROW = 32
"""Elements: a warp of an NVIDIA GPU, and the side of the tiles in which XLA:GPU transposes. What lies innermost with
fewer is transposed slowly, or element by element (`hlo/kernel_forms.py`)."""

_UNARY = frozenset({"reduce_precision", "convert_element_type", "name", "copy"})
"""What makes each element of one of its operand, between a product and the transposition of its result."""


def operands_ordered(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """`closed` with operands of some batched products exchanged, in the programs that it nests too.

    What it computes stays the same, and so does the number of equations: where a product's result is only transposed,
    also by a checkpointed function that is given it, and the product has several dimensions on a side, it is made the
    other way round if less is moved in memory for that; the transpositions follow.
    """
    return _Programs({}).ordered(closed, ())


_Readers = dict[Any, list[jex.JaxprEqn | None]]
"""The equations that read each variable; None for the result of the program."""


class _Lies(NamedTuple):
    """How a value lies in memory.

    Attributes:
      innermost: The dimension that lies innermost, as far as the program tells: the last one of a product, what a
        transposition makes of that, and what is made of these element by element.
      moved: For each dimension that the value had as written, where it is now; none if it has them as written.
    """

    innermost: int
    moved: tuple[int, ...] = ()


class _Programs:
    """Orders programs from the outside in; those that are nested more than once, alike, stay shared.

    Attributes:
      done: What was made of a program, by its identity and how its inputs lie; both are kept alive.
    """

    def __init__(self, done: dict[Any, tuple[Any, Any]]):
        self._done = done

    def ordered(self, program: Any, inputs: Sequence[_Lies | None] = ()) -> Any:
        """A program (`Jaxpr` or `ClosedJaxpr`) with operands exchanged; the same object if none are.

        Args:
          program: As it is written. inputs: How its inputs lie, as far as is known; () where nothing is.
        """
        key = id(program), tuple(inputs)
        if key not in self._done:
            jaxpr = open_jaxpr(program)
            made = _Program(self, jaxpr, inputs).ordered()
            closed = jex.ClosedJaxpr(made, program.consts) if isinstance(program, jex.ClosedJaxpr) else made
            self._done[key] = program, program if made is jaxpr else closed
        return self._done[key][1]


class _Program:
    """One program in the making.

    Args:
      programs: For those that it nests. jaxpr: As it is written. inputs: How its inputs lie.
    """

    def __init__(self, programs: _Programs, jaxpr: jex.Jaxpr, inputs: Sequence[_Lies | None]):
        self._programs, self._jaxpr = programs, jaxpr
        self._lies: dict[Any, _Lies] = {}
        self._renamed: dict[Any, jex.Var] = {}
        for v, lies in zip(jaxpr.invars, inputs, strict=False):
            if lies is not None:
                self._note(v, lies)

    def ordered(self) -> jex.Jaxpr:
        """The program with operands exchanged; the same object if none are."""
        readers = _readers(self._jaxpr)
        equations = [self._ordered(equation, readers) for equation in self._jaxpr.eqns]
        if all(new is old for new, old in zip(equations, self._jaxpr.eqns, strict=True)):
            return self._jaxpr
        return self._jaxpr.replace(invars=[self._now(v) for v in self._jaxpr.invars], eqns=equations)

    def _note(self, v: Any, lies: _Lies) -> None:
        """Notes how a variable lies, which gets another name if its dimensions have moved."""
        self._lies[v] = lies
        if lies.moved:
            shape = [0] * len(lies.moved)
            for size, place in zip(shape_of(v), lies.moved, strict=True):
                shape[place] = size
            self._renamed[v] = jex.Var(type_of(v).update(shape=tuple(shape)))

    def _now(self, v: Any) -> Any:
        return self._renamed.get(v, v) if isinstance(v, jex.Var) else v

    def _lie(self, v: Any) -> _Lies:
        known = self._lies.get(v) if isinstance(v, jex.Var) else None
        return _Lies(len(shape_of(v)) - 1) if known is None else known

    def _ordered(self, equation: jex.JaxprEqn, readers: _Readers) -> jex.JaxprEqn:
        """An equation as it is from now on; notes how its results lie."""
        name = equation.primitive.name
        if name == "dot_general":
            (result,) = equation.outvars
            if not self._is_exchanged(equation, readers):
                return equation
            self._note(result, _Lies(len(shape_of(result)) - 1, _moved(equation)))
            return _exchanged(equation, self._now(result))
        if name == "transpose":
            return self._transposed(equation)
        known = [self._lies.get(v) if isinstance(v, jex.Var) else None for v in equation.invars]
        changed = self._nested(equation, known)
        if name in _UNARY and known[0] is not None:
            self._note(equation.outvars[0], known[0])
        else:
            given = zip(equation.invars[::-1], known[::-1], strict=True)
            alike = {shape_of(v): lies for v, lies in given if lies is not None and not lies.moved}
            for result in equation.outvars:
                if isinstance(result.aval, ShapedArray) and result.aval.shape in alike:
                    self._note(result, alike[result.aval.shape])
        if all(lies is None or not lies.moved for lies in known):
            return changed
        operands, results = ([*map(self._now, side)] for side in (equation.invars, equation.outvars))
        return changed.replace(invars=operands, outvars=results)

    def _transposed(self, equation: jex.JaxprEqn) -> jex.JaxprEqn:
        """A transposition of what its operand is now."""
        (operand,), (result,) = equation.invars, equation.outvars
        lies, permutation = self._lie(operand), tuple(equation.params["permutation"])
        if lies.moved:
            permutation = tuple([lies.moved[d] for d in permutation])
            equation = equation.replace(
                invars=[self._now(operand)], params={**equation.params, "permutation": permutation}
            )
        self._note(result, _Lies(permutation.index(lies.innermost)))
        return equation

    def _nested(self, equation: jex.JaxprEqn, known: Sequence[_Lies | None]) -> jex.JaxprEqn:
        """An equation whose nested programs have operands exchanged; `known`: how its operands lie."""
        params = dict(equation.params)
        match kind_of(equation):
            case EquationKind.CALL if (called := called_jaxpr(equation)) is not None and called[0] != "jaxprs":
                params[called[0]] = self._programs.ordered(called[1], known)
            case EquationKind.SCAN:
                params["jaxpr"] = self._programs.ordered(params["jaxpr"])
            case EquationKind.WHILE:
                params["body_jaxpr"] = self._programs.ordered(params["body_jaxpr"])
            case EquationKind.COND:
                branches = tuple([self._programs.ordered(b) for b in params["branches"]])
                if any(new is not old for new, old in zip(branches, params["branches"], strict=True)):
                    params["branches"] = branches
        is_same = all(params[name] is value for name, value in equation.params.items())
        return equation if is_same else equation.replace(params=params)

    def _is_exchanged(self, product: jex.JaxprEqn, readers: _Readers) -> bool:
        """Whether a product moves less with its operands exchanged."""
        precision = product.params["precision"]
        if product.params.get("out_sharding") is not None or not (precision is None or isinstance(precision, tuple)):
            return False
        dims = _Dims.of(product)
        if not dims.batch or not dims.left or not dims.right or max(dims.left, dims.right, dims.contracted) == 1:
            return False
        orders = {*_transpositions(product.outvars[0], readers)}
        permutations = orders - {None}
        if len(permutations) < len(orders) or permutations <= {dims.exchanging}:
            return False
        wanted = {permutation[-1] for permutation in orders if permutation is not None}
        (left, right), contracted = product.invars, product.params["dimension_numbers"][0]
        own = self._moved_bytes(left, contracted[0]) + _turned_bytes(product, wanted, dims.rank - 1)
        other = self._moved_bytes(right, contracted[1]) + _turned_bytes(product, wanted, dims.batch + dims.left - 1)
        return other < own

    def _moved_bytes(self, left: Any, contracted: Sequence[int]) -> float:
        """What is moved of an operand so that it can be the left one: all of it, unless a contracted dimension lies
        innermost. The right one can lie either way."""
        return 0.0 if self._lie(left).innermost in contracted else float(size_bytes(left))


def _readers(jaxpr: jex.Jaxpr) -> _Readers:
    found: _Readers = {}
    for equation in jaxpr.eqns:
        for v in equation.invars:
            if isinstance(v, jex.Var):
                found.setdefault(v, []).append(equation)
    for v in jaxpr.outvars:
        if isinstance(v, jex.Var):
            found.setdefault(v, []).append(None)
    return found


class _Dims(NamedTuple):
    """How many dimensions a product batches over, leaves of either operand, and contracts."""

    batch: int
    left: int
    right: int
    contracted: int

    @classmethod
    def of(cls, product: jex.JaxprEqn) -> "_Dims":
        (contracted, _), (batch, _) = product.params["dimension_numbers"]
        left, right = (len(shape_of(v)) - len(batch) - len(contracted) for v in product.invars)
        return cls(len(batch), left, right, len(contracted))

    @property
    def rank(self) -> int:
        """Of the result."""
        return self.batch + self.left + self.right

    @property
    def exchanging(self) -> tuple[int, ...]:
        """The permutation that puts what is left of the right operand in front of what is left of the left one."""
        behind = self.batch + self.left
        return (*range(self.batch), *range(behind, self.rank), *range(self.batch, behind))


def _transpositions(v: Any, readers: _Readers) -> Iterator[tuple[int, ...] | None]:
    """The permutations of those that transpose a value; None for what reads it otherwise."""
    for reader in readers.get(v, [None]):
        if reader is None:
            yield None
        elif reader.primitive.name == "transpose":
            yield tuple(reader.params["permutation"])
        elif reader.primitive.name in _UNARY:
            yield from _transpositions(reader.outvars[0], readers)
        elif is_checkpoint(reader) and (called := called_jaxpr(reader)) is not None:
            inner = open_jaxpr(called[1])
            inside = _readers(inner)
            for own, given in zip(inner.invars, reader.invars, strict=True):
                if given is v:
                    yield from _transpositions(own, inside)
        else:
            yield None


def _turned_bytes(product: jex.JaxprEqn, wanted: Collection[int], last: int) -> float:
    """What is moved of the result if its dimension `last` lies innermost, whereas readers put `wanted` there."""
    (result,) = product.outvars
    is_turned = any(d != last for d in wanted) and shape_of(result)[last] < _SHORT_ROW
    return float(size_bytes(result)) if is_turned else 0.0


def _moved(product: jex.JaxprEqn) -> tuple[int, ...]:
    """For each dimension of a product's result, where it is once operands are exchanged."""
    dims = _Dims.of(product)
    behind = dims.batch + dims.right
    return (*range(dims.batch), *range(behind, dims.rank), *range(dims.batch, behind))


def _exchanged(product: jex.JaxprEqn, result: Any) -> jex.JaxprEqn:
    """The product with its operands exchanged; `result`: the variable of what it makes."""
    contracted, batch = product.params["dimension_numbers"]
    precision = product.params["precision"]
    params = {
        **product.params,
        "dimension_numbers": (contracted[::-1], batch[::-1]),
        "precision": None if precision is None else precision[::-1],
    }
    return product.replace(invars=[*product.invars[::-1]], outvars=[result], params=params)

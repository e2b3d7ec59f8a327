"""What a traced update does to the rows of tables, equation by equation.

Each value of the program is in one of two states: it has the rows of one table as its first dimension, each made from
that table's rows of the same number alone; or it has no rows. The rules of the trace (`FactorRule`) tell which
dimension carries the row on. Where rows would be added up, that is exact for the rows of a batch alone only if all
other rows add zero; so it is also followed which values are zero in rows that no id names, where the gradient is zero,
and which are still a leaf of the state as it was.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from autoshard.trace.rules import rule_of, signature_of
from autoshard.trace.rules.elementwise import ARITHMETIC, CONVERSION, LATER_ARITHMETIC
from autoshard.trace.walk import EquationKind, called_jaxpr, called_operands, kind_of, open_jaxpr, shape_of


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """What is known of a value.

    Attributes:
      table: The table whose rows are its first dimension; None if it has no rows.
      is_even: Of a value without rows: whether its first dimension, if it has any, holds the same all along.
      is_zero: Whether it is zero where the gradient is, and there only; of a value without rows: everywhere.
      is_true: Likewise, true.
      leaf: The leaf of the state that it still is where the gradient is zero; its number.
      number: What all its elements are, of a constant without rows.
    """

    table: int | None = None
    is_even: bool = False
    is_zero: bool = False
    is_true: bool = False
    leaf: int | None = None
    number: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Coupling:
    """An equation that cannot be run on some rows alone.

    Attributes:
      equation: The equation. why: What it does.
    """

    equation: jex.JaxprEqn
    why: str


class CoupledRows(Exception):
    """Raised where rows of a table depend on each other; holds a `Coupling`."""

    def __init__(self, coupling: Coupling):
        super().__init__(coupling.why)
        self.coupling = coupling


class RowFlow:
    """Follows rows through a program.

    Attributes:
      sums: Equations that add up rows, exactly, since those that no id names add zero.
    """

    def __init__(self, dtypes: Sequence[Any]):
        """
        Args:
          dtypes: Of the leaves of the state, by number.
        """
        self.sums: list[jex.JaxprEqn] = []
        self._dtypes = dtypes
        self._rules: dict[Any, Any] = {}

    def through(self, jaxpr: jex.Jaxpr, inputs: Sequence[Flow], consts: Sequence[Any]) -> list[Flow]:
        """What is known of the results of a program.

        Raises:
          CoupledRows: Rows depend on each other.
        """
        env: dict[Any, Flow] = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {v: _constant(c) for v, c in zip(jaxpr.constvars, consts, strict=False)}
        read = lambda v: _constant(v.val) if isinstance(v, jex.Literal) else env.get(v, Flow())
        for equation in jaxpr.eqns:
            flows = self._equation(equation, [read(v) for v in equation.invars])
            env.update(zip(equation.outvars, flows, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, equation: jex.JaxprEqn, flows: list[Flow]) -> Sequence[Flow]:
        kind = kind_of(equation)
        called = called_jaxpr(equation) if kind is EquationKind.CALL else None
        if called is not None and equation.primitive.name != "custom_linear_solve":
            consts = called[1].consts if isinstance(called[1], jex.ClosedJaxpr) else ()
            return self.through(open_jaxpr(called[1]), called_operands(equation, flows), consts)
        tables = {flow.table for flow in flows} - {None}
        if kind is not EquationKind.LEAF:
            if tables:
                raise CoupledRows(Coupling(equation, f"it reads them inside a `{equation.primitive.name}`"))
            return [Flow()] * len(equation.outvars)
        if not tables:
            number = flows[0].number if flows and equation.primitive.name in _KEEPING else None
            even, zero = _is_even(equation, flows), _is_zero(equation, flows)
            return [Flow(is_even=even, is_zero=zero, number=number)] * len(equation.outvars)
        if len(tables) > 1:
            raise CoupledRows(Coupling(equation, "it joins the rows of several tables"))
        return self._rows(equation, flows, tables.pop())

    def _rows(self, equation: jex.JaxprEqn, flows: Sequence[Flow], table: int | None) -> Sequence[Flow]:
        """An equation that reads rows of one table."""
        rule = self._rule(equation)
        refuse = lambda why: CoupledRows(Coupling(equation, why))
        heads = [rule.operands[i][0] for i, flow in enumerate(flows) if flow.table is not None]
        if len(set(heads)) != 1 or len(heads[0]) != 1:
            raise refuse("it treats rows differently, or all at once")
        (row,) = heads[0]
        for i, flow in enumerate(flows):
            places = [d for d, factors in enumerate(rule.operands[i]) if row in factors]
            if flow.table is None and places and not (places == [0] and flow.is_even):
                raise refuse("it joins them with what differs from row to row, such as random numbers")
            if flow.table is not None and places != [0]:
                raise refuse("it pairs rows with each other")
        reduction = rule.factors[row].reduction
        if reduction is None:
            if any(not dims or dims[0] != (row,) for dims in rule.results):
                raise refuse("it moves rows to another dimension")
            same = _leaf(equation, flows, self._dtypes)
            zero, true = _is_zero(equation, flows), _is_true(equation, flows)
            return [Flow(table, is_zero=zero, is_true=true, leaf=same)] * len(equation.outvars)
        if not (reduction == "add" and any(f.is_zero for f in flows) or reduction == "and" and flows[0].is_true):
            raise refuse("it brings all of them together")
        self.sums.append(equation)
        return [Flow()] * len(equation.outvars)

    def _rule(self, equation: jex.JaxprEqn) -> Any:
        signature = signature_of(equation)
        if signature not in self._rules:
            self._rules[signature] = rule_of(equation)
        return self._rules[signature]


def _constant(value: Any) -> Flow:
    try:
        array = np.asarray(value)
        is_even = array.ndim == 0 or bool((array == array[:1]).all())
        return Flow(is_even=is_even, is_zero=not array.any(), number=float(array) if array.ndim == 0 else None)
    except (TypeError, ValueError):  # a random key
        return Flow()


def _is_even(equation: jex.JaxprEqn, flows: Sequence[Flow]) -> bool:
    """Whether the first dimension of a result without rows holds the same all along."""
    if equation.primitive.name == "broadcast_in_dim":
        (operand, *_), placed = equation.invars, equation.params["broadcast_dimensions"]
        return 0 not in placed or shape_of(operand)[placed.index(0)] == 1 or flows[0].is_even and placed[0] == 0
    shape = shape_of(equation.outvars[0])
    alike = all(shape_of(v) in ((), shape) and (not shape_of(v) or f.is_even) for v, f in _operands(equation, flows))
    return alike and equation.primitive.name in _BY_ELEMENT


def _operands(equation: jex.JaxprEqn, flows: Sequence[Flow]) -> list[tuple[Any, Flow]]:
    return list(zip(equation.invars, flows, strict=True))


_BY_ELEMENT = ARITHMETIC | CONVERSION | LATER_ARITHMETIC
_PRODUCTS = frozenset({"mul", "dot_general", "and"})
_KEEPING = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "stop_gradient"})
_SUMS = frozenset({"add", "add_any", "sub", "max", "min", "or"})
_OF_FIRST = frozenset(
    """abs asinh atan broadcast_in_dim cbrt convert_element_type copy cumsum div erf expm1 log1p neg reduce_max
    reduce_min reduce_precision reduce_sum reshape sign sin sinh sqrt square squeeze stop_gradient tan tanh
    transpose""".split()
)
"""Primitives that make zero of a first operand that is zero; all operands are finite."""


def _is_zero(equation: jex.JaxprEqn, flows: Sequence[Flow]) -> bool:
    name = equation.primitive.name
    if name in _PRODUCTS:
        return any(f.is_zero for f in flows)
    if name in _SUMS and all(f.is_zero for f in flows):
        return True
    if name in ("max", "min"):  # a bound on one side, as where gradients are clipped
        bounds = [f.number for f in flows if f.number is not None]
        return any(f.is_zero for f in flows) and any(b <= 0 if name == "max" else b >= 0 for b in bounds)
    if name == "clamp":
        low, value, high = flows
        is_around = None not in (low.number, high.number) and (low.number or 0) <= 0 <= (high.number or 0)
        return value.is_zero and is_around
    if name in _OF_FIRST:
        return flows[0].is_zero
    if name == "integer_pow":
        return flows[0].is_zero and equation.params["y"] > 0
    if name == "pow":
        return flows[0].is_zero and (flows[1].number or 0) > 0
    return name == "select_n" and all(f.is_zero for f in flows[1:])


def _is_true(equation: jex.JaxprEqn, flows: Sequence[Flow]) -> bool:
    name = equation.primitive.name
    if name == "is_finite":
        return flows[0].is_zero
    return name in ("and", "copy", "reduce_and") and all(f.is_true for f in flows)


def _leaf(equation: jex.JaxprEqn, flows: Sequence[Flow], dtypes: Sequence[Any]) -> int | None:
    """The leaf of the state that a result with rows still is."""
    name, first = equation.primitive.name, flows[0].leaf
    if name in ("add", "add_any") and first is None and flows[0].is_zero:
        return flows[1].leaf
    if name in ("add", "add_any", "sub"):
        return first if flows[1].is_zero else None
    if name == "select_n":
        kept = {f.leaf for f in flows[1:]}
        return kept.pop() if len(kept) == 1 else None
    if name == "mul":
        return first if flows[1].number == 1 else flows[1].leaf if flows[0].number == 1 else None
    if name in ("copy", "stop_gradient"):
        return first
    if name == "convert_element_type" and first is not None:
        wide = equation.params["new_dtype"]
        return first if jnp.promote_types(dtypes[first], wide) == wide else None
    return None

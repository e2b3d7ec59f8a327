"""Rows of an initial state, some at a time, the same as the whole: tables that are never whole anywhere.

The program that makes the state is traced. What a row of an array is made of is followed back through it: arithmetic by
element, broadcasts, and random bits, which JAX draws from a counter for each element (Threefry, partitionable), so that
those of some rows can be drawn alone.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from autoshard.errors import TraceError
from autoshard.tables.state_rows import RowLeaf
from autoshard.trace.inline import inlined
from autoshard.trace.rules.elementwise import ARITHMETIC, CONVERSION, LATER_ARITHMETIC
from autoshard.trace.source import optimizer_line
from autoshard.trace.walk import EquationKind, called_jaxpr, kind_of, open_jaxpr, shape_of, type_of, variables

_BY_ELEMENT = ARITHMETIC | CONVERSION | LATER_ARITHMETIC | {"bitcast_convert_type"}


@dataclasses.dataclass(frozen=True)
class InitialState:
    """A state that is made in pieces.

    Attributes:
      rows: From the number of a row leaf, the first row, and how many, to these rows; how many should be the same in
        most calls, since each number makes a program.
      dense: Makes the state with `capacities` rows, which are zero, in place of each row leaf.
    """

    rows: Callable[[int, int, int], jax.Array]
    dense: Callable[[], Any]


def initial_state(make: Callable[[], Any], leaves: Sequence[RowLeaf], capacities: Sequence[int]) -> InitialState:
    """The pieces of the state that `make()` would make.

    Args:
      make: Makes the state; it is traced only.
      leaves: Of the state, those with rows of tables. capacities: Places for rows of each table.

    Raises:
      TraceError: Rows of a leaf cannot be made by themselves, as of an orthogonal matrix; names the line.
    """
    closed, shapes = jax.make_jaxpr(make, return_shape=True)()
    closed, tree = inlined(closed), jax.tree.structure(shapes)
    skipped = {leaf.index: leaf for leaf in leaves}

    def dense() -> Any:
        whole = _Rows(closed, 0, 0, 1)
        made = [
            jnp.zeros((capacities[skipped[i].table], *skipped[i].row_shape), type_of(v).dtype)
            if i in skipped
            else whole.value(v)
            for i, v in enumerate(closed.jaxpr.outvars)
        ]
        return jax.tree.unflatten(tree, made)

    programs: dict[tuple[int, int], Any] = {}

    def rows(number: int, first: int, count: int) -> jax.Array:
        if (number, count) not in programs:
            v = closed.jaxpr.outvars[leaves[number].index]
            run = lambda high, low, v=v: _Rows(closed, high, low, count).rows(v)
            programs[number, count] = jax.jit(run)
        return programs[number, count](np.uint32(first >> 32), np.uint32(first & 0xFFFFFFFF))

    for number in range(len(leaves)):
        jax.eval_shape(lambda n=number: _Rows(closed, 0, 0, 1).rows(closed.jaxpr.outvars[leaves[n].index]))
    return InitialState(rows, jax.jit(dense))


class _Rows:
    """Evaluates values of a program whole, or some rows of them."""

    def __init__(self, closed: jex.ClosedJaxpr, high: Any, low: Any, count: int):
        """
        Args:
          closed: The program, without arguments. high, low: The first row, as two halves of 32 bits. count: Rows.
        """
        self._first, self._count = (jnp.uint32(high), jnp.uint32(low)), count
        self._maker = {v: e for e in closed.jaxpr.eqns for v in variables(e.outvars)}
        self._whole: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self._some: dict[Any, Any] = {}

    def value(self, v: Any) -> Any:
        """A value, whole."""
        if isinstance(v, jex.Literal):
            return jnp.asarray(v.val, type_of(v).dtype)
        if v not in self._whole:
            equation = self._maker[v]
            self._keep(self._whole, equation, [self.value(u) for u in equation.invars], equation.params)
        return self._whole[v]

    def rows(self, v: Any) -> Any:
        """Rows of a value, whose first dimension they are."""
        if v in self._some:
            return self._some[v]
        if isinstance(v, jex.Literal) or v not in self._maker:
            return jax.lax.dynamic_slice_in_dim(self.value(v), self._first[1].astype(jnp.int32), self._count)
        equation = self._maker[v]
        name, params, shape = equation.primitive.name, equation.params, shape_of(v)
        called = called_jaxpr(equation) if kind_of(equation) is EquationKind.CALL else None
        if name in _BY_ELEMENT and len(shape_of(equation.invars[0])) in (0, len(shape)):
            operands = [self.rows(u) if shape_of(u)[:1] == shape[:1] else self.value(u) for u in equation.invars]
            self._keep(self._some, equation, operands, params)
        elif called is not None:
            self._call(equation, open_jaxpr(called[1]), shape[0])
        elif name == "broadcast_in_dim":
            self._some[v] = self._broadcast(equation, shape)
        elif name == "random_bits" and len(shape_of(equation.invars[0])) == 0:
            self._some[v] = self._bits(equation, shape)
        elif name == "iota" and params["dimension"] == 0:
            own = jax.lax.broadcasted_iota(params["dtype"], (self._count, *shape[1:]), 0)
            self._some[v] = own + self._first[1].astype(params["dtype"])
        elif name == "reshape" and shape_of(equation.invars[0])[:1] == shape[:1] and params["dimensions"] is None:
            self._some[v] = self.rows(equation.invars[0]).reshape(self._count, *shape[1:])
        else:
            line = optimizer_line(equation)
            raise TraceError(
                "Rows of a table in host memory are made some at a time, but the initial state makes them all at once "
                f"by `{name}`{f' at {line}' if line else ''}. Initialise tables element by element (normal, uniform, "
                "truncated normal, constants), or give the state as arrays."
            )
        return self._some[v]

    def _call(self, equation: jex.JaxprEqn, inner: jex.Jaxpr, num_rows: int) -> None:
        """A function with a derivative of its own, or a checkpoint: its equations are followed like others."""
        for v, u in zip(inner.invars, equation.invars, strict=True):
            if shape_of(u)[:1] == (num_rows,):
                self._some[v] = self.rows(u)
            else:
                self._whole[v] = self.value(u)
        self._maker |= {v: e for e in inner.eqns for v in variables(e.outvars)}
        for v, u in zip(equation.outvars, inner.outvars, strict=True):
            self._some[v] = self.rows(u)

    def _keep(self, to: dict[Any, Any], equation: jex.JaxprEqn, operands: Sequence[Any], params: Any) -> None:
        made = equation.primitive.bind(*operands, **params)
        to.update(zip(equation.outvars, made if equation.primitive.multiple_results else [made], strict=True))

    def _broadcast(self, equation: jex.JaxprEqn, shape: Sequence[int]) -> Any:
        operand, placed = equation.invars[0], equation.params["broadcast_dimensions"]
        is_of_rows = 0 in placed and shape_of(operand)[placed.index(0)] == shape[0] and placed.index(0) == 0
        value = self.rows(operand) if is_of_rows else self.value(operand)
        return jax.lax.broadcast_in_dim(value, (self._count, *shape[1:]), placed)

    def _bits(self, equation: jex.JaxprEqn, shape: Sequence[int]) -> Any:
        """Random bits of some rows: Threefry of each element's number, as `jax.random.bits` draws them."""
        width, row_size = equation.params["bit_width"], math.prod(shape[1:])
        key = self.value(equation.invars[0])
        is_default = str(jax.random.key_impl(key)) in ("threefry2x32", "fry")
        if not (is_default and jax.config.jax_threefry_partitionable):  # pyright: ignore[reportAttributeAccessIssue]
            raise TraceError(
                "Rows of a table in host memory are drawn some at a time, which needs JAX's default random numbers; "
                f"received keys of {jax.random.key_impl(key)}. Use threefry2x32 with jax_threefry_partitionable, or "
                "give the state as arrays."
            )
        data = jax.random.key_data(key)
        high, low = _product(self._first, row_size)
        own = jnp.arange(self._count * row_size, dtype=jnp.uint32)
        counts_low = low + own
        counts_high = high + (counts_low < own).astype(jnp.uint32)
        a, b = threefry2x32_p.bind(data[0], data[1], counts_high, counts_low)
        dtype = type_of(equation.outvars[0]).dtype
        bits = (a.astype(dtype) << 32) | b.astype(dtype) if width == 64 else (a ^ b).astype(dtype)
        return bits.reshape(self._count, *shape[1:])


def _product(number: tuple[Any, Any], factor: int) -> tuple[Any, Any]:
    """A number of 64 bits, in halves, times one of less than 32 bits."""
    mask = jnp.uint32(0xFFFF)
    high, low = number
    f_low, f_high = jnp.uint32(factor & 0xFFFF), jnp.uint32(factor >> 16)
    l_low, l_high = low & mask, low >> 16
    first = l_low * f_low
    middle = l_high * f_low + (first >> 16)
    cross = l_low * f_high + (middle & mask)
    result_low = (cross << 16) | (first & mask)
    result_high = high * jnp.uint32(factor) + l_high * f_high + (middle >> 16) + (cross >> 16)
    return result_high, result_low

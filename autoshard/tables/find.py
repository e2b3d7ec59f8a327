"""Finds embedding tables: parameters that a loss reads by gathers of whole rows, with ids from the batch alone."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.lax import GatherScatterMode

from autoshard.tables.look_ups import LookUp, NotATable, Table, Tables
from autoshard.tables.traced_loss import TracedLoss, trace_loss
from autoshard.trace.rules.elementwise import ARITHMETIC, CONVERSION, LATER_ARITHMETIC
from autoshard.trace.source import SourceLines
from autoshard.trace.walk import EquationKind, kind_of, shape_of, variables
from autoshard.train_step import TrainStep

_BY_ELEMENT = ARITHMETIC | CONVERSION | LATER_ARITHMETIC


def find_tables(step: TrainStep, state: Any, batch: Any) -> Tables:
    """The embedding tables of the loss of a training step.

    A table is a floating-point parameter of two rows or more that is read by gathers of whole rows along its first
    dimension (`nnx.Embed`, `jnp.take(table, ids, axis=0)`, `table[ids]`), also behind a conversion or other arithmetic
    with scalars, and by nothing else. The ids may be computed in any way, from the batch alone.

    Args:
      step: The training step. state, batch: Its arguments, arrays or shapes.
    """
    loss = trace_loss(step, state.params, state.mutable, batch, jax.eval_shape(step.key, state))
    return found_in(loss).tables


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """How the program of a loss reads one table.

    Attributes:
      table: The table.
      by_element: Numbers of the equations between the parameter and its gathers, in their order.
      gathers: Numbers of the gathers, one for each look-up.
    """

    table: Table
    by_element: tuple[int, ...]
    gathers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The tables of a loss, and where its program reads them."""

    tables: Tables
    readings: tuple[Reading, ...]


def found_in(loss: TracedLoss) -> Found:
    """The tables of a traced loss; see `find_tables`."""
    jaxpr = loss.closed.jaxpr
    finder = _Finder(jaxpr, _sources(loss))
    readings: list[Reading] = []
    refused: list[NotATable] = []
    dense_bytes = 0
    for index, (v, path) in enumerate(zip(loss.params, loss.paths, strict=True)):
        found = finder.read(v, index, path)
        if isinstance(found, Reading):
            readings.append(found)
            continue
        dense_bytes += math.prod(shape_of(v)) * getattr(v.aval.dtype, "itemsize", 8)
        if found is not None:
            refused.append(NotATable(path, shape_of(v), found))
    tables = Tables(tuple(reading.table for reading in readings), tuple(refused), dense_bytes)
    return Found(tables, tuple(readings))


def _sources(loss: TracedLoss) -> dict[Any, set[str]]:
    """By variable: what it depends on."""
    inputs = loss.closed.jaxpr.invars
    first = len(loss.paths)
    kinds = ["parameters"] * first + ["mutable state"] * loss.num_mutable + ["batch"] * loss.num_batch
    kinds += ["random numbers"] * (len(inputs) - len(kinds))
    sources: dict[Any, set[str]] = {v: {kind} for v, kind in zip(inputs, kinds, strict=True)}
    for equation in loss.closed.jaxpr.eqns:
        read = set().union(*(sources.get(v, set()) for v in variables(equation.invars)))
        sources.update(dict.fromkeys(variables(equation.outvars), read))
    return sources


class _Finder:
    """Follows each parameter to the equations that read it."""

    def __init__(self, jaxpr: jex.Jaxpr, sources: Mapping[Any, set[str]]):
        self._jaxpr, self._sources, self._lines = jaxpr, sources, SourceLines()
        self._readers: dict[Any, list[int]] = collections.defaultdict(list)
        for number, equation in enumerate(jaxpr.eqns):
            for v in dict.fromkeys(variables(equation.invars)):
                self._readers[v].append(number)
        self._returned = set(variables(jaxpr.outvars))

    def read(self, parameter: Any, index: int, path: str) -> Reading | str | None:
        """How a parameter is read; why it is no table, if it is looked up all the same; None if it is not."""
        whole: list[str] = []
        by_element: list[int] = []
        gathers: list[int] = []
        following = [parameter]
        while following:
            v = following.pop()
            if v in self._returned:
                whole.append("the loss returns it whole")
            for number in self._readers[v]:
                equation = self._jaxpr.eqns[number]
                if equation.primitive.name == "gather" and equation.invars[0] is v and v not in equation.invars[1:]:
                    gathers.append(number)
                elif _is_by_element(equation, v):
                    by_element.append(number)
                    following += variables(equation.outvars)
                else:
                    whole.append(self._whole(equation, v))
        if not gathers:
            return None
        reason = self._unfit(parameter, sorted(gathers)) or next(iter(whole), None)
        if reason is not None:
            return reason
        aval = parameter.aval
        look_ups = tuple(self._look_up(self._jaxpr.eqns[number]) for number in sorted(gathers))
        itemsize = aval.dtype.itemsize
        table = Table(path, index, aval.shape[0], tuple(aval.shape[1:]), str(aval.dtype), itemsize, look_ups)
        return Reading(table, tuple(sorted(by_element)), tuple(sorted(gathers)))

    def _at(self, equation: jex.JaxprEqn) -> str:
        line = self._lines.of(equation)
        return f" at {line}" if line else ""

    def _whole(self, equation: jex.JaxprEqn, v: Any) -> str:
        name, where = equation.primitive.name, self._at(equation)
        if kind_of(equation) is not EquationKind.LEAF:
            return f"it is also read inside a `{name}`{where}, where look-ups are not followed; look up outside of it"
        if name in ("dot_general", "transpose"):
            return f"it is also read whole by `{name}`{where}, as tied output weights are; give that its own parameter"
        if name == "gather" and v in equation.invars[1:]:
            return f"it is also used as ids{where}"
        return f"it is also read whole by `{name}`{where}; read its looked-up rows there"

    def _unfit(self, parameter: Any, gathers: Sequence[int]) -> str | None:
        """Why these look-ups make no table of a parameter; None if they do."""
        shape = shape_of(parameter)
        if shape[0] < 2:
            return "it has a single row"
        if not jax.numpy.issubdtype(parameter.aval.dtype, jax.numpy.floating):
            return f"its elements are {parameter.aval.dtype}, which are not trained"
        for number in gathers:
            equation = self._jaxpr.eqns[number]
            numbers, sizes = equation.params["dimension_numbers"], tuple(equation.params["slice_sizes"])
            where = self._at(equation)
            if (
                tuple(numbers.start_index_map) != (0,)
                or tuple(numbers.collapsed_slice_dims) != (0,)
                or numbers.operand_batching_dims
                or sizes != (1, *shape[1:])
            ):
                return f"parts of rows, or several dimensions at once, are looked up{where}; look up whole rows"
            if equation.params["mode"] not in _MODES:
                return f"it is looked up with the mode {equation.params['mode']}{where}; use `clip` or `fill`"
            others = set().union(*(self._sources.get(v, set()) for v in variables(equation.invars[1:]))) - {"batch"}
            if others:
                return f"its ids{where} depend on {' and '.join(sorted(others))}; compute them from the batch alone"
        return None

    def _look_up(self, equation: jex.JaxprEqn) -> LookUp:
        fills = equation.params["mode"] == GatherScatterMode.FILL_OR_DROP
        return LookUp(shape_of(equation.invars[1])[:-1], fills, self._lines.of(equation))


_MODES = (GatherScatterMode.CLIP, GatherScatterMode.FILL_OR_DROP, GatherScatterMode.PROMISE_IN_BOUNDS)


def _is_by_element(equation: jex.JaxprEqn, v: Any) -> bool:
    """Whether an equation does the same to every element of `v`, with scalars besides."""
    if equation.primitive.name not in _BY_ELEMENT or len(equation.outvars) != 1:
        return False
    others = [shape_of(u) for u in equation.invars if u is not v]
    return shape_of(equation.outvars[0]) == shape_of(v) and not any(others)

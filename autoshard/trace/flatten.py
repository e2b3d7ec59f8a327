"""Flattens a jaxpr into the values, operations and loops of the unified graph.

Calls (`jit`, `custom_vjp`, `checkpoint`, ...) are inlined. A loop's body appears once, with its trip count; the carry
is an operation of its own whose single layout holds before, inside and after the loop. Opaque regions (`shard_map`,
Pallas) stay one operation with their own shardings.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from autoshard.errors import TraceError
from autoshard.graph.graph import (
    Argument,
    Factor,
    FactorRule,
    FixedLayout,
    Graph,
    Loop,
    Operation,
    OperationKind,
    Output,
    Value,
    ValueKind,
)
from autoshard.trace.annotations import constraint_layout, shard_map_layouts
from autoshard.trace.rules import rule_of, signature_of
from autoshard.trace.source import source_of
from autoshard.trace.walk import EquationKind, called_jaxpr, kind_of, open_jaxpr, scan_counts


@dataclasses.dataclass(frozen=True, slots=True)
class TraceOptions:
    """How to read what a program leaves open.

    Attributes:
      while_trips: Trip count assumed for a `while` loop, which a program does not state.
    """

    while_trips: float = 1.0


def _identity_rule(shape: Sequence[int], arity: int, results: int = 1) -> FactorRule:
    """One factor a dimension, the same for all operands and results."""
    factors = tuple(Factor(d) for d in shape)
    dims = tuple((i,) if d > 1 else () for i, d in enumerate(shape))
    return FactorRule(factors, (dims,) * arity, (dims,) * results, 0.0, False, "table")


def _stack_rule(shape: Sequence[int], stacked_is_operand: bool) -> FactorRule:
    """Slice of or stacking into an array with one more, leading dimension, which stays whole."""
    inner = _identity_rule(shape, 1)
    stacked = ((), *inner.operands[0])
    operands, results = ((stacked,), inner.results) if stacked_is_operand else (inner.operands, (stacked,))
    return FactorRule(inner.factors, operands, results, 0.0, False, "table")


def _whole_rule(equation: jex.JaxprEqn, origin: str) -> FactorRule:
    """Everything whole."""
    whole = lambda v: ((),) * len(getattr(v.aval, "shape", ()))
    return FactorRule((), tuple(map(whole, equation.invars)), tuple(map(whole, equation.outvars)), 0.0, True, origin)


class Flattener:
    """Collects values and operations while it walks a jaxpr. Its lists are frozen into a `Graph` by `finish`."""

    def __init__(self, options: TraceOptions):
        self.options = options
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.loops: list[Loop] = []
        self.equations: list[str] = []
        self.rules: dict[Any, FactorRule] = {}
        self.text: dict[Any, str] = {}
        self.unknown: list[str] = []
        self.callers: list[str] = []
        self.controls: dict[int, int] = {}
        """For a carry or join, the value that decides how often the loop runs or which branch does."""

    def new_value(self, aval: Any, name: str | None = None, kind: ValueKind = ValueKind.INTERMEDIATE) -> int:
        index = len(self.values)
        shape = tuple(getattr(aval, "shape", ()))
        dtype = getattr(aval, "dtype", None)
        if any(not isinstance(d, int | np.integer) for d in shape):
            raise TraceError(f"Every dimension must have a static size, but a tensor of shape {shape} does not.")
        if dtype is None or not hasattr(dtype, "itemsize"):
            itemsize, dtype_name = 0, str(dtype)
        elif jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            itemsize, dtype_name = 8, str(dtype)
        else:
            itemsize, dtype_name = int(dtype.itemsize), str(dtype)
        self.values.append(Value(index, name or f"%{index}", shape, dtype_name, itemsize, kind))
        return index

    def add(
        self,
        equation: int,
        kind: OperationKind,
        name: str,
        operands: Sequence[int | None],
        results: Sequence[int | None],
        rule: FactorRule,
        trips: float,
        source: str,
        fixed_operands=None,
        fixed_results=None,
        slot: int = 0,
    ) -> None:
        self.operations.append(
            Operation(
                len(self.operations),
                equation,
                kind,
                name,
                tuple(operands),
                tuple(results),
                rule,
                trips,
                source,
                fixed_results,
                fixed_operands,
                slot,
            )
        )

    def run(self, jaxpr: jex.Jaxpr, inputs: Sequence[int | None], trips: float) -> list[int | None]:
        """Flattens `jaxpr` on the given values (constvars first); returns the values of its outputs."""
        env: dict[Any, int | None] = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
        read = lambda v: None if isinstance(v, jex.Literal) else env[v]
        for equation in jaxpr.eqns:
            operands = [read(v) for v in equation.invars]
            number = len(self.equations)
            match kind_of(equation):
                case EquationKind.CALL:
                    self.equations.append(f"call {equation.primitive.name}")
                    _, nested = called_jaxpr(equation)
                    with self.called_from(source_of(equation)):
                        results = self.call(nested, operands, trips)
                case EquationKind.SCAN:
                    self.equations.append(f"scan length={equation.params['length']}")
                    results = self.scan(equation, number, operands, trips)
                case EquationKind.WHILE:
                    self.equations.append("while")
                    results = self.while_loop(equation, number, operands, trips)
                case EquationKind.COND:
                    self.equations.append(f"cond branches={len(equation.params['branches'])}")
                    results = self.cond(equation, number, operands, trips)
                case EquationKind.OPAQUE:
                    results = self.opaque(equation, number, operands, trips)
                case EquationKind.LEAF:
                    results = self.leaf(equation, number, operands, trips)
            for v, r in zip(equation.outvars, results, strict=True):
                if not isinstance(v, jex.DropVar):
                    env[v] = r
        return [read(v) for v in jaxpr.outvars]

    def source(self, equation: jex.JaxprEqn) -> str:
        """The user's line of an equation; for library code, that of the nearest call around it that has one."""
        return source_of(equation) or next((line for line in reversed(self.callers) if line), "")

    @contextlib.contextmanager
    def called_from(self, line: str) -> Iterator[None]:
        """While a nested program is flattened: the line that calls it."""
        self.callers.append(line)
        yield
        self.callers.pop()

    def call(
        self, nested: jex.Jaxpr | jex.ClosedJaxpr, operands: Sequence[int | None], trips: float
    ) -> list[int | None]:
        inner = open_jaxpr(nested)
        constants = [self.new_value(v.aval, "constant", ValueKind.CONSTANT) for v in inner.constvars]
        return self.run(inner, [*constants, *operands], trips)

    def leaf(
        self, equation: jex.JaxprEqn, number: int, operands: Sequence[int | None], trips: float
    ) -> list[int | None]:
        signature = signature_of(equation)
        rule = self.rules.get(signature)
        source = self.source(equation)
        if rule is None:
            rule = self.rules[signature] = rule_of(equation)
            self.text[signature] = describe(equation)
            if rule.origin == "replicated" and any(
                math.prod(getattr(v.aval, "shape", ())) > 1 for v in equation.invars
            ):
                self.unknown.append(f"{equation.primitive.name} at {source or 'an unknown line'}")
        self.equations.append(self.text[signature])
        results = [None if isinstance(v, jex.DropVar) else self.new_value(v.aval) for v in equation.outvars]
        fixed = None
        if equation.primitive.name == "sharding_constraint":
            fixed = (constraint_layout(equation),)
        self.add(
            number, OperationKind.EQUATION, equation.primitive.name, operands, results, rule, trips, source, None, fixed
        )
        return results

    def opaque(
        self, equation: jex.JaxprEqn, number: int, operands: Sequence[int | None], trips: float
    ) -> list[int | None]:
        self.equations.append(describe(equation))
        source = self.source(equation)
        results = [None if isinstance(v, jex.DropVar) else self.new_value(v.aval) for v in equation.outvars]
        if equation.primitive.name == "shard_map":
            fixed_operands, fixed_results = shard_map_layouts(equation)
            rule = _region_rule(equation, fixed_operands, fixed_results)
        else:
            rule, fixed_operands, fixed_results = _whole_rule(equation, "replicated"), None, None
            self.unknown.append(f"{equation.primitive.name} at {source or 'an unknown line'}")
        self.add(
            number,
            OperationKind.EQUATION,
            equation.primitive.name,
            operands,
            results,
            rule,
            trips,
            source,
            fixed_operands,
            fixed_results,
        )
        return results

    def carry(
        self, number: int, slot: int, initial: int | None, aval: Any, trips: float, source: str
    ) -> tuple[int, int, int]:
        """A loop-carried value, its back operand still open: (operation index, value inside, value after)."""
        inside, after = self.new_value(aval), self.new_value(aval)
        index = len(self.operations)
        self.add(
            number,
            OperationKind.LOOP_CARRY,
            "loop_carry",
            (initial, None),
            (inside, after),
            _identity_rule(aval.shape, 2, 2),
            trips,
            source,
            slot=slot,
        )
        return index, inside, after

    def close_carry(self, index: int, back: int | None) -> None:
        operation = self.operations[index]
        self.operations[index] = dataclasses.replace(operation, operands=(operation.operands[0], back))

    def scan(
        self, equation: jex.JaxprEqn, number: int, operands: Sequence[int | None], trips: float
    ) -> list[int | None]:
        p = equation.params
        inner, length = open_jaxpr(p["jaxpr"]), p["length"]
        n_consts, n_carry = scan_counts(equation)
        source = self.source(equation)
        consts, init, stacked = (
            operands[:n_consts],
            operands[n_consts : n_consts + n_carry],
            operands[n_consts + n_carry :],
        )
        inner_trips = trips * max(length, 1)
        start = len(self.operations)
        carries = [
            self.carry(number, n_consts + k, i, v.aval, trips, source)
            for k, (i, v) in enumerate(zip(init, inner.invars[n_consts : n_consts + n_carry], strict=True))
        ]
        slices: list[int | None] = []
        for slot, (whole, v) in enumerate(
            zip(stacked, inner.invars[n_consts + n_carry :], strict=True), n_consts + n_carry
        ):
            piece = self.new_value(v.aval)
            self.add(
                number,
                OperationKind.SCAN_SLICE,
                "scan_slice",
                (whole,),
                (piece,),
                _stack_rule(v.aval.shape, True),
                trips,
                source,
                slot=slot,
            )
            slices.append(piece)
        results = self.call(p["jaxpr"], [*consts, *(c[1] for c in carries), *slices], inner_trips)
        for (index, _, _), back in zip(carries, results[:n_carry], strict=True):
            self.close_carry(index, back)
        outputs: list[int | None] = [after for _, _, after in carries]
        stacks = zip(results[n_carry:], equation.outvars[n_carry:], inner.outvars[n_carry:], strict=True)
        for slot, (piece, v, inner_v) in enumerate(stacks, n_carry):
            if isinstance(v, jex.DropVar):
                outputs.append(None)
                continue
            whole = self.new_value(v.aval)
            self.add(
                number,
                OperationKind.SCAN_STACK,
                "scan_stack",
                (piece,),
                (whole,),
                _stack_rule(inner_v.aval.shape, False),
                inner_trips,
                source,
                slot=slot,
            )
            outputs.append(whole)
        self.loops.append(Loop(start, len(self.operations), float(length)))
        return outputs

    def while_loop(
        self, equation: jex.JaxprEqn, number: int, operands: Sequence[int | None], trips: float
    ) -> list[int | None]:
        p = equation.params
        n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
        source = self.source(equation)
        inner_trips = trips * self.options.while_trips
        start = len(self.operations)
        body = open_jaxpr(p["body_jaxpr"])
        carries = [
            self.carry(number, k, i, v.aval, trips, source)
            for k, (i, v) in enumerate(zip(operands[n_cond + n_body :], body.invars[n_body:], strict=True))
        ]
        inside = [c[1] for c in carries]
        (again,) = self.call(p["cond_jaxpr"], [*operands[:n_cond], *inside], inner_trips)
        if again is not None:
            self.controls.update((index, again) for index, _, _ in carries)
        results = self.call(p["body_jaxpr"], [*operands[n_cond : n_cond + n_body], *inside], inner_trips)
        for (index, _, _), back in zip(carries, results, strict=True):
            self.close_carry(index, back)
        self.loops.append(Loop(start, len(self.operations), self.options.while_trips))
        return [after for _, _, after in carries]

    def cond(
        self, equation: jex.JaxprEqn, number: int, operands: Sequence[int | None], trips: float
    ) -> list[int | None]:
        branches = equation.params["branches"]
        results = [self.call(branch, operands[1:], trips / len(branches)) for branch in branches]
        outputs: list[int | None] = []
        for k, v in enumerate(equation.outvars):
            if isinstance(v, jex.DropVar):
                outputs.append(None)
                continue
            joined = self.new_value(v.aval)
            if operands[0] is not None:
                self.controls[len(self.operations)] = operands[0]
            self.add(
                number,
                OperationKind.BRANCH_JOIN,
                "branch_join",
                [r[k] for r in results],
                (joined,),
                _identity_rule(v.aval.shape, len(branches)),
                trips,
                self.source(equation),
                slot=k,
            )
            outputs.append(joined)
        return outputs

    def finish(self, arguments: tuple[Argument, ...], outputs: tuple[Output, ...]) -> Graph:
        """Drops operations that no output needs, and freezes the graph."""
        needed: set[int] = {o.value for o in outputs if o.value is not None}
        keep = [False] * len(self.operations)
        changed = True
        while changed:  # more than one sweep only because a loop's back edge points forward
            changed = False
            for operation in reversed(self.operations):
                if keep[operation.index] or not any(r in needed for r in operation.results if r is not None):
                    continue
                keep[operation.index] = changed = True
                needed.update(o for o in operation.operands if o is not None)
                if operation.index in self.controls:
                    needed.add(self.controls[operation.index])
        position = np.concatenate([[0], np.cumsum(keep)]).astype(int)
        kept = [o for o in self.operations if keep[o.index]]
        operations = tuple(dataclasses.replace(o, index=i) for i, o in enumerate(kept))
        loops = tuple(
            Loop(int(position[l.start]), int(position[l.stop]), l.trips)
            for l in self.loops
            if position[l.stop] > position[l.start]
        )
        return Graph(
            tuple(self.values),
            operations,
            loops,
            arguments,
            outputs,
            tuple(self.equations),
            tuple(dict.fromkeys(self.unknown)),
        )


def _region_rule(equation: jex.JaxprEqn, operands: Sequence[FixedLayout], results: Sequence[FixedLayout]) -> FactorRule:
    """For a region with stated layouts: one factor for each mesh axis, which splits every dimension that names it."""
    sizes = dict(equation.params["mesh"].shape)
    used = {name for layout in (*operands, *results) for entry in layout for name in entry or ()}
    number = {name: i for i, name in enumerate(name for name in sizes if name in used)}
    dims = lambda layout: tuple(tuple(sorted(number[name] for name in entry or ())) for entry in layout)
    factors = tuple(Factor(sizes[name]) for name in number)
    return FactorRule(factors, tuple(map(dims, operands)), tuple(map(dims, results)), 0.0, True, "table")


def describe(equation: jex.JaxprEqn) -> str:
    """One equation's signature as text: primitive, operand types, result types."""
    aval = lambda v: v.aval.str_short(short_dtypes=True) if hasattr(v.aval, "str_short") else str(v.aval)
    return (
        f"{equation.primitive.name}({', '.join(aval(v) for v in equation.invars)})"
        f" -> {', '.join(aval(v) for v in equation.outvars)}"
    )

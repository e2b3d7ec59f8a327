"""Flattens a jaxpr into the values, operations and loops of the unified graph.

Calls (`jit`, `custom_vjp`, `checkpoint`, ...) are inlined. A loop's body appears once, with its trip count; the carry
is an operation of its own whose single layout holds before, inside and after the loop. What a program splits by hand
(`shard_map`) stays one operation with its own shardings, which tells what each device runs; Pallas kernels stay whole.
"""

import bisect
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex
import numpy as np

from autoshard.annotations.block import Block, joined_blocks
from autoshard.graph.graph import (
    Argument,
    Factor,
    FactorRule,
    FixedLayout,
    Graph,
    Loop,
    Nesting,
    Operation,
    OperationKind,
    Output,
    Region,
    Value,
    ValueKind,
)
from autoshard.trace.annotations import shard_map_layouts
from autoshard.trace.blocks import Blocks
from autoshard.trace.leaves import Leaf, Leaves, describe
from autoshard.trace.source import SourceLines
from autoshard.trace.walk import (
    EquationKind,
    called_operands,
    is_checkpoint,
    is_to_or_from_host,
    kind_of,
    nested_programs,
    open_jaxpr,
    scan_counts,
    shape_of,
)


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


class _Draft(NamedTuple):
    """An operation before it is known whether an output needs it, and so before it has an index."""

    equation: int
    kind: OperationKind
    name: str
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    rule: FactorRule
    trips: float
    source: str
    fixed_results: tuple[FixedLayout | None, ...] | None = None
    fixed_operands: tuple[FixedLayout | None, ...] | None = None
    slot: int = 0
    blocks: tuple[Block, ...] = ()
    region: Region | None = None
    over: tuple[str, ...] = ()


class Flattener:
    """Collects values and operations while it walks a jaxpr. Its lists are frozen into a `Graph` by `finish`."""

    def __init__(self, options: TraceOptions):
        self.options = options
        self.values: list[Value] = []
        self.operations: list[_Draft] = []
        self.loops: list[Loop] = []
        self.checkpoints: list[tuple[int, int]] = []
        self.nestings: list[Nesting] = []
        self.starts: list[int] = []
        """The first equations of the programs that the equation at hand nests."""
        self.equations: list[str] = []
        self.leaves = Leaves()
        self.lines = SourceLines()
        self.unknown: list[str] = []
        self.host_copies: list[str] = []
        self.reported: set[int] = set()
        """The signatures among `unknown`: each is told of once."""
        self.callers: list[str] = []
        self.blocks = Blocks()
        self.around: tuple[Block, ...] = ()
        """The annotated blocks around the program at hand."""
        self.controls: dict[int, int] = {}
        """For a carry or join, the value that decides how often the loop runs or which branch does."""

    def new_value(self, aval: Any, name: str | None = None, kind: ValueKind = ValueKind.INTERMEDIATE) -> int:
        index = len(self.values)
        self.values.append(Value(index, name or f"%{index}", *self.leaves.type_of(aval), kind))
        return index

    def run(self, jaxpr: jex.Jaxpr, inputs: Sequence[int | None], trips: float) -> list[int | None]:
        """Flattens `jaxpr` on the given values (constvars first); returns the values of its outputs."""
        env: dict[Any, int | None] = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
        literal, dropped = jex.Literal, jex.DropVar
        for equation in jaxpr.eqns:
            operands = tuple([None if isinstance(v, literal) else env[v] for v in equation.invars])
            leaf = self.leaves.of(equation)
            if leaf is None:
                results = self.nesting(equation, operands, trips)
            else:
                results = self.leaf(equation, leaf, operands, trips)
            for slot, v in enumerate(equation.outvars):
                if not isinstance(v, dropped):
                    env[v] = results[slot]
        return [None if isinstance(v, literal) else env[v] for v in jaxpr.outvars]

    def leaf(
        self, equation: jex.JaxprEqn, leaf: Leaf, operands: tuple[int | None, ...], trips: float
    ) -> tuple[int | None, ...]:
        values, dropped, made = self.values, jex.DropVar, []
        for slot, v in enumerate(equation.outvars):
            if isinstance(v, dropped):
                made.append(None)
                continue
            index = len(values)
            values.append(Value(index, f"%{index}", *leaf.results[slot], ValueKind.INTERMEDIATE))
            made.append(index)
        results, number, source = tuple(made), len(self.equations), self.source(equation)
        blocks = self.blocks_of(equation)
        if leaf.is_unknown and leaf.number not in self.reported:
            self.reported.add(leaf.number)
            self.unknown.append(f"{leaf.name} at {source or 'an unknown line'}")
        if is_to_or_from_host(equation):
            self.host_copies.append(source or "an unknown line")
        self.operations.append(
            _Draft(
                number,
                OperationKind.EQUATION,
                leaf.name,
                operands,
                results,
                leaf.rule,
                trips,
                source,
                leaf.fixed_results,
                blocks=blocks,
                over=leaf.over,
            )
        )
        self.equations.append(_told(leaf.text, blocks))
        return results

    def blocks_of(self, equation: jex.JaxprEqn) -> tuple[Block, ...]:
        """The annotated blocks that an equation stands in, the outermost first."""
        own = self.blocks.of(equation)
        return joined_blocks(self.around, own) if own else self.around

    def nesting(self, equation: jex.JaxprEqn, operands: tuple[int | None, ...], trips: float) -> Sequence[int | None]:
        """Flattens an equation that nests other programs."""
        number, around, self.starts = len(self.equations), self.starts, []
        blocks_around, self.around = self.around, self.blocks_of(equation)
        results = self.nested(equation, number, operands, trips)
        self.around = blocks_around
        if self.starts:
            is_call, is_checkpointed = kind_of(equation) is EquationKind.CALL, is_checkpoint(equation)
            name, starts, stop = equation.primitive.name, tuple(self.starts), len(self.equations)
            kind = is_call and not is_checkpointed, is_checkpointed
            self.nestings.append(Nesting(number, name, operands, tuple(results), starts, stop, *kind))
        self.starts = around
        return results

    def nested(
        self, equation: jex.JaxprEqn, number: int, operands: tuple[int | None, ...], trips: float
    ) -> Sequence[int | None]:
        """Flattens the programs that an equation nests, or the equation as one operation if they keep to themselves."""
        match kind_of(equation):
            case EquationKind.CALL:
                self.equations.append(f"call {equation.primitive.name}")
                nested = nested_programs(equation)[0]
                start = len(self.operations)
                with self.called_from(self.lines.of(equation)):
                    results = self.call(nested, called_operands(equation, operands), trips)
                if is_checkpoint(equation):
                    self.checkpoints.append((start, len(self.operations)))
                return results
            case EquationKind.SCAN:
                self.equations.append(f"scan length={equation.params['length']}")
                return self.scan(equation, number, operands, trips)
            case EquationKind.WHILE:
                self.equations.append("while")
                return self.while_loop(equation, number, operands, trips)
            case EquationKind.COND:
                self.equations.append(f"cond branches={len(equation.params['branches'])}")
                return self.cond(equation, number, operands, trips)
            case _:
                return self.opaque(equation, number, operands, trips)

    def source(self, equation: jex.JaxprEqn) -> str:
        """The user's line of an equation; for library code, that of the nearest call around it that has one."""
        return self.lines.of(equation) or next((line for line in reversed(self.callers) if line), "")

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
        self.starts.append(len(self.equations))
        constants = [self.new_value(v.aval, "constant", ValueKind.CONSTANT) for v in inner.constvars]
        return self.run(inner, [*constants, *operands], trips)

    def opaque(
        self, equation: jex.JaxprEqn, number: int, operands: tuple[int | None, ...], trips: float
    ) -> tuple[int | None, ...]:
        self.equations.append(_told(describe(equation), self.around))
        source = self.source(equation)
        results = tuple(None if isinstance(v, jex.DropVar) else self.new_value(v.aval) for v in equation.outvars)
        if equation.primitive.name == "shard_map":
            fixed_operands, fixed_results = shard_map_layouts(equation)
            rule, region = _region_rule(equation, fixed_operands, fixed_results), self.region(equation)
        else:
            rule, fixed_operands, fixed_results = _whole_rule(equation, "replicated"), None, None
            region = None
            self.unknown.append(f"{equation.primitive.name} at {source or 'an unknown line'}")
        self.operations.append(
            _Draft(
                number,
                OperationKind.EQUATION,
                equation.primitive.name,
                operands,
                results,
                rule,
                trips,
                source,
                fixed_results,
                fixed_operands,
                blocks=self.around,
                region=region,
            )
        )
        return results

    def region(self, equation: jex.JaxprEqn) -> Region:
        """What a `shard_map` runs on each device."""
        jaxpr, inside = open_jaxpr(equation.params["jaxpr"]), Flattener(self.options)
        inside.leaves, inside.lines = self.leaves, self.lines
        operands = [inside.new_value(v.aval, f"operand {k}", ValueKind.ARGUMENT) for k, v in enumerate(jaxpr.invars)]
        arguments = tuple([Argument(v, k, f"operand {k}", False) for k, v in enumerate(operands)])
        results = inside.call(jaxpr, operands, 1.0)
        outputs = tuple([Output(v, f"result {k}", None) for k, v in enumerate(results)])
        return Region(tuple(equation.params["mesh"].shape.items()), inside.finish(arguments, outputs))

    def carry(
        self, number: int, slot: int, initial: int | None, aval: Any, trips: float, source: str
    ) -> tuple[int, int, int]:
        """A loop-carried value, its back operand still open: (operation index, value inside, value after)."""
        inside, after = self.new_value(aval), self.new_value(aval)
        index = len(self.operations)
        rule = _identity_rule(aval.shape, 2, 2)
        self.operations.append(
            _Draft(
                number,
                OperationKind.LOOP_CARRY,
                "loop_carry",
                (initial, None),
                (inside, after),
                rule,
                trips,
                source,
                slot=slot,
                blocks=self.around,
            )
        )
        return index, inside, after

    def close_carry(self, index: int, back: int | None) -> None:
        operation = self.operations[index]
        self.operations[index] = operation._replace(operands=(operation.operands[0], back))

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
            rule = _stack_rule(shape_of(v), True)
            self.operations.append(
                _Draft(
                    number,
                    OperationKind.SCAN_SLICE,
                    "scan_slice",
                    (whole,),
                    (piece,),
                    rule,
                    trips,
                    source,
                    slot=slot,
                    blocks=self.around,
                )
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
            rule = _stack_rule(shape_of(inner_v), False)
            self.operations.append(
                _Draft(
                    number,
                    OperationKind.SCAN_STACK,
                    "scan_stack",
                    (piece,),
                    (whole,),
                    rule,
                    inner_trips,
                    source,
                    slot=slot,
                    blocks=self.around,
                )
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
            self.operations.append(
                _Draft(
                    number,
                    OperationKind.BRANCH_JOIN,
                    "branch_join",
                    tuple(r[k] for r in results),
                    (joined,),
                    _identity_rule(shape_of(v), len(branches)),
                    trips,
                    self.source(equation),
                    slot=k,
                    blocks=self.around,
                )
            )
            outputs.append(joined)
        return outputs

    def finish(self, arguments: tuple[Argument, ...], outputs: tuple[Output, ...]) -> Graph:
        """Drops operations that no output needs, and freezes the graph."""
        drafts = self.operations
        keep = self._needed(outputs)
        position = np.concatenate([[0], np.cumsum(keep)]).astype(int)
        kept = [i for i, is_needed in enumerate(keep) if is_needed]
        operations = tuple([Operation(i, *drafts[k]) for i, k in enumerate(kept)])
        loops = tuple(
            Loop(int(position[l.start]), int(position[l.stop]), l.trips)
            for l in self.loops
            if position[l.stop] > position[l.start]
        )
        numbers = sorted({o.equation for o in operations})
        holds = lambda n: bisect.bisect_left(numbers, n.stop) > bisect.bisect_right(numbers, n.equation)
        return Graph(
            tuple(self.values),
            operations,
            loops,
            arguments,
            outputs,
            tuple(self.equations),
            tuple(dict.fromkeys(self.unknown)),
            tuple((int(position[start]), int(position[stop])) for start, stop in self.checkpoints),
            tuple(sorted(filter(holds, self.nestings), key=lambda n: n.equation)),
            tuple(dict.fromkeys(self.host_copies)),
        )

    def _needed(self, outputs: Sequence[Output]) -> bytearray:
        """For each operation, whether some output depends on it."""
        value = bytearray(len(self.values))
        for output in outputs:
            if output.value is not None:
                value[output.value] = 1
        keep = bytearray(len(self.operations))
        changed = True
        while changed:  # more than one sweep only because a loop's back edge points forward
            changed = False
            for index in range(len(keep) - 1, -1, -1):
                if keep[index]:
                    continue
                operation = self.operations[index]
                for r in operation.results:
                    if r is not None and value[r]:
                        break
                else:
                    continue
                keep[index] = changed = True
                for o in operation.operands:
                    if o is not None:
                        value[o] = 1
                if index in self.controls:
                    value[self.controls[index]] = 1
        return keep


def _told(text: str, blocks: tuple[Block, ...]) -> str:
    """The signature of an equation with what is asked for it: a plan that obeys other annotations is another plan."""
    return f"{text} in {' / '.join(map(str, blocks))}" if blocks else text


def _region_rule(equation: jex.JaxprEqn, operands: Sequence[FixedLayout], results: Sequence[FixedLayout]) -> FactorRule:
    """For a region with stated layouts: one factor for each mesh axis, which splits every dimension that names it."""
    sizes = dict(equation.params["mesh"].shape)
    used = {name for layout in (*operands, *results) for entry in layout for name in entry or ()}
    number = {name: i for i, name in enumerate(name for name in sizes if name in used)}
    dims = lambda layout: tuple(tuple(sorted(number[name] for name in entry or ())) for entry in layout)
    factors = tuple(Factor(sizes[name]) for name in number)
    return FactorRule(factors, tuple(map(dims, operands)), tuple(map(dims, results)), 0.0, True, "table")

"""Where a loss can be cut, so that its beginning runs at the host, beside the rows of its tables.

A cut is a value v of the loss. The host makes it of rows of tables, the batch, and parameters P that nothing else
reads: pooling, a concatenation, a projection, a small tower. Only v is sent, and its gradient comes back, as at the cut
layer of split learning (Vepakomma et al. 2018, arXiv:1812.00564). With L the values that depend on P, are made before v
or with it, and are read behind it,

    v is a cut  iff  L = {v}, v depends on no mutable state and no random numbers, and if P has more than
                     tables, parameters are left behind it

so that all that the loss makes of P passes through v: v post-dominates P in the graph of the program. Of two cuts with
a parameter in common the later one has all parameters of the earlier one, so that the cuts of a loss form trees.

Of cuts with the same parameters the first one is kept that sends fewest bytes, if that is less than what would be sent
in front of it, or as much where parameters alone are new. A cut must have a parameter or table that no cut in front of
it has, so that naming this names the cut.
"""

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from autoshard.errors import TraceError
from autoshard.printing import amount
from autoshard.tables.find import Reading, found_in
from autoshard.tables.look_ups import Table
from autoshard.tables.traced_loss import TracedLoss, shape_like, sliced, trace_loss
from autoshard.trace.rules import rule_of, signature_of
from autoshard.trace.source import SourceLines
from autoshard.trace.walk import EquationKind, called_jaxpr, kind_of, open_jaxpr, shape_of, size_bytes, variables
from autoshard.train_step import TrainStep


@dataclasses.dataclass(frozen=True, slots=True)
class DenseParam:
    """A parameter that is no table.

    Attributes:
      path: Of the parameter. index: Its number among the leaves of the parameters.
      shape, dtype: Of it. size_bytes: Of it.
    """

    path: str
    index: int
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """A value of a loss that the host can make; see the head of this file.

    Attributes:
      tables: Those whose rows it is made of, in the order of the parameters.
      params: All other parameters that it is made of; they move to the host.
      shape, dtype: Of the value. size_bytes: Of it, for a whole batch; its gradient has as many.
      flops: Floating-point operations that make it.
      source: What makes it, and the user's line.
    """

    tables: tuple[Table, ...]
    params: tuple[DenseParam, ...]
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    flops: float
    source: str

    @property
    def param_bytes(self) -> int:
        """Bytes of the parameters that move."""
        return sum(param.size_bytes for param in self.params)

    @property
    def read_bytes(self) -> int:
        """Bytes of the rows that its look-ups read, duplicates included."""
        return sum(table.num_ids * table.row_bytes for table in self.tables)

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Paths of its tables, and of its other parameters: no other cut of the loss has the same."""
        return tuple(table.path for table in self.tables), tuple(param.path for param in self.params)

    def __str__(self) -> str:
        tables, params = self.names
        all_params = ", ".join(f"`{path}`" for path in params)
        own = f"; with {amount(self.param_bytes)} of parameters: {all_params}" if params else ""
        return (
            f"{amount(self.size_bytes)} in place of {amount(self.read_bytes)} of rows of {_few(tables)}, for "
            f"{self.flops:.3g} floating-point operations, behind {self.source}{own}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Cuts:
    """All cuts of a loss, in its order. Printing them shows each."""

    cuts: tuple[Cut, ...]

    def chain(self, table: str) -> tuple[Cut, ...]:
        """Those of the table at a path, one behind the other."""
        return tuple(cut for cut in self.cuts if table in cut.names[0])

    def __str__(self) -> str:
        return "\n".join(("cuts behind which less is sent than rows:", *(f"  {cut}" for cut in self.cuts or ("none",))))


@dataclasses.dataclass(frozen=True, slots=True)
class CutAt:
    """A cut in a traced loss. value: Its variable. number: Of the equation that makes it."""

    cut: Cut
    value: Any
    number: int


def find_cuts(step: TrainStep, state: Any, batch: Any) -> Cuts:
    """Where the loss of a training step can be cut behind its look-ups.

    Args:
      step: The training step. state, batch: Its arguments, arrays or shapes.
    """
    state = jax.tree.map(shape_like, state)
    loss = trace_loss(step, state.params, state.mutable, batch, jax.eval_shape(step.key, state))
    return Cuts(tuple(at.cut for at in cuts_in(loss, found_in(loss).readings)))


def cuts_in(loss: TracedLoss, readings: Sequence[Reading]) -> tuple[CutAt, ...]:
    """The cuts of a traced loss.

    Args:
      loss: The loss. readings: Of all its tables.
    """
    finder = _Finder(loss, readings)
    first: dict[int, tuple[Any, int]] = {}
    for v, number in finder.candidates():
        own = finder.params_of(v)
        if own not in first or size_bytes(v) < size_bytes(first[own][0]):
            first[own] = v, number
    kept: dict[int, CutAt] = {}
    for own, (v, number) in sorted(first.items(), key=lambda item: item[1][1]):
        inside = [other for other in kept if other & own == other]
        outermost = [a for a in inside if not any(a != b and a & b == a for b in inside)]
        sent = sum(kept[a].cut.size_bytes for a in outermost)
        new = own & ~functools.reduce(operator.or_, outermost, 0)
        rows_bytes = sum(t.num_ids * t.row_bytes for t in finder.tables_of(new))
        saved = sent + rows_bytes - size_bytes(v)
        if new and (saved > 0 or (saved == 0 and not rows_bytes)):
            kept[own] = CutAt(finder.cut(v, number), v, number)
    return tuple(kept.values())


def chosen_cuts(
    loss: TracedLoss,
    readings: Sequence[Reading],
    tables: Sequence[Table],
    pooled: Sequence[str],
    host_layers: Sequence[str],
) -> tuple[CutAt, ...]:
    """The cuts behind which the host's part of a loss ends: the first one that has what is named.

    Args:
      loss: The loss. readings: Of all its tables.
      tables: Those in host memory.
      pooled: Paths of tables whose rows are to be summed at the host, or made less otherwise.
      host_layers: Paths of other parameters whose layers are to run there, all of a cut.

    Raises:
      TraceError: There is no cut behind one of these; tells why, and which there are.
    """
    found, here = cuts_in(loss, readings), {table.path for table in tables}
    paths = lambda at: {*at.cut.names[0], *at.cut.names[1]}
    first = [next((at for at in found if path in paths(at)), None) for path in (*pooled, *host_layers)]
    allowed = [
        at
        for at in dict.fromkeys(at for at in first if at is not None)
        if here.issuperset(at.cut.names[0])
        and set(host_layers).issuperset(at.cut.names[1])
        and (at.cut.params or set(pooled).issuperset(at.cut.names[0]))
    ]
    chosen = tuple(a for a in allowed if not any(paths(a) < paths(b) for b in allowed))
    reached = set[str]().union(*map(paths, chosen))
    missing = next((path for path in (*pooled, *host_layers) if path not in reached), None)
    if missing is None:
        return chosen
    why = _Finder(loss, readings).why_not(missing)
    if missing in pooled:
        raise TraceError(
            "The rows of a table are summed at the host where that leaves less to send, and the loss reads nothing "
            f"else of them; of `{missing}`, {why}. Leave it out of `pooled`.\n{Cuts(tuple(at.cut for at in found))}"
        )
    raise TraceError(
        "A layer runs at the host if all that it reads are rows of tables there, the batch, and parameters named with "
        f"it in `host_layers`, and if less is sent behind it than in front; of `{missing}`, {why}. Leave it out, or "
        f"name all parameters of a cut.\n{Cuts(tuple(at.cut for at in found))}"
    )


def same_cuts(found: Iterable[CutAt], wanted: Sequence[Cut]) -> tuple[CutAt, ...] | None:
    """Of the cuts of a loss those of the same names as some; None if one is not there."""
    by_names = {at.cut.names: at for at in found}
    if any(cut.names not in by_names for cut in wanted):
        return None
    return tuple(by_names[cut.names] for cut in wanted)


class _Finder:
    """Follows parameters through a loss, as bits of one number for each value."""

    def __init__(self, loss: TracedLoss, readings: Sequence[Reading]):
        self._loss, self._jaxpr, self._lines = loss, loss.closed.jaxpr, SourceLines()
        self._readings = {reading.table.index: reading for reading in readings}
        self._by_element = {number for reading in readings for number in reading.by_element}
        self._table_bits = sum(1 << index for index in self._readings)
        self._never = 1 << len(loss.paths)
        """Stands for what the host has not: mutable state, random numbers, programs for devices."""
        needed = {id(e) for e in sliced(self._jaxpr, self._jaxpr.outvars)[0]}
        self._equations = [(n, e) for n, e in enumerate(self._jaxpr.eqns) if id(e) in needed]
        batch = set(loss.batch)
        self._bits: dict[Any, int] = {v: 0 if v in batch else self._never for v in self._jaxpr.invars}
        self._bits |= {v: 1 << n for n, v in enumerate(loss.params)}
        for _, equation in self._equations:
            bits = self._never if kind_of(equation) is EquationKind.OPAQUE else 0
            for v in variables(equation.invars):
                bits |= self._bits.get(v, 0)
            self._bits.update(dict.fromkeys(variables(equation.outvars), bits))
        self._flops: dict[Any, float] = {}

    def params_of(self, v: Any) -> int:
        """Bits of the parameters that a value depends on."""
        return self._bits[v]

    def tables_of(self, bits: int) -> list[Table]:
        """The tables among some parameters."""
        return [self._readings[i].table for i in sorted(self._readings) if bits >> i & 1]

    def candidates(self) -> list[tuple[Any, int]]:
        """Values through which all passes that is made of their parameters, and the equations that make them."""
        last: dict[Any, int] = {}
        for number, equation in self._equations:
            last.update(dict.fromkeys(variables(equation.invars), number))
        last.update(dict.fromkeys(variables(self._jaxpr.outvars), len(self._jaxpr.eqns)))
        live = {v: self._bits[v] for v in self._loss.params if v in last}
        ending = collections.defaultdict(list)
        for v, number in last.items():
            ending[number].append(v)
        found = []
        for number, equation in self._equations:
            live.update({v: self._bits[v] for v in variables(equation.outvars) if self._bits[v] and v in last})
            for v in ending[number]:
                live.pop(v, None)
            for v in variables(equation.outvars):
                if v in live and number not in self._by_element and self._is_cut(v, live):
                    found.append((v, number))
        return found

    def _is_cut(self, v: Any, live: Mapping[Any, int]) -> bool:
        own = self._bits[v]
        if own & self._never or not own & self._table_bits or not shape_of(v):
            return False
        if not jnp.issubdtype(v.aval.dtype, jnp.floating):
            return False
        left = (self._never - 1) & ~own
        passes = all(u is v or not bits & own for u, bits in live.items())
        return passes and (not own & ~self._table_bits or any(bits & left for bits in live.values()))

    def cut(self, v: Any, number: int) -> Cut:
        """A value as data."""
        own = self._bits[v]
        equation = self._jaxpr.eqns[number]
        part, _ = sliced(self._jaxpr, [v])
        dense = [i for i in range(len(self._loss.paths)) if own >> i & 1 and i not in self._readings]
        params = [(i, self._loss.params[i]) for i in dense]
        return Cut(
            tuple(self.tables_of(own)),
            tuple(DenseParam(self._loss.paths[i], i, shape_of(u), str(u.aval.dtype), size_bytes(u)) for i, u in params),
            shape_of(v),
            str(v.aval.dtype),
            size_bytes(v),
            sum(map(self._flops_of, part)),
            self._name(equation),
        )

    def why_not(self, path: str) -> str:
        """Why a parameter is in no cut that was asked for."""
        if path not in self._loss.paths:
            return "the loss has no such parameter"
        index = self._loss.paths.index(path)
        bit = 1 << index
        for _, equation in self._equations:
            read = [self._bits.get(v, 0) for v in variables(equation.invars)]
            others = 0
            for bits in read:
                others |= bits & ~bit
            if not any(bits & bit for bits in read) or not others:
                continue
            if others & self._never:
                return f"it is read together with mutable state or random numbers by {self._name(equation)}"
            joined = [f"`{p}`" for i, p in enumerate(self._loss.paths) if others >> i & 1]
            return f"what is made of it goes into {self._name(equation)} together with {', '.join(joined)}"
        return "nothing that is made of it is smaller"

    def _name(self, equation: jex.JaxprEqn) -> str:
        line = self._lines.of(equation)
        return f"`{equation.primitive.name}`{f' at {line}' if line else ''}"

    def _flops_of(self, equation: jex.JaxprEqn) -> float:
        kind = kind_of(equation)
        if kind is EquationKind.LEAF:
            signature = signature_of(equation)
            if signature not in self._flops:
                self._flops[signature] = rule_of(equation).flops
            return self._flops[signature]
        bodies: list[Any] = [equation.params.get(name) for name in ("jaxpr", "body_jaxpr")]
        if (called := called_jaxpr(equation)) is not None:
            bodies = [called[1]]
        bodies += equation.params.get("branches", ())[:1]
        own = [open_jaxpr(x) for x in bodies if isinstance(x, jex.Jaxpr | jex.ClosedJaxpr)]
        return equation.params.get("length", 1) * math.fsum(self._flops_of(e) for x in own for e in x.eqns)


def _few(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(f"`{path}`" for path in paths[:3]) + more

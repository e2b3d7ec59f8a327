"""Splits the joint program of a stage into its forward pass, its backward pass, and the gradients of its weights.

What the forward pass makes and the others read, its residuals, must be held for every micro-batch in flight. Most of it
need not be: what is made by mapping elements can be made again from other residuals. Which values to hold is a minimum
cut: sources are the values that cannot be made again cheaply (products, reductions, random numbers, what comes
from other stages), sinks the values that the later pass reads, and a value's capacity is its size. The same cut is what
PyTorch's AOTAutograd makes ("min-cut rematerialization", torch/_functorch/partitioners.py).
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from autoshard.trace.walk import EquationKind, kind_of, size_bytes, variables

_NEVER_AGAIN = frozenset(
    "dot_general conv_general_dilated ragged_dot_general sort top_k gather scatter scatter-add scatter_add cumsum "
    "cumlogsumexp cummax cumprod random_bits random_wrap random_fold_in random_split threefry2x32 fft "
    "reduce_window_sum reduce_window_max select_and_scatter_add custom_linear_solve reduce_sum reduce_max reduce_min "
    "reduce_prod reduce_and reduce_or argmax argmin".split()
)
"""Equations that are too dear to run twice; so is everything that nests a program. Reductions are, because their
results are small to hold, and on several devices each costs a collective.
"""
_UNCUT = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseEquations:
    """Some equations of a joint program, by position; `given`: positions of the program's inputs that it reads;
    `results`: positions of the program's outputs that it makes.
    """

    equations: tuple[int, ...]
    given: tuple[int, ...]
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PhasePartition:
    """A joint program in phases; of each, the positions of its equations.

    Attributes:
      forward, backward: The passes. weight: The gradients of the weights, if they are apart; else None.
      residuals: The variables that the forward phase makes for the later ones.
      kept_residuals: Those of them that the weight phase reads, and that are held until then.
      weight_residuals: Those that the backward phase makes for the weight phase.
    """

    forward: PhaseEquations
    backward: PhaseEquations
    weight: PhaseEquations | None
    residuals: tuple[Any, ...] = dataclasses.field(repr=False)
    kept_residuals: tuple[Any, ...] = dataclasses.field(repr=False)
    weight_residuals: tuple[Any, ...] = dataclasses.field(repr=False)


def partition_phases(
    jaxpr: jex.Jaxpr,
    *,
    forward_outs: Sequence[int],
    input_outs: Sequence[int],
    sum_outs: Sequence[int],
    saved_inputs: Sequence[int],
    splits_backward: bool,
) -> PhasePartition:
    """Splits a joint program.

    Args:
      jaxpr: The program.
      forward_outs, input_outs, sum_outs: Positions of its outputs: of the forward pass, the gradients of inputs, the
        sums of the gradients of weights.
      saved_inputs: Positions of its inputs that are residuals if a later phase reads them: what other stages send.
      splits_backward: Whether the gradients of weights are a part of their own.
    """
    maker = {v: i for i, e in enumerate(jaxpr.eqns) for v in variables(e.outvars)}
    outs = lambda positions: [jaxpr.outvars[n] for n in positions if not isinstance(jaxpr.outvars[n], jex.Literal)]
    all_of = lambda wanted: _ancestors(jaxpr, maker, outs(wanted))
    forward = all_of(forward_outs)
    backward = all_of(input_outs) - forward
    rest = all_of(sum_outs) - forward - backward
    groups = [forward, backward, rest] if splits_backward and backward and rest else [forward, backward | rest]
    dear_inputs = {jaxpr.invars[n] for n in saved_inputs}
    results = [list(forward_outs), list(input_outs), list(sum_outs)]
    if len(groups) == 2:
        results = [results[0], [*input_outs, *sum_outs]]
    # from the last part to the first: what it must run again is known before what it must be handed
    held: list[list[Any]] = []
    for k in range(len(groups) - 1, 0, -1):
        earlier = set().union(*groups[:k])
        needed = _needed(jaxpr, groups[k], outs(results[k]))
        kept, again = _cut(jaxpr, maker, earlier, needed, dear_inputs)
        groups[k] = groups[k] | again
        held.append(kept)
    held.reverse()
    parts = [_part(jaxpr, g, outs(r), r) for g, r in zip(groups, results, strict=True)]
    made_by_forward = lambda v: maker[v] in groups[0]
    if len(parts) == 2:
        return PhasePartition(parts[0], parts[1], None, tuple(held[0]), (), ())
    kept = tuple(v for v in held[1] if made_by_forward(v))
    handed = tuple(v for v in held[1] if not made_by_forward(v))
    residuals = tuple(dict.fromkeys([*held[0], *kept]))
    return PhasePartition(parts[0], parts[1], parts[2], residuals, kept, handed)


def _ancestors(jaxpr: jex.Jaxpr, maker: dict[Any, int], wanted: Iterable[Any]) -> set[int]:
    found: set[int] = set()
    pending = [maker[v] for v in wanted if v in maker]
    while pending:
        i = pending.pop()
        if i not in found:
            found.add(i)
            pending.extend(maker[v] for v in variables(jaxpr.eqns[i].invars) if v in maker)
    return found


def _needed(jaxpr: jex.Jaxpr, group: Collection[int], outs: Iterable[Any]) -> set[Any]:
    return {v for i in group for v in variables(jaxpr.eqns[i].invars)} | set(outs)


def _part(jaxpr: jex.Jaxpr, group: Collection[int], outs: Iterable[Any], results: Sequence[int]) -> PhaseEquations:
    read = _needed(jaxpr, group, outs)
    given = tuple(n for n, v in enumerate(jaxpr.invars) if v in read)
    return PhaseEquations(tuple(sorted(group)), given, tuple(results))


def is_cheap(equation: jex.JaxprEqn) -> bool:
    """Whether it may run again in a later pass: it maps elements, or moves them."""
    return kind_of(equation) is EquationKind.LEAF and equation.primitive.name not in _NEVER_AGAIN


def _cut(
    jaxpr: jex.Jaxpr, maker: dict[Any, int], earlier: set[int], needed: set[Any], dear_inputs: set[Any]
) -> tuple[list[Any], set[int]]:
    """The values to hold, in order of their making, and the equations to run again, for a part that reads `needed`."""
    wanted = [v for v in needed if maker.get(v) in earlier]
    if not wanted:
        return [], set()
    relevant = _ancestors(jaxpr, maker, wanted)
    nodes: dict[Any, int] = {}
    for i in sorted(relevant):
        for v in [*variables(jaxpr.eqns[i].invars), *variables(jaxpr.eqns[i].outvars)]:
            nodes.setdefault(v, len(nodes))
    unit = max(1.0, sum(size_bytes(v) for v in nodes) / (_UNCUT / 4))
    source, sink = 2 * len(nodes), 2 * len(nodes) + 1
    rows, columns, capacities = [], [], []

    def add(row: int, column: int, capacity: int) -> None:
        rows.append(row)
        columns.append(column)
        capacities.append(capacity)

    for v, n in nodes.items():
        add(2 * n, 2 * n + 1, 1 + int(size_bytes(v) / unit))
        if v in dear_inputs:
            add(source, 2 * n, _UNCUT)
        elif v in maker and not is_cheap(jaxpr.eqns[maker[v]]):
            add(source, 2 * n, _UNCUT)
    for i in relevant:
        if is_cheap(jaxpr.eqns[i]):
            for result in variables(jaxpr.eqns[i].outvars):
                for operand in variables(jaxpr.eqns[i].invars):
                    add(2 * nodes[operand] + 1, 2 * nodes[result], _UNCUT)
    for v in wanted:
        add(2 * nodes[v] + 1, sink, _UNCUT)
    size = 2 * len(nodes) + 2
    graph = csr_array((np.asarray(capacities, np.int32), (rows, columns)), shape=(size, size))
    flow = maximum_flow(graph, source, sink)
    residual = (graph - flow.flow).tocsr()
    residual.eliminate_zeros()
    reached = set(breadth_first_order(residual, source, return_predecessors=False).tolist())
    held = {v for v, n in nodes.items() if 2 * n in reached and 2 * n + 1 not in reached}
    again: set[int] = set()
    pending = [v for v in wanted if v not in held]
    while pending:
        i = maker.get(pending.pop())
        if i is None or i in again:
            continue
        again.add(i)
        pending.extend(v for v in variables(jaxpr.eqns[i].invars) if v not in held)
    return sorted((v for v in held if v in maker), key=lambda v: (maker[v], nodes[v])), again

"""Finds the layers of a loss: runs of equations that repeat, and loops whose iterations build on each other.

Layers of one kind are equal sequences of equations, one behind the other (a tandem repeat): same primitives,
parameters and types. Of all such runs the one is taken that holds most heavy equations (products, convolutions, what
nests them), with the shortest layers; then the same in what is left before and behind it. Where in the sequence a layer
begins is free: it begins where the fewest bytes pass from one layer to the next, which in a residual network is the
residual stream alone.
"""

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from autoshard.remat.policy import LayerRun
from autoshard.trace.leaves import Leaves
from autoshard.trace.rules.products import PRODUCTS
from autoshard.trace.walk import EquationKind, kind_of, nested_programs, open_jaxpr, scan_counts, size_bytes, variables


def find_runs(jaxpr: jex.Jaxpr) -> tuple[LayerRun, ...]:
    """The runs of layers in a program whose calls are inlined, in its order; none where nothing repeats."""
    equations = jaxpr.eqns
    if any(e.effects for e in equations):
        return ()  # what has effects must run once
    numbers: dict[Hashable, int] = {}
    leaves = Leaves()
    kinds = np.asarray([numbers.setdefault(_kind(e, leaves), len(numbers)) for e in equations], np.int32)
    heavy = np.asarray([is_heavy(e) for e in equations], bool)
    runs: list[LayerRun] = []
    pending = [(0, len(equations))]
    while pending:
        start, stop = pending.pop()
        found = _best_repeat(kinds[start:stop], heavy[start:stop])
        if found is None:
            continue
        first, length, period = found
        run = _rotated(equations, start + first, length, period)
        if _is_chain(equations, run):
            runs.append(run)
        pending += [(start, start + first), (start + first + length, stop)]
    runs += [
        LayerRun(i, 1, e.params["length"], is_loop=True)
        for i, e in enumerate(equations)
        if is_loop_of_layers(e) and not any(r.start <= i < r.stop for r in runs)
    ]
    return tuple(sorted(runs, key=lambda r: r.start))


def is_heavy(equation: jex.JaxprEqn) -> bool:
    """Whether it is a product, or nests one."""
    if equation.primitive.name in PRODUCTS:
        return True
    return any(is_heavy(e) for nested in nested_programs(equation) for e in open_jaxpr(nested).eqns)


def is_loop_of_layers(equation: jex.JaxprEqn) -> bool:
    """Whether an equation is a scan in which a product depends on what the iteration before made.

    Loops over parts of a sequence or of a batch are not: their products have nothing to do with each other.
    """
    if kind_of(equation) is not EquationKind.SCAN or equation.params["length"] <= 1:
        return False
    body = open_jaxpr(equation.params["jaxpr"])
    num_consts, num_carry = scan_counts(equation)
    depends = set(body.invars[num_consts : num_consts + num_carry])
    for inner in body.eqns:
        if not depends.isdisjoint(variables(inner.invars)):
            if is_heavy(inner):
                return True
            depends.update(variables(inner.outvars))
    return False


def _kind(equation: jex.JaxprEqn, leaves: Leaves) -> Hashable:
    """Equal for equations that do the same to values of equal types; numbers written in the program do not count."""
    leaf = leaves.of(equation)
    if leaf is not None:
        return leaf.number, leaf.results
    nested = tuple(tuple(_kind(e, leaves) for e in open_jaxpr(n).eqns) for n in nested_programs(equation))
    types = tuple(str(v.aval) for v in (*equation.invars, *equation.outvars))
    return equation.primitive.name, types, nested


def _best_repeat(kinds: np.ndarray, heavy: np.ndarray) -> tuple[int, int, int] | None:
    """(start, length, period) of the repeat that covers most heavy equations; of several the shortest period."""
    best, most = None, 0
    before = np.concatenate([[0], np.cumsum(heavy)])
    for period in range(1, len(kinds) // 2 + 1):
        equal = kinds[:-period] == kinds[period:]
        if np.count_nonzero(equal) < period:
            continue
        edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]])))
        for first, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if stop - first < period:
                continue
            length = stop - first + period
            covered = int(before[first + length // period * period] - before[first])
            if covered > most:
                best, most = (first, length, period), covered
    return best


def _rotated(equations: Sequence[jex.JaxprEqn], first: int, length: int, period: int) -> LayerRun:
    """The run with layers that begin where the fewest bytes pass from one to the next.

    Of equals it has the most layers, then those that begin with a product.
    """
    crossing = _crossing_bytes(equations, first, first + length)
    most = length // period
    found = []
    for shift in range(period):
        count = (length - shift) // period
        if count < max(most - 1, 2) and shift:
            continue
        inner = [crossing[shift + k * period] for k in range(1, count)]
        begins_light = not is_heavy(equations[first + shift])
        found.append((sum(inner) / len(inner), -count, begins_light, shift))
    _, count, _, shift = min(found)
    return LayerRun(first + shift, period, -count)


def _crossing_bytes(equations: Sequence[jex.JaxprEqn], first: int, stop: int) -> list[int]:
    """For each position of a run, the bytes of what its equations made before and something reads from there on."""
    made: dict[Any, int] = {v: i for i in range(first, stop) for v in variables(equations[i].outvars)}
    last: dict[Any, int] = {}
    for i in range(first, len(equations)):
        last.update((v, min(i, stop)) for v in variables(equations[i].invars) if v in made)
    change = [0] * (stop - first + 2)
    for v, reader in last.items():
        change[made[v] - first + 1] += size_bytes(v)
        change[reader - first + 1] -= size_bytes(v)
    return list(itertools.accumulate(change))


def _is_chain(equations: Sequence[jex.JaxprEqn], run: LayerRun) -> bool:
    """Whether each layer reads what the one before it made: equal equations side by side are no layers."""
    made: set[Any] = set()
    for k in range(run.count):
        own = equations[run.start + k * run.period : run.start + (k + 1) * run.period]
        if k and not any(v in made for e in own for v in variables(e.invars)):
            return False
        made = {v for e in own for v in variables(e.outvars)}
    return True

"""Runs an equation on each device's shards by itself, where XLA's partitioner would gather its operands first.

The rule of such an equation says which shards belong together. The plan gives the layouts in which it reads its
operands; from these follow the axes that split each factor, and from them what the equation is among the shards: a
convolution has fewer groups there. Partial sums are added at the end. Look-ups that exchange ids and rows are done so
too (`exchanged.py`), and products in pieces (`in_pieces.py`).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import Mesh, PartitionSpec

from autoshard.execution.exchanged import exchanged
from autoshard.execution.extreme_places import extreme_place
from autoshard.execution.in_pieces import in_pieces
from autoshard.execution.ragged_rows import with_own_groups
from autoshard.execution.row_major import row_major
from autoshard.execution.scattered_sums import sum_over
from autoshard.execution.two_stage_sums import sum_in_stages
from autoshard.graph.equation_plan import SCATTERING, EquationPlan, ProductPieces
from autoshard.graph.graph import PLACES, Dims, FactorRule
from autoshard.graph.layout import SpecEntries
from autoshard.trace.rules.leaf import leaf_of
from autoshard.trace.rules.table import BY_SHARDS, table_rule

_AxesOf = dict[int, tuple[str, ...]]
"""The mesh axes that split each factor, major to minor."""


def rule_by_shards(equation: jex.JaxprEqn, wanted: EquationPlan) -> FactorRule | None:
    """The rule of an equation that must run by shards; None for any other."""
    is_own = wanted.exchange is not None or wanted.pieces is not None
    is_scattered = bool(wanted.scatters) and equation.primitive.name in SCATTERING
    if is_own or is_scattered or wanted.exchanges_parts:
        return table_rule(leaf_of(equation))
    rule = table_rule(leaf_of(equation)) if equation.primitive.name in BY_SHARDS else None
    return rule if rule is not None and rule.by_shards else None


def run_by_shards(
    equation: jex.JaxprEqn,
    operands: Sequence[Any],
    rule: FactorRule,
    wanted: EquationPlan,
    mesh: Mesh,
    tied: Sequence[tuple[Any, PartitionSpec]] = (),
) -> list[Any]:
    """The results of `equation`, computed shard by shard, then the values that are `tied`.

    Args:
      equation: A leaf equation.
      operands: One array each, in the layouts in which `wanted` says that the equation reads them.
      rule: Its rule, from `rule_by_shards`.
      wanted: The layouts around it. Operands that are not named are those that the program makes from nothing; the
        factors that they alone carry are taken from the results.
      mesh: The mesh of devices.
      tied: Values that are to be read by others only when each device has made its own part of the results, which need
        not be summed yet, and how they are spread over the mesh.
    """
    pieces = wanted.pieces
    axes_of = _axes_of(rule, wanted if pieces is None else _once_gathered(wanted, pieces), mesh)
    ways = {factor: math.prod(mesh.shape[a] for a in axes) for factor, axes in axes_of.items()}
    sent = () if wanted.exchange is None else wanted.exchange.axes
    if pieces is not None:
        sent = (pieces.axis,)
    summed = tuple(
        axis
        for factor, axes in axes_of.items()
        if rule.factors[factor].reduction is not None
        for axis in axes
        if axis not in sent
    )
    params, is_place = _local_params(equation, rule, ways), equation.primitive.name in PLACES

    def local(*given: Any) -> list[Any]:
        shards, behind = given[: len(operands)], given[len(operands) :]
        if equation.primitive.name == "ragged_dot_general":
            shards = with_own_groups(equation, shards, rule, axes_of)
        if equation.primitive.name == "fft":
            # XLA's transforms on CPU demand this order of operands and results, and the compiler does not see to it
            # where a collective next to the transform prefers another (jax 0.10.2)
            return [row_major(equation.primitive.bind(*map(row_major, shards), **params))]
        if wanted.exchange is not None:
            results = [exchanged(equation, shards, wanted.exchange, math.prod(mesh.shape[a] for a in sent), summed)]
        elif pieces is not None:
            results = [in_pieces(lambda pair: equation.primitive.bind(*pair, **params), shards, rule, pieces)]
        elif is_place:
            results = [extreme_place(equation, shards[0], summed)]
        elif wanted.sums_first:
            results = [sum_in_stages(equation, shards[0], wanted.sums_first)]
        else:
            results = equation.primitive.bind(*shards, **params)
            results = list(results) if equation.primitive.multiple_results else [results]
        if equation.primitive.name == "top_k":
            # where XLA sorts whole rows for it, it would keep them until the last reader of what is taken; both results
            # in their own order, behind one barrier, end XLA:GPU of jax 0.10.2 (`TopkDecomposer`)
            results = jax.lax.optimization_barrier(results[::-1])[::-1]
        if behind:
            results, behind = jax.lax.optimization_barrier((results, behind))
        if summed and not is_place:
            exchanges = wanted.exchanges_parts
            results = [sum_over(result, summed, wanted.scatters, mesh, exchanges) for result in results]
        return [*results, *behind]

    values, specs = [value for value, _ in tied], [spec for _, spec in tied]
    if not axes_of:
        return local(*operands, *values)
    gathered = {} if pieces is None else {pieces.slot: ((pieces.axis, pieces.dim),)}
    ins = (*(_spec(dims, axes_of, gathered.get(slot, ())) for slot, dims in enumerate(rule.operands)), *specs)
    outs = [*(_spec(dims, axes_of, wanted.scatters) for dims in rule.results), *specs]
    return jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)(*operands, *values)


def _once_gathered(wanted: EquationPlan, pieces: ProductPieces) -> EquationPlan:
    """What the plan would say of a product in pieces if the operand that is gathered came whole."""
    without = lambda entries: tuple(tuple(a for a in axes if a != pieces.axis) for axes in entries)
    operands = tuple((s, (without(steps[-1]),) if s == pieces.slot else steps) for s, steps in wanted.operands)
    return dataclasses.replace(wanted, operands=operands)


def _axes_of(rule: FactorRule, wanted: EquationPlan, mesh: Mesh) -> _AxesOf:
    """The axes of each factor that is split. What the results alone say comes last, and without axes over which a sum
    is scattered."""
    found: _AxesOf = {}
    told: set[int] = set()
    tensors = [(rule.operands[slot], steps[-1]) for slot, steps in wanted.operands]
    summed = {axis for axis, _ in wanted.scatters}
    for slot, entries in wanted.results:
        tensors.append((rule.results[slot], tuple(tuple(a for a in axes if a not in summed) for axes in entries)))
    for dims, entries in tensors:
        here = _factors_of_tensor(rule, dims, entries, mesh)
        found.update({factor: axes for factor, axes in here.items() if factor not in told})
        told.update(factor for dim in dims for factor in dim)
    return found


def _factors_of_tensor(rule: FactorRule, dims: Dims, entries: SpecEntries, mesh: Mesh) -> _AxesOf:
    """The axes of the factors of one tensor: of a dimension made of several, the major ones are split first."""
    found: _AxesOf = {}
    for dim, axes in zip(dims, entries, strict=True):
        left = list(axes)
        for factor in dim:
            ways = 1
            while left and ways < rule.factors[factor].size:
                axis = left.pop(0)
                ways *= mesh.shape[axis]
                found[factor] = (*found.get(factor, ()), axis)
    return found


def _spec(dims: Dims, axes_of: _AxesOf, scatters: Sequence[tuple[str, int]] = ()) -> PartitionSpec:
    """The layout of a tensor whose factors are split as `axes_of` says; scattered axes are the minor ones."""
    split = [[axis for factor in dim for axis in axes_of.get(factor, ())] for dim in dims]
    for axis, dim in scatters:
        split[dim].append(axis)
    return PartitionSpec(*[tuple(axes) or None for axes in split])


def _local_params(equation: jex.JaxprEqn, rule: FactorRule, ways: Mapping[int, int]) -> dict[str, Any]:
    """The parameters of the equation among the shards."""
    params = dict(equation.params)
    if equation.primitive.name == "conv_general_dilated":
        # the groups are the major factor of the kernel's output features, if there is more than one group
        features = rule.operands[1][params["dimension_numbers"].rhs_spec[0]]  # empty if there is one feature
        for key in ("feature_group_count", "batch_group_count"):
            if params[key] > 1:
                params[key] //= ways.get(features[0], 1)
    return params

"""What a strategy allows, as restrictions of the planner: argument layouts and ways to run each group.

A strategy demands what its literature promises, wherever the sizes allow it:

  data axes    split batch factors, and must, where the batch divides; dimension 0 of every batch argument carries them.
               The state they shard (`DataRule`) carries all of them on one dimension; what nothing divides stays whole.
               Only groups that work on sharded state may split other factors: update groups from ZeRO-1 on, weight
               groups in ZeRO-3 (these must: weights are cast and sliced before they are gathered, so that the
               layers of a loop are gathered one at a time). Only gradients may be reduce-scattered, from ZeRO-2 on.
  tensor axes  never split batch or sequence. Every matrix parameter that they divide is sharded over them, and products
               run where those shards are. Partial results are all-reduced.

Everything that this leaves open (which dimension, column or row) is the solver's choice, so that a baseline is the best
of its kind under the cost model.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence

from autoshard.baselines.strategies import DataRule, Strategy
from autoshard.cluster import LogicalMesh
from autoshard.errors import LayoutError
from autoshard.graph.graph import Dims
from autoshard.graph.groups import Group
from autoshard.graph.layout import WHOLE, Assignment, Layout, all_layouts, is_contiguous
from autoshard.planner.allowed import Restrictions
from autoshard.planner.program import Program
from autoshard.planner.roles import Roles


@dataclasses.dataclass(frozen=True, slots=True)
class _GroupRule:
    """What one group may do.

    Attributes:
      data: Factors that data axes may split; None for any. must_data: Whether every data axis must split one.
      may_scatter: Whether data axes may reduce-scatter.
      not_tensor: Factors that tensor axes may not split.
      must_tensor: Factors of which every tensor axis must split one; None if it need not.
    """

    data: frozenset[int] | None
    must_data: bool
    may_scatter: bool
    not_tensor: frozenset[int]
    must_tensor: frozenset[int] | None


def restrictions(
    strategy: Strategy, program: Program, roles: Roles, mesh: LogicalMesh, tensor_axes: Collection[str]
) -> Restrictions:
    """The restrictions of `strategy` for a program on a mesh.

    Args:
      strategy: The strategy.
      program: The prepared program. roles: Its roles.
      mesh: The mesh. tensor_axes: Names of its axes that split weights; the others are data axes.

    Raises:
      LayoutError: If the batch does not divide by the data axes.
    """
    tensor = tuple(n for n, axis in enumerate(mesh.axes) if axis.name in tensor_axes)
    data = tuple(n for n in range(len(mesh.axes)) if n not in tensor)
    allowed = [
        _argument_layouts(i, strategy, program, roles, mesh, data, tensor) for i in range(len(program.graph.arguments))
    ]
    rules = [_group_rule(g, strategy, program, roles, mesh.shape, data, tensor) for g in program.groups]

    def group(index: int, assignment: Assignment, scatter: Layout) -> bool:
        rule = rules[index]
        for a in data:
            f = assignment[a]
            if f == WHOLE and rule.must_data or f != WHOLE and rule.data is not None and f not in rule.data:
                return False
            if scatter[a] != WHOLE and not rule.may_scatter:
                return False
        for a in tensor:
            f = assignment[a]
            if (
                f in rule.not_tensor
                or scatter[a] != WHOLE
                or rule.must_tensor is not None
                and f not in rule.must_tensor
            ):
                return False
        return True

    return Restrictions(lambda index, layout: layout in allowed[index], group)


def _argument_layouts(
    index: int,
    strategy: Strategy,
    program: Program,
    roles: Roles,
    mesh: LogicalMesh,
    data: tuple[int, ...],
    tensor: tuple[int, ...],
) -> frozenset[Layout]:
    """The layouts that an argument may have."""
    argument = program.graph.arguments[index]
    value = program.graph.values[argument.value]
    shape = () if value.dtype.startswith("key") else value.shape
    on = lambda layout, axes: {layout[a] for a in axes}
    layouts = [l for l in all_layouts(shape, mesh.shape) if not on(l, tensor) & roles.token_dims[index]]
    if index in roles.batch_arguments:
        layouts = [l for l in layouts if on(l, data) <= {0} and on(l, tensor) <= {WHOLE}]
        if not layouts:
            ways = math.prod(mesh.shape[a] for a in data)
            raise LayoutError(
                f"Data parallelism splits the batch over {ways} devices, but dimension 0 of `{argument.name}` "
                f"with shape {shape} is no multiple of {ways}. Change the batch size, or use fewer data-parallel "
                "devices (mesh=)."
            )
        return frozenset(layouts)
    shards_data = data and (
        index in roles.parameters
        and strategy.data is DataRule.ZERO3
        or index in roles.optimizer_state
        and strategy.data is not DataRule.DDP
    )
    is_sharded = lambda l: len(on(l, data)) == 1 and on(l, data) != {WHOLE}
    is_split = lambda l: WHOLE not in on(l, tensor)
    wants_tensor = tensor and index in roles.matrix_parameters
    return frozenset(
        (shards_data and wants_tensor and [l for l in layouts if is_sharded(l) and is_split(l)])
        or (wants_tensor and [l for l in layouts if on(l, data) <= {WHOLE} and is_split(l)])
        or (shards_data and [l for l in layouts if is_sharded(l)])
        or [l for l in layouts if on(l, data) <= {WHOLE}]
    )


def _group_rule(
    group: Group,
    strategy: Strategy,
    program: Program,
    roles: Roles,
    sizes: Sequence[int],
    data: tuple[int, ...],
    tensor: tuple[int, ...],
) -> _GroupRule:
    """What a group may do."""
    g, rule = group.index, strategy.data
    batch, tokens = roles.batch_factors[g], roles.batch_factors[g] | roles.sequence_factors[g]
    prepares_shards = rule is DataRule.ZERO3 and g in roles.weight_groups
    updates_shards = rule not in (None, DataRule.DDP) and g in roles.update_groups
    sums_shards = rule is not None and rule.shards_gradients and g in roles.gradient_groups
    weights = [group.reads[r].dims for r in roles.matrix_reads[g]]
    columns = [{f for f in _factors(dims) - tokens if _can_split(group, f, tensor, sizes)} for dims in weights]
    must_split = batch
    if prepares_shards:  # a cast or a slice comes before the gather
        must_split = {f for a in group.reads if program.graph.values[a.value].shape for f in _factors(a.dims)}
    return _GroupRule(
        None if prepares_shards or updates_shards else batch,
        any(_can_split(group, f, data, sizes) for f in must_split),
        prepares_shards or updates_shards or sums_shards,
        tokens,
        next((frozenset(c) for c in columns if c), None) if tensor else None,
    )


def _factors(dims: Dims) -> set[int]:
    return {f for factors in dims for f in factors}


def _can_split(group: Group, factor: int, axes: tuple[int, ...], sizes: Sequence[int]) -> bool:
    """Whether all of `axes` together can split a factor."""
    assignment = tuple(factor if a in axes else WHOLE for a in range(len(sizes)))
    factor_sizes = tuple(f.size for f in group.factors)
    return (
        factor_sizes[factor] > 1
        and factor_sizes[factor] % math.prod(sizes[a] for a in axes) == 0
        and all(is_contiguous(access.dims, assignment, factor_sizes, sizes) for access in (*group.reads, *group.writes))
    )

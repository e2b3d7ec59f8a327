"""What a strategy allows, as restrictions of the planner: argument layouts and ways to run each group.

A strategy demands what its literature promises, wherever the sizes allow it:

  data axes    split batch factors, and must, where the batch divides; dimension 0 of every batch argument carries them.
               The state they shard (`DataRule`) carries all of them on one dimension; what nothing divides stays whole.
               Only groups that work on sharded state may split other factors: update groups from ZeRO-1 on, weight
               groups in ZeRO-3 (these must: weights are cast and sliced before they are gathered, so that the
               layers of a loop are gathered one at a time). Only gradients may be reduce-scattered, from ZeRO-2 on.
  spread       weights (`Spread`) carry all data axes on one dimension whatever the rule, and so do the groups that work
               on them. What tables find may be reduce-scattered; what lies sorted by expert may be split by expert, and
               tensor axes split inside experts.
  tensor axes  split features alone, never the batch. Every matrix parameter that they divide is sharded over them, and
               products run where those shards are. Partial results are all-reduced. With `TensorRule.SEQUENCE`, what
               is no product may also be split by sequence, and products with weights reduce-scatter onto it.

Everything that this leaves open (which dimension, column or row) is the solver's choice, so that a baseline is the best
of its kind under the cost model.
"""

import dataclasses
import math
from collections.abc import Collection

from autoshard.cluster import LogicalMesh
from autoshard.errors import LayoutError
from autoshard.graph.graph import Dims
from autoshard.graph.groups import Group
from autoshard.graph.layout import WHOLE, Layout, all_layouts, is_contiguous
from autoshard.planner.allowed import Restrictions
from autoshard.planner.choices import Choice
from autoshard.planner.program import Program
from autoshard.planner.roles import MATRIX_OPERATIONS, Roles
from autoshard.strategies.spread import SpreadWeights, spread_weights
from autoshard.strategies.strategies import DataRule, Spread, Strategy, TensorRule


@dataclasses.dataclass(frozen=True, slots=True)
class _GroupRule:
    """What one group may do.

    Attributes:
      data: Factors that data axes may split; None for any. must_data: Whether every data axis must split one.
      may_scatter: Whether data axes may reduce-scatter.
      tensor: Factors that tensor axes may split.
      must_tensor: Factors of which every tensor axis must split one; None if it need not.
      scatter_to: The dimension of the result that tensor axes reduce-scatter partial results onto; `WHOLE` if they
        all-reduce them.
    """

    data: frozenset[int] | None
    must_data: bool
    may_scatter: bool
    tensor: frozenset[int]
    must_tensor: frozenset[int] | None
    scatter_to: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Setting:
    """A strategy on a program and a mesh.

    Attributes:
      spread: The weights that are spread over the data axes; None for none.
      data, tensor: Positions of the mesh axes.
    """

    strategy: Strategy
    program: Program
    roles: Roles
    spread: SpreadWeights | None
    mesh: LogicalMesh
    data: tuple[int, ...]
    tensor: tuple[int, ...]


def why_unsuited(strategy: Strategy, program: Program, roles: Roles) -> str:
    """Why `strategy` means nothing for a program, whatever the mesh; empty if it does."""
    if strategy.spread is not None and spread_weights(strategy.spread, program, roles) is None:
        what = {
            Spread.EXPERTS: "no experts: no product with weights that come one for each of several inputs",
            Spread.TABLES: "no look-up tables, other than those that take part in products too",
            Spread.ROWS: "no look-up of fewer ids than its table has rows",
            Spread.COLUMNS: "no look-up of fewer ids than its table has rows",
        }[strategy.spread]
        return f"The strategy `{strategy.name}` does not apply: the program has {what}. Choose another strategy."
    if strategy.tensor is TensorRule.SEQUENCE and not any(
        roles.matrix_reads[g.index] and _sequence_dim(g, roles) != WHOLE for g in program.groups
    ):
        return (
            f"The strategy `{strategy.name}` does not apply: the program has no sequences, which are dimension 1 of "
            "integer batch arguments. Choose another strategy."
        )
    return ""


def restrictions(
    strategy: Strategy, program: Program, roles: Roles, mesh: LogicalMesh, tensor_axes: Collection[str]
) -> Restrictions:
    """The restrictions of `strategy` for a program on a mesh.

    Args:
      strategy: The strategy.
      program: The prepared program. roles: Its roles.
      mesh: The mesh. tensor_axes: Names of its axes that split weights; the others are data axes.

    Raises:
      LayoutError: If the batch, or the number of experts, does not divide by the data axes, or the strategy does not
        apply to the program.
    """
    if reason := why_unsuited(strategy, program, roles):
        raise LayoutError(reason)
    tensor = tuple(n for n, axis in enumerate(mesh.axes) if axis.name in tensor_axes)
    data = tuple(n for n in range(len(mesh.axes)) if n not in tensor)
    spread = spread_weights(strategy.spread, program, roles) if strategy.spread else None
    setting = _Setting(strategy, program, roles, spread, mesh, data, tensor)
    allowed = [_argument_layouts(i, setting) for i in range(len(program.graph.arguments))]
    rules = [_group_rule(g, setting) for g in program.groups]

    def group(index: int, choice: Choice) -> bool:
        rule, assignment, scatter = rules[index], choice.assignment, choice.scatter
        if choice.exchanged and strategy.spread is not Spread.ROWS:
            return False
        table = program.shapes[index].table
        for a in data:
            f = table.look_up.rows if table is not None and a in choice.exchanged else assignment[a]
            if f == WHOLE and rule.must_data or f != WHOLE and rule.data is not None and f not in rule.data:
                return False
            if scatter[a] != WHOLE and not rule.may_scatter:
                return False
        own = program.groups[index]
        return all(_suits_tensor_axis(rule, own, assignment[a], scatter[a]) for a in tensor)

    return Restrictions(lambda index, layout: layout in allowed[index], group)


def tensor_restrictions(program: Program, roles: Roles, mesh: LogicalMesh, tensor_axis: str) -> Restrictions:
    """Restrictions under which one mesh axis splits features alone, as in Megatron; the others may do anything.

    Args:
      program: The prepared program. roles: Its roles.
      mesh: The mesh. tensor_axis: The name of its axis that splits weights.
    """
    (tensor,) = (n for n, axis in enumerate(mesh.axes) if axis.name == tensor_axis)
    setting = _Setting(Strategy(None, TensorRule.MEGATRON), program, roles, None, mesh, (), (tensor,))
    allowed = [{l[tensor] for l in _argument_layouts(i, setting)} for i in range(len(program.graph.arguments))]
    rules = [_group_rule(g, setting) for g in program.groups]

    def group(index: int, choice: Choice) -> bool:
        own, scatter = choice.assignment[tensor], choice.scatter[tensor]
        return tensor not in choice.exchanged and _suits_tensor_axis(rules[index], program.groups[index], own, scatter)

    return Restrictions(lambda index, layout: layout[tensor] in allowed[index], group)


def _suits_tensor_axis(rule: _GroupRule, group: Group, factor: int, scatter: int) -> bool:
    """Whether a tensor axis may split this factor of a group, and scatter its partial results so."""
    is_partial = factor != WHOLE and group.factors[factor].reduction is not None
    return (
        (factor == WHOLE or factor in rule.tensor)
        and scatter == (rule.scatter_to if is_partial else WHOLE)
        and (rule.must_tensor is None or factor in rule.must_tensor)
    )


def _argument_layouts(index: int, setting: _Setting) -> frozenset[Layout]:
    """The layouts that an argument may have."""
    strategy, roles, data, tensor = setting.strategy, setting.roles, setting.data, setting.tensor
    argument = setting.program.graph.arguments[index]
    value = setting.program.graph.values[argument.value]
    shape = () if value.dtype.startswith("key") else value.shape
    on = lambda layout, axes: {layout[a] for a in axes}
    layouts = [l for l in all_layouts(shape, setting.mesh.shape) if not on(l, tensor) & roles.token_dims[index]]
    ways = math.prod(setting.mesh.shape[a] for a in data)
    if index in roles.batch_arguments:
        layouts = [l for l in layouts if on(l, data) <= {0} and on(l, tensor) <= {WHOLE}]
        if not layouts:
            raise LayoutError(
                f"Data parallelism splits the batch over {ways} devices, but dimension 0 of `{argument.name}` "
                f"with shape {shape} is no multiple of {ways}. Change the batch size, or use fewer data-parallel "
                "devices (mesh=)."
            )
        return frozenset(layouts)
    wants_tensor = bool(tensor) and index in roles.matrix_parameters
    is_split = lambda l: WHOLE not in on(l, tensor)
    if setting.spread is not None and (dims := setting.spread.dims.get(index)):
        parts = [l for l in layouts if len(on(l, data)) == 1 and on(l, data) <= dims]
        if not parts and strategy.spread is Spread.EXPERTS:
            raise LayoutError(
                f"Expert parallelism gives each of {ways} devices its own experts, but `{argument.name}` with shape "
                f"{shape} holds them along dimension {min(dims)}, which is no multiple of {ways}. Change the number of "
                "experts, or use fewer data-parallel devices (mesh=)."
            )
        if parts:
            apart = [
                l for l in parts if is_split(l) and (strategy.spread is not Spread.EXPERTS or not on(l, tensor) & dims)
            ]
            return frozenset(apart if wants_tensor and apart else parts)
    shards_data = bool(data) and (
        index in roles.parameters
        and strategy.data is DataRule.ZERO3
        or index in roles.optimizer_state - roles.welded_state
        and strategy.data is not DataRule.DDP
    )
    is_sharded = lambda l: len(on(l, data)) == 1 and on(l, data) != {WHOLE}
    is_whole = lambda l: on(l, data) <= {WHOLE}
    wishes = (
        [l for l in layouts if shards_data and wants_tensor and is_sharded(l) and is_split(l)],
        [l for l in layouts if wants_tensor and is_whole(l) and is_split(l)],
        [l for l in layouts if shards_data and is_sharded(l)],
    )
    return frozenset(next(filter(None, wishes), [l for l in layouts if is_whole(l)]))


def _group_rule(group: Group, setting: _Setting) -> _GroupRule:
    """What a group may do."""
    program, roles, data, tensor = setting.program, setting.roles, setting.data, setting.tensor
    g, rule = group.index, setting.strategy.data
    can_split = lambda f, axes: _can_split(group, f, axes, setting.mesh.shape)
    batch, sequence = roles.batch_factors[g], roles.sequence_factors[g]
    everything = frozenset(range(len(group.factors)))

    prepares_shards = rule is DataRule.ZERO3 and g in roles.weight_groups
    updates_shards = rule not in (None, DataRule.DDP) and g in roles.update_groups
    sums_shards = rule is not None and rule.shards_gradients and g in roles.gradient_groups
    by_data = everything if prepares_shards or updates_shards else batch
    must_split, may_scatter = batch, prepares_shards or updates_shards or sums_shards
    if prepares_shards:  # a cast or a slice comes before the gather
        must_split = {f for a in group.reads if program.graph.values[a.value].shape for f in _factors(a.dims)}
    experts: frozenset[int] = frozenset()
    if setting.spread is not None:
        own = setting.spread.must.get(g, frozenset())
        if setting.strategy.spread is Spread.EXPERTS:
            experts = own
        if any(can_split(f, data) for f in own):
            by_data = must_split = own
            may_scatter = setting.strategy.spread is not Spread.EXPERTS and g in setting.spread.readers
        by_data |= setting.spread.may.get(g, frozenset())

    is_product = any(program.graph.operations[o].name in MATRIX_OPERATIONS for o in group.operations)
    weights = [group.reads[r].dims for r in roles.matrix_reads[g]]
    columns = [{f for f in _factors(dims) - batch - sequence - experts if can_split(f, tensor)} for dims in weights]
    by_tensor = (roles.feature_factors[g] if batch else everything) - batch - sequence - experts
    scatter_to = WHOLE
    if setting.strategy.tensor is TensorRule.SEQUENCE:
        if not is_product:
            by_tensor |= sequence
        elif weights and any(can_split(f, tensor) for f in sequence):
            scatter_to = _sequence_dim(group, roles)
    return _GroupRule(
        by_data,
        any(can_split(f, data) for f in must_split),
        may_scatter,
        by_tensor,
        next((frozenset(c) for c in columns if c), None) if tensor else None,
        scatter_to,
    )


def _sequence_dim(group: Group, roles: Roles) -> int:
    """The dimension of the group's result that is the sequence; `WHOLE` if none is."""
    sequence = roles.sequence_factors[group.index]
    dims = group.writes[-1].dims if group.writes else ()
    return next((d for d, factors in enumerate(dims) if sequence.intersection(factors)), WHOLE)


def _factors(dims: Dims) -> set[int]:
    return {f for factors in dims for f in factors}


def _can_split(group: Group, factor: int, axes: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether all of `axes` together can split a factor."""
    assignment = tuple(factor if a in axes else WHOLE for a in range(len(sizes)))
    factor_sizes = tuple(f.size for f in group.factors)
    return (
        factor_sizes[factor] > 1
        and factor_sizes[factor] % math.prod(sizes[a] for a in axes) == 0
        and all(is_contiguous(access.dims, assignment, factor_sizes, sizes) for access in (*group.reads, *group.writes))
    )

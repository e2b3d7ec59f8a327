"""Weights that devices share out instead of copying, found in a program: experts, and look-up tables.

  * *Experts* are weights of products that have a factor in common with both the other operand and the result, one that
    is neither batch nor sequence: the product is many small ones side by side, one for each expert.
  * *Tables* are weights that are looked up and take part in no product. They may be split by rows or columns, or by
    rows alone, which look-ups may then exchange, or by columns alone.

With the weights go their moments, and the groups that prepare, use, differentiate and update them. Groups between two
such uses, where the tensors are sorted by expert, may follow.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from autoshard.graph.graph import Dims
from autoshard.graph.tied_dims import TiedDims
from autoshard.planner.program import Program
from autoshard.planner.roles import Roles
from autoshard.strategies.strategies import Spread


@dataclasses.dataclass(frozen=True, slots=True)
class SpreadWeights:
    """Weights of one kind, and what belongs to them.

    Attributes:
      dims: For each weight and each of its moments, as indices into `graph.arguments`, the dimensions of which one may
        be split over all data axes.
      must: For each group that works on them, the factors of which the data axes must split one.
      may: For each other group, by index, factors that data axes may split besides the batch.
      readers: Groups that use the weights: products or look-ups.
    """

    dims: Mapping[int, frozenset[int]]
    must: Mapping[int, frozenset[int]]
    may: Mapping[int, frozenset[int]]
    readers: frozenset[int]


def spread_weights(kind: Spread, program: Program, roles: Roles) -> SpreadWeights | None:
    """The weights of `kind` in a program; None if it has none."""
    return _experts(program, roles) if kind is Spread.EXPERTS else _tables(kind, program, roles)


def _experts(program: Program, roles: Roles) -> SpreadWeights | None:
    shared: dict[int, frozenset[int]] = {}
    used: set[int] = set()
    for group in program.groups:
        own = roles.matrix_reads[group.index]
        others = _factors(a.dims for r, a in enumerate(group.reads) if r not in own)
        tokens = roles.batch_factors[group.index] | roles.sequence_factors[group.index]
        common = others & _factors(a.dims for a in group.writes) - tokens
        for access in (group.reads[r] for r in own):
            if _factors([access.dims]) & common:
                used.add(access.value)
                shared[group.index] = shared.get(group.index, frozenset()) | _factors([access.dims]) & common
    if not used:
        return None
    ties = TiedDims(program.groups)
    sets = {ties.find(("factor", g, f)) for g, factors in shared.items() for f in factors}
    values, groups = _family(program, roles, used)
    in_sets = tuple(ties.factors(g, sets) for g in program.groups)
    dims = {
        i: frozenset(d for d in range(len(shape)) if ties.find(("value", a.value, d)) in sets)
        for i, a, shape in _arguments(program, values)
    }
    must = {g: in_sets[g] for g in groups | shared.keys()}
    is_sorted = [not sequence for sequence in roles.sequence_factors]  # no longer by place in the sequence
    may = {g: factors for g, factors in enumerate(in_sets) if factors and is_sorted[g] and g not in must}
    return SpreadWeights(dims, must, may, frozenset(shared))


def _tables(kind: Spread, program: Program, roles: Roles) -> SpreadWeights | None:
    looked_up: dict[int, set[int]] = {}
    multiplied: set[int] = set()
    for group in program.groups:
        reads = {group.reads[r].value for r in roles.matrix_reads[group.index]}
        if all(program.graph.operations[o].name == "gather" for o in group.operations):
            looked_up[group.index] = reads
        else:
            multiplied |= reads
    sources = {v: _sources(program, roles, {v}) for v in {*multiplied}.union(*looked_up.values())}
    in_products = set().union(*(sources[v] for v in multiplied))
    used = {g: {v for v in reads if not sources[v] & in_products} for g, reads in looked_up.items()}
    used = {g: reads for g, reads in used.items() if reads}
    is_sparse = any(shape.is_sparse for shape in program.shapes)
    if not used or kind is not Spread.TABLES and not is_sparse:
        return None
    values, groups = _family(program, roles, set().union(*used.values()))
    of_kind = {Spread.TABLES: slice(None), Spread.ROWS: slice(-2, -1), Spread.COLUMNS: slice(-1, None)}[kind]
    dims = {i: frozenset(range(len(shape))[of_kind]) for i, _, shape in _arguments(program, values)}
    must = {
        g: _factors(a.dims[of_kind] for a in (*program.groups[g].reads, *program.groups[g].writes) if a.value in values)
        - roles.batch_factors[g]
        for g in groups | used.keys()
    }
    return SpreadWeights(dims, must, {}, frozenset(used))


def _arguments(program: Program, values: set[int]) -> Iterable[tuple]:
    """Index, argument and shape of the tensors among `values`."""
    graph = program.graph
    for i, a in enumerate(graph.arguments):
        if a.value in values and graph.values[a.value].shape:
            yield i, a, graph.values[a.value].shape


def _sources(program: Program, roles: Roles, values: set[int]) -> set[int]:
    """`values` and what weight groups make them of, matrices alone."""
    found = set(values)
    for group in reversed(program.groups):
        if group.index in roles.weight_groups and any(a.value in found for a in group.writes):
            found.update(a.value for a in group.reads if len(program.graph.values[a.value].shape) > 1)
    return found


def _family(program: Program, roles: Roles, used: set[int]) -> tuple[set[int], set[int]]:
    """What belongs to the weights that are `used`: values, and groups that prepare, differentiate or update them.

    The update of one weight meets that of another in scalars alone.
    """
    graph = program.graph
    values = _sources(program, roles, used)
    values |= {o.value for o in graph.outputs if o.successor_of is not None and o.value is not None
               and graph.arguments[o.successor_of].value in values}  # fmt: skip
    groups: set[int] = set()
    own = roles.weight_groups | roles.update_groups
    size = -1
    while size < len(values):
        size = len(values)
        for group in program.groups:
            touched = {a.value for a in (*group.reads, *group.writes) if graph.values[a.value].shape}
            if group.index in own and touched & values:
                groups.add(group.index)
                values |= touched
    groups |= {g for g in roles.gradient_groups if any(a.value in values for a in program.groups[g].writes)}
    return values, groups


def _factors(dims: Iterable[Dims]) -> frozenset[int]:
    return frozenset(f for one in dims for factors in one for f in factors)

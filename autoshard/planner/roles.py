"""What the parts of a training step stand for, read from its graph alone: batch, parameters, gradients, update.

Nothing is told by names. The roles follow from how dimensions are tied and where values flow:

  * Dimension 0 of every batch argument (an argument that the program does not return a successor of) is the batch;
    dimension 1 of an integer one is the sequence. Every factor of every group that is tied to it through the
    dimensions of values has the same role. Where a dimension is made of several factors, its major one is tied.
  * A *weight group* has no batch factor and reads state only, directly or through other weight groups: casts, slices.
  * An *update group* has no batch factor, and all that it makes ends in the new state or in a scalar result: the
    optimizer, the clipping of gradients.
  * A *gradient group* sums over the batch, and only update groups read its result.
  * *Optimizer state* is read only by operations without batch whose results end likewise: moments, and the running
    averages of a batch norm. The other tensors of the state are *parameters*.
  * A *feature* is a dimension tied to one of a weight that a product, convolution or look-up reads.
"""

import dataclasses
from collections.abc import Collection, Sequence

from autoshard.errors import LayoutError
from autoshard.graph.graph import Graph
from autoshard.graph.tied_dims import TiedDims
from autoshard.planner.program import Program

MATRIX_OPERATIONS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "gather"})
"""Operations whose weights tensor parallelism splits: products and table look-ups."""


@dataclasses.dataclass(frozen=True, slots=True)
class Roles:
    """The roles in one program.

    Attributes:
      batch_factors, sequence_factors, feature_factors: For each group, its factors of that role.
      batch_arguments: Indices into `graph.arguments` of the tensors whose dimension 0 is the batch.
      parameters: Likewise of the tensors that the forward pass reads.
      optimizer_state: Likewise of the tensors that only the update reads.
      welded_state: Those of them whose update is one group with activations, as for the scale of a batch norm.
      matrix_parameters: The parameters of rank 2 or more that a product, convolution or look-up reads.
      token_dims: For each argument, its dimensions tied to the batch or the sequence.
      weight_groups, update_groups, gradient_groups: Group indices.
      matrix_reads: For each group that is a product, convolution or look-up over the batch, the indices of those of its
        reads that are weights of rank 2 or more.
    """

    batch_factors: tuple[frozenset[int], ...]
    sequence_factors: tuple[frozenset[int], ...]
    feature_factors: tuple[frozenset[int], ...]
    batch_arguments: frozenset[int]
    parameters: frozenset[int]
    optimizer_state: frozenset[int]
    welded_state: frozenset[int]
    matrix_parameters: frozenset[int]
    token_dims: tuple[frozenset[int], ...]
    weight_groups: frozenset[int]
    update_groups: frozenset[int]
    gradient_groups: frozenset[int]
    matrix_reads: tuple[tuple[int, ...], ...]


def roles_of(
    program: Program, batch_argnums: Sequence[int] | None = None, *, batch_leaves: Collection[int] | None = None
) -> Roles:
    """Finds the roles in `program`.

    Args:
      program: The prepared program.
      batch_argnums: The positional arguments that hold the batch; by default those leaves that have no successor
        among the results.
      batch_leaves: The same leaf by leaf, as indices into `graph.arguments`.

    Raises:
      LayoutError: If nothing tells the batch from the state.
    """
    graph = program.graph
    tensors = {i for i, a in enumerate(graph.arguments) if _is_tensor(graph, a.value)}
    succeeded = {o.successor_of for o in graph.outputs if o.successor_of is not None}
    if batch_leaves is not None:
        batch = tensors.intersection(batch_leaves)
    elif batch_argnums is None:
        if not succeeded:
            raise LayoutError(
                "The function returns no new version of any of its arguments, so nothing tells its parameters "
                "from its batch. Name the positional arguments that hold the batch: batch_argnums=1."
            )
        batch = tensors - succeeded
    else:
        batch = {i for i in tensors if graph.arguments[i].position in batch_argnums}
    if not batch:
        raise LayoutError(
            "The function has no tensor argument that could be its batch. Pass the batch as an argument, or name it "
            "with batch_argnums=."
        )
    ties = TiedDims(program.groups)
    batch_sets = ties.of((graph.arguments[i].value, 0) for i in batch)
    sequence_sets = ties.of(
        (graph.arguments[i].value, 1) for i in batch if _is_sequence(graph, graph.arguments[i].value)
    )
    batch_factors = tuple(ties.factors(g, batch_sets) for g in program.groups)
    sequence_factors = tuple(ties.factors(g, sequence_sets - batch_sets) for g in program.groups)
    without_batch = {g.index for g in program.groups if not batch_factors[g.index]}
    state = tensors - batch
    weights = _weight_groups(program, without_batch, {graph.arguments[i].value for i in batch})
    update = _update_groups(program, without_batch)
    readers = _readers(program)
    optimizer = state & succeeded & _read_by_update_alone(program, batch_factors)
    matrix_reads, matrix_values = _matrix_reads(
        program, weights, batch_factors, {graph.arguments[i].value for i in state - optimizer}
    )
    matrices = {i for i in state - optimizer if graph.arguments[i].value in matrix_values}
    feature_sets = ties.of(
        (a.value, d) for a in (graph.arguments[i] for i in matrices) for d in range(len(graph.values[a.value].shape))
    )
    return Roles(
        batch_factors,
        sequence_factors,
        tuple(ties.factors(g, feature_sets - batch_sets - sequence_sets) for g in program.groups),
        frozenset(batch),
        frozenset(state - optimizer),
        frozenset(optimizer),
        frozenset(i for i in optimizer if not readers.get(graph.arguments[i].value, set()) <= update),
        frozenset(matrices),
        tuple(
            frozenset(
                d
                for d in range(len(graph.values[a.value].shape))
                if ties.find(("value", a.value, d)) in batch_sets | sequence_sets
            )
            for a in graph.arguments
        ),
        frozenset(weights),
        frozenset(update),
        frozenset(_gradient_groups(program, batch_factors, update, readers)),
        matrix_reads,
    )


def _is_tensor(graph: Graph, value: int) -> bool:
    return bool(graph.values[value].shape) and not graph.values[value].dtype.startswith("key")


def _is_sequence(graph: Graph, value: int) -> bool:
    return len(graph.values[value].shape) > 1 and graph.values[value].dtype.startswith(("int", "uint"))


def _readers(program: Program) -> dict[int, set[int]]:
    readers: dict[int, set[int]] = {}
    for group in program.groups:
        for access in group.reads:
            readers.setdefault(access.value, set()).add(group.index)
    return readers


def _weight_groups(program: Program, without_batch: set[int], batch_values: set[int]) -> set[int]:
    """The largest set of groups without batch factors that read only state and each other, scalars aside."""
    values, groups = program.graph.values, set(without_batch)
    made_by = {a.value: g.index for g in program.groups for a in g.writes}
    changed = True
    while changed:
        foreign = {
            g
            for g in groups
            if any(
                values[a.value].shape and (a.value in batch_values or made_by.get(a.value, g) not in groups)
                for a in program.groups[g].reads
            )
        }
        groups -= foreign
        changed = bool(foreign)
    return groups


def _update_groups(program: Program, without_batch: set[int]) -> set[int]:
    """The largest set of groups without batch factors whose results reach only successors, scalars and each other."""
    graph, groups, readers = program.graph, set(without_batch), _readers(program)
    other = {
        o.value for o in graph.outputs if o.value is not None and o.successor_of is None and graph.values[o.value].shape
    }
    changed = True
    while changed:
        leaving = {
            g
            for g in groups
            if any(a.value in other or not readers.get(a.value, set()) <= groups for a in program.groups[g].writes)
        }
        groups -= leaving
        changed = bool(leaving)
    return groups


def _read_by_update_alone(program: Program, batch_factors: Sequence[frozenset[int]]) -> set[int]:
    """Arguments that only operations of the update read: of a group that also holds activations, these count alone."""
    graph = program.graph
    has_batch = {
        o
        for group in program.groups
        for o, own in zip(group.operations, group.factor_maps, strict=True)
        if not batch_factors[group.index].isdisjoint(own)
    }
    read_elsewhere = {
        o.value for o in graph.outputs if o.value is not None and o.successor_of is None and graph.values[o.value].shape
    }
    size = -1
    while size < len(read_elsewhere):  # once; again where a loop carries something round
        size = len(read_elsewhere)
        for operation in reversed(graph.operations):
            if operation.index in has_batch or not read_elsewhere.isdisjoint(operation.results):
                read_elsewhere.update(v for v in operation.operands if v is not None)
    return {i for i, a in enumerate(graph.arguments) if a.value not in read_elsewhere}


def _gradient_groups(
    program: Program, batch_factors: Sequence[frozenset[int]], update: set[int], readers: dict[int, set[int]]
) -> set[int]:
    """Groups that sum over the batch into one tensor that only the update reads."""
    found = set()
    for group in program.groups:
        if len(group.writes) != 1 or not batch_factors[group.index]:
            continue
        (write,) = group.writes
        kept = {f for factors in write.dims for f in factors}
        if kept and not kept & batch_factors[group.index] and readers.get(write.value, set()) <= update:
            found.add(group.index)
    return found


def _matrix_reads(
    program: Program, weights: set[int], batch_factors: Sequence[frozenset[int]], parameters: set[int]
) -> tuple[tuple[tuple[int, ...], ...], set[int]]:
    """The weight reads of products and look-ups over the batch, and all values that end in one, parameters included."""
    graph = program.graph
    derived = set(parameters)
    for group in program.groups:
        if group.index in weights and any(a.value in derived for a in group.reads):
            derived.update(a.value for a in group.writes)
    reads, reached = [], set()
    for group in program.groups:
        is_matrix = batch_factors[group.index] and any(
            graph.operations[o].name in MATRIX_OPERATIONS for o in group.operations
        )
        own = tuple(
            r
            for r, a in enumerate(group.reads)
            if is_matrix and a.value in derived and len(graph.values[a.value].shape) > 1
        )
        reads.append(own)
        reached.update(group.reads[r].value for r in own)
    for group in reversed(program.groups):
        if group.index in weights and any(a.value in reached for a in group.writes):
            reached.update(a.value for a in group.reads if len(graph.values[a.value].shape) > 1)
    return tuple(reads), reached

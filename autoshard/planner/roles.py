"""What the parts of a training step stand for, read from its graph alone: batch, parameters, gradients, update.

Nothing is told by names. The roles follow from how dimensions are tied and where values flow:

  * Dimension 0 of every batch argument (an argument that the program does not return a successor of) is the batch;
    dimension 1 of an integer one is the sequence. Every factor of every group that is tied to it through the
    dimensions of values has the same role. Where a dimension is made of several factors, its major one is tied.
  * A *weight group* has no batch factor and reads state only, directly or through other weight groups: casts, slices.
  * An *update group* has no batch factor, and all that it makes ends in the new state or in a scalar result: the
    optimizer, the clipping of gradients.
  * A *gradient group* sums over the batch, and only update groups read its result.
  * *Optimizer state* is read by update groups alone; the other tensors of the state are *parameters*.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from autoshard.errors import LayoutError
from autoshard.graph.graph import Dims, Graph
from autoshard.graph.groups import Group
from autoshard.planner.program import Program

MATRIX_OPERATIONS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "gather"})
"""Operations whose weights tensor parallelism splits: products and table look-ups."""


@dataclasses.dataclass(frozen=True, slots=True)
class Roles:
    """The roles in one program.

    Attributes:
      batch_factors, sequence_factors: For each group, its factors of that role.
      batch_arguments: Indices into `graph.arguments` of the tensors whose dimension 0 is the batch.
      parameters: Likewise of the tensors that the forward pass reads.
      optimizer_state: Likewise of the tensors that only the update reads.
      matrix_parameters: The parameters of rank 2 or more that a product, convolution or look-up reads.
      token_dims: For each argument, its dimensions tied to the batch or the sequence.
      weight_groups, update_groups, gradient_groups: Group indices.
      matrix_reads: For each group that is a product, convolution or look-up over the batch, the indices of those of its
        reads that are weights of rank 2 or more.
    """

    batch_factors: tuple[frozenset[int], ...]
    sequence_factors: tuple[frozenset[int], ...]
    batch_arguments: frozenset[int]
    parameters: frozenset[int]
    optimizer_state: frozenset[int]
    matrix_parameters: frozenset[int]
    token_dims: tuple[frozenset[int], ...]
    weight_groups: frozenset[int]
    update_groups: frozenset[int]
    gradient_groups: frozenset[int]
    matrix_reads: tuple[tuple[int, ...], ...]


def roles_of(program: Program, batch_argnums: Sequence[int] | None = None) -> Roles:
    """Finds the roles in `program`.

    Args:
      program: The prepared program.
      batch_argnums: The positional arguments that hold the batch; by default those leaves that have no successor
        among the results.

    Raises:
      LayoutError: If nothing tells the batch from the state.
    """
    graph = program.graph
    tensors = {i for i, a in enumerate(graph.arguments) if _is_tensor(graph, a.value)}
    succeeded = {o.successor_of for o in graph.outputs if o.successor_of is not None}
    if batch_argnums is None:
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
    ties = _Ties(program)
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
    optimizer = {i for i in state if i in succeeded and readers.get(graph.arguments[i].value, set()) <= update}
    matrix_reads, matrix_values = _matrix_reads(
        program, weights, batch_factors, {graph.arguments[i].value for i in state - optimizer}
    )
    return Roles(
        batch_factors,
        sequence_factors,
        frozenset(batch),
        frozenset(state - optimizer),
        frozenset(optimizer),
        frozenset(i for i in state - optimizer if graph.arguments[i].value in matrix_values),
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


class _Ties:
    """Disjoint sets of dimensions of values and factors of groups that are split together."""

    def __init__(self, program: Program):
        self.parent: dict[tuple, tuple] = {}
        for group in program.groups:
            for access in (*group.reads, *group.writes):
                for d, factor in enumerate(_major(group, access.dims)):
                    if factor is not None:
                        self._join(("value", access.value, d), ("factor", group.index, factor))

    def find(self, node: tuple) -> tuple:
        """The representative of a node's set."""
        root = node
        while self.parent.get(root, root) != root:
            root = self.parent[root]
        while self.parent.get(node, node) != root:
            self.parent[node], node = root, self.parent[node]
        return root

    def _join(self, x: tuple, y: tuple) -> None:
        x, y = self.find(x), self.find(y)
        if x != y:
            self.parent[y] = x

    def of(self, dims: Iterable[tuple[int, int]]) -> set[tuple]:
        """The sets of (value, dimension) pairs."""
        return {self.find(("value", v, d)) for v, d in dims}

    def factors(self, group: Group, sets: set[tuple]) -> frozenset[int]:
        """The factors of `group` that belong to any of `sets`."""
        return frozenset(f for f in range(len(group.factors)) if self.find(("factor", group.index, f)) in sets)


def _major(group: Group, dims: Dims) -> list[int | None]:
    """For each dimension, its first factor that has an extent; None where it must stay whole."""
    return [next((f for f in factors if group.factors[f].size > 1), None) for factors in dims]


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

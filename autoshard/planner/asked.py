"""What annotated blocks ask for, as demands on the groups of a program.

For a group g with the factors F_g, mesh axes a of sizes n_a and an assignment s of axes to factors, a block asks that

    prod over axes a with s(a) in D of n_a  =  d

where D, a subset of F_g, are the group's factors that are the examples (`replicate`), one of the named dimensions
(`split` with `dims`), or dimensions of weights that the group reads (`split` without); d is the block's degree, times
those of other blocks around the group whose factors lie in D too. A group obeys the blocks that all its operations
stand in; a chain of pointwise operations across the border of a block is a bridge, which the planner lays out.

Products and convolutions must obey. Where another group has no way to (a sort over the examples), it stays free.
"""

import collections
import dataclasses
import fnmatch
import math
from collections.abc import Collection, Iterator, Sequence

from autoshard.annotations.block import Block, BlockKind
from autoshard.cluster import LogicalMesh
from autoshard.errors import AnnotationError, LayoutError
from autoshard.graph.graph import Graph, Operation
from autoshard.graph.groups import Group
from autoshard.graph.layout import Assignment
from autoshard.graph.tied_dims import TiedDims
from autoshard.planner.choices import legal_choices
from autoshard.planner.group_shapes import GroupShape
from autoshard.planner.program import Program
from autoshard.planner.roles import Roles, roles_of

BINDING_OPERATIONS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
"""Operations that must obey."""


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """What a block asks of a group.

    Attributes:
      block: The block. factors: Those of the group of which mesh axes split some, into as many parts as it says.
      others: The degrees of all other blocks around the group together: what they leave is the degree of a block
        without one.
    """

    block: Block
    factors: frozenset[int]
    others: int

    def degree(self, num_devices: int) -> int:
        """The number of parts on so many devices."""
        return num_devices // self.others if self.block.degree is None else self.block.degree


Demands = tuple[Demand, ...]
"""What is asked of one group, the outermost block first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What the blocks of a program ask for.

    Attributes:
      of_groups: For each group, what is asked of it.
      binding: The groups that must obey. blocks: The blocks that ask, one of each line and demand.
    """

    of_groups: tuple[Demands, ...]
    binding: frozenset[int]
    blocks: tuple[Block, ...]


def is_binding(operation: Operation) -> bool:
    """Whether an operation must obey."""
    return operation.name in BINDING_OPERATIONS


def asks(graph: Graph) -> bool:
    """Whether a program has blocks that ask something of its operations."""
    return any(b.kind in (BlockKind.REPLICATE, BlockKind.SPLIT) for o in graph.operations for b in o.blocks)


def asked_of(program: Program, batch_leaves: Collection[int] | None = None) -> Asked | None:
    """What the blocks of a program ask of its groups; None where nothing is asked.

    Args:
      program: The prepared program.
      batch_leaves: The arguments whose dimension 0 is the examples, as indices into `graph.arguments`; None for those
        that have no successor among the results.

    Raises:
      AnnotationError: Blocks contradict each other, or what they speak of is not there.
    """
    graph = program.graph
    if not asks(graph):
        return None
    reader = _Reader(program, batch_leaves)
    of_groups = tuple(reader.demands(group) for group in program.groups)
    is_product = lambda group: any(is_binding(graph.operations[o]) for o in group.operations)
    blocks: dict[tuple[str, str], Block] = {}
    for operation in graph.operations:
        for block in in_force(operation.blocks):
            blocks.setdefault((str(block), block.line), block)
    return Asked(of_groups, frozenset(g.index for g in program.groups if is_product(g)), tuple(blocks.values()))


def check_binding(programs: Sequence[Asked]) -> None:
    """Refuses blocks that ask something of no group at all.

    Args:
      programs: What is asked of all programs together in which the blocks are.

    Raises:
      AnnotationError: There is one.
    """
    bound = {(str(d.block), d.block.line) for asked in programs for demands in asked.of_groups for d in demands}
    for block in dict.fromkeys(block for asked in programs for block in asked.blocks):
        if (str(block), block.line) in bound:
            continue
        if block.dims:
            raise AnnotationError(
                f"An annotation must bind something, but no operation inside {block.at_line} has a dimension that it "
                "names, beside the examples (or only such as are one kernel with operations outside). Correct the "
                'length, or name it by an argument and its dimension, such as dims={"heads": ("*.query.kernel", 1)}; '
                "or put the block around the products that it is meant for."
            )
        what = "has the examples among its dimensions" if block.kind is BlockKind.REPLICATE else "multiplies by weights"
        raise AnnotationError(
            f"An annotation must bind something, but of the operations inside {block.at_line} none {what} (or only "
            "such as are one kernel with operations outside). Put the block around the products that it is meant "
            f"for{', or name what to split: dims=' if block.kind is BlockKind.SPLIT else ''}."
        )


def in_force(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Those of the blocks around an operation that ask something of it, the outermost first.

    Raises:
      AnnotationError: One is to take the place of a block that is not there.
    """
    found: list[Block] = []
    for block in blocks:
        if block.kind not in (BlockKind.REPLICATE, BlockKind.SPLIT):
            continue
        if block.colocated:
            if not found:
                raise AnnotationError(
                    f"A colocated split takes the devices of a `replicate` around it, but nothing is around "
                    f"{block.at_line}. Leave out colocate=True, or put autoshard.replicate(...) around the model."
                )
            found.pop()
        found.append(block)
    return tuple(found)


class _Reader:
    """Reads the demands on the groups of one program."""

    def __init__(self, program: Program, batch_leaves: Collection[int] | None):
        self.program, self.graph = program, program.graph
        self.ties = TiedDims(program.groups)
        self.roles: Roles | None = None
        self.why_no_roles = ""
        try:
            self.roles = roles_of(program, batch_leaves=batch_leaves)
        except LayoutError as error:
            self.why_no_roles = str(error)
        self.dims: dict[tuple[object, ...], set[tuple]] = {}

    def demands(self, group: Group) -> Demands:
        rows = {self.graph.operations[o].blocks for o in group.operations}
        if not any(rows):
            return ()
        blocks = _common([in_force(row) for row in rows])
        open_blocks = [b for b in blocks if b.degree is None]
        if len(open_blocks) > 1:
            raise AnnotationError(
                f"Of blocks inside one another one at most may leave its degree open, but {open_blocks[0].at_line} and "
                f"{open_blocks[1].at_line} both do. Give one of them a number."
            )
        product = math.prod(b.degree for b in blocks if b.degree is not None)
        found = [Demand(b, self.factors(group, b), product // (b.degree or 1)) for b in blocks]
        return tuple(d for d in found if d.factors)

    def batch_factors(self, group: Group) -> frozenset[int]:
        return frozenset() if self.roles is None else self.roles.batch_factors[group.index]

    def factors(self, group: Group, block: Block) -> frozenset[int]:
        """The factors of a group that a block speaks of."""
        if block.dims:
            own = self.ties.factors(group, self.named(block))
            own = own if block.kind is BlockKind.REPLICATE else own - self.batch_factors(group)
            self.check_lengths(group, block, own)
            return own
        if self.roles is None:
            of_what = "a `replicate` splits" if block.kind is BlockKind.REPLICATE else "a `split` tells weights by"
            raise AnnotationError(
                f"{self.why_no_roles} So it is not known what examples are, which {of_what}: {block.at_line}. Plan the "
                "whole training step, or name the dimension: dims=."
            )
        if block.kind is BlockKind.REPLICATE:
            return self.batch_factors(group)
        read = [group.reads[r].dims for r in self.roles.matrix_reads[group.index]]
        return frozenset(f for dims in read for factors in dims for f in factors) - self.batch_factors(group)

    def check_lengths(self, group: Group, block: Block, own: Collection[int]) -> None:
        """Refuses a length that two independent dimensions of one product have: either could be what is meant."""
        product = next((o for o in map(self.graph.operations.__getitem__, group.operations) if is_binding(o)), None)
        if product is None:
            return
        for name, length in block.dims:
            sets = {self.ties.find(("factor", group.index, f)) for f in own if group.factors[f].size == length}
            if len(sets) > 1 and isinstance(length, int):
                raise AnnotationError(
                    f"A length must tell a dimension from all others, but {block.at_line} names `{name}` by the length "
                    f"{length}, which {len(sets)} dimensions of `{product.name}` at {product.source or '?'} have. Name "
                    f"it by an argument and its dimension{self.examples(name, sets)}."
                )

    def examples(self, name: str, sets: Collection[tuple]) -> str:
        """How to write each of several sets of tied dimensions as a dimension of an argument, where one has it."""
        found: dict[tuple, str] = {}
        for argument in self.graph.arguments:
            for d in range(len(self.graph.values[argument.value].shape)):
                found.setdefault(
                    self.ties.find(("value", argument.value, d)), f'{{"{name}": ("{argument.name}", {d})}}'
                )
        told = sorted(found[tied] for tied in sets if tied in found)
        return f": dims={' or '.join(told)}" if told else ""

    def named(self, block: Block) -> set[tuple]:
        """The sets of tied dimensions that a block names: those of its own operations of a length, or of arguments."""
        key = block.dims, block.line
        if key not in self.dims:
            self.dims[key] = set().union(*(self.of_dim(block, name, dim) for name, dim in block.dims))
        return self.dims[key]

    def of_dim(self, block: Block, name: str, dim: int | tuple[str, int]) -> set[tuple]:
        if isinstance(dim, int):
            return {
                self.ties.find(("factor", group.index, f))
                for group in self.program.groups
                if any(b.line == block.line for o in group.operations for b in self.graph.operations[o].blocks)
                for f, factor in enumerate(group.factors)
                if factor.size == dim and (block.kind is BlockKind.REPLICATE or f not in self.batch_factors(group))
            }
        pattern, number = dim
        values = [self.graph.values[a.value] for a in self.graph.arguments if fnmatch.fnmatchcase(a.name, pattern)]
        short = next((v for v in values if len(v.shape) <= number), None)
        if short is not None:
            raise AnnotationError(
                f"{block.at_line} names dimension {number} of {pattern!r} as `{name}`, but `{short.name}` has the "
                f"shape {short.shape}. Dimensions count from 0."
            )
        return self.ties.of((v.index, number) for v in values)


def _common(rows: Sequence[tuple[Block, ...]]) -> tuple[Block, ...]:
    """The blocks that all of several operations stand in; blocks that ask for the same are as good as one."""
    asked = lambda block: (block.kind, block.degree, block.dims)
    left = collections.Counter(map(asked, rows[0]))
    for row in rows[1:]:
        left &= collections.Counter(map(asked, row))
    found = []
    for block in rows[0]:
        if left[asked(block)] > 0:
            left[asked(block)] -= 1
            found.append(block)
    return tuple(found)


def obeys(demands: Demands, assignment: Assignment, sizes: Sequence[int]) -> bool:
    """Whether an assignment of mesh axes of these sizes to factors does what is asked."""
    num_devices = math.prod(sizes)
    for demand in demands:
        wanted = math.prod(d.degree(num_devices) for d in demands if d.factors <= demand.factors)
        if wanted != math.prod(n for n, f in zip(sizes, assignment, strict=True) if f in demand.factors):
            return False
    return True


def obeying(
    demands: Demands, assignments: Sequence[Assignment], rows: tuple[int, ...], sizes: Sequence[int], *, must: bool
) -> tuple[int, ...]:
    """Those of `rows`, indices into `assignments`, that do what is asked of a group.

    Where none does and the group need not, those that do what the outer blocks ask, as many of them as can be.
    """
    for count in range(len(demands), 0, -1):
        found = tuple(k for k in rows if obeys(demands[:count], assignments[k], sizes))
        if found or must:
            return found
    return rows


def refusals(program: Program, mesh: LogicalMesh, asked: Asked) -> Iterator[str]:
    """Why a mesh cannot do what is asked: for each kind of group that must and cannot, its line and what was asked."""
    known: dict[tuple[GroupShape, Demands], bool] = {}
    for g in sorted(asked.binding):
        demands = asked.of_groups[g]
        if not demands:
            continue
        key = program.shapes[g], demands
        if key not in known:
            ways = (assignment for assignment, _ in legal_choices(key[0], mesh.shape))
            known[key] = any(obeys(demands, assignment, mesh.shape) for assignment in ways)
            if not known[key]:
                yield _refusal(program, program.groups[g], demands, mesh)


def _refusal(program: Program, group: Group, demands: Demands, mesh: LogicalMesh) -> str:
    operation = next(o for o in map(program.graph.operations.__getitem__, group.operations) if is_binding(o))
    lengths = lambda d: ", ".join(str(group.factors[f].size) for f in sorted(d.factors))
    told = [
        f"{d.block.at_line} asks for {d.degree(mesh.num_devices)} parts of a length of {lengths(d)}" for d in demands
    ]
    return f"of `{operation.name}` at {operation.source or 'an unknown line'} {'; '.join(told)}"

"""The unified graph: values, and operations whose dimensions are tied together by factors.

This room knows nothing of JAX. `autoshard.trace` builds a `Graph` from a jaxpr; everything below reads only this.

A *factor* is one index of an operation's iteration space, as in Shardy's op sharding rules: a matrix product
`ij,jk->ik` has the factors i, j and k. Splitting a factor over a mesh axis splits every tensor dimension that
carries it; a factor that appears in no result is a reduction and leaves a partial result on each shard.
"""

import dataclasses
import enum
import math

from autoshard.annotations.block import Block


class ValueKind(enum.Enum):
    """Where a value comes from."""

    ARGUMENT = "argument"
    CONSTANT = "constant"
    INTERMEDIATE = "intermediate"


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the program.

    Attributes:
      index: Position in `Graph.values`.
      name: Argument path such as `state.params.wte` or `%123` for an intermediate.
      shape: Global shape.
      dtype: NumPy-style name, e.g. `bfloat16`; keys have their own names, e.g. `key<fry>`.
      itemsize_bytes: Bytes of one element.
      kind: Where it comes from.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize_bytes: int
    kind: ValueKind

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize_bytes


PLACES = frozenset({"argmax", "argmin"})
"""Reductions to the place of the largest or least element: two places are compared by the elements there, so that these
are sent, too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    """One index of an iteration space.

    Attributes:
      size: Extent of the index.
      reduction: None if every result carries the factor; otherwise how partial results combine
        (`add`, `max`, `min`, `mul`, `and`, `or`; of places in `PLACES`, by what lies there).
    """

    size: int
    reduction: str | None = None


Dims = tuple[tuple[int, ...], ...]
"""For each dimension of a tensor, the factors (major to minor) that it is made of; `()` must stay whole."""


def dim_of(factor: int, dims: Dims) -> int | None:
    """The dimension of a tensor that a factor is in; None if it is in none."""
    return next((d for d, factors in enumerate(dims) if factor in factors), None)


@dataclasses.dataclass(frozen=True, slots=True)
class Touched:
    """The part of an operation's first operand that it reads, or changes and hands on as its result.

    Attributes:
      dims: Its dimensions over the operation's factors.
      num_elements: Its elements, over the whole (unsharded) operation.
      is_update: Whether the first result is the first operand with this part changed.
    """

    dims: Dims
    num_elements: int
    is_update: bool


@dataclasses.dataclass(frozen=True, slots=True)
class LookUp:
    """Rows of a table that an operation takes by their ids, or adds to: devices that each own some of the rows can be
    sent the ids of all others, instead of finding their own rows for everybody.

    Attributes:
      rows: The factor of the table's rows.
      ids: The factors of the ids.
      tables: The factors that table and ids have in common: one look-up in one table for each.
    """

    rows: int
    ids: tuple[int, ...]
    tables: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Convolved:
    """What the time of a convolution depends on besides its arithmetic.

    Attributes:
      channels: The factors of the input channels of its kernel.
      is_kernel_gradient: Whether the kernel is what it makes.
    """

    channels: tuple[int, ...]
    is_kernel_gradient: bool


class Attention(enum.Enum):
    """A kernel that computes attention without storing its scores, by which pass it is of (FlashAttention; Dao et al.
    2022, arXiv:2205.14135)."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclasses.dataclass(frozen=True, slots=True)
class FactorRule:
    """How the dimensions of one operation's operands and results are tied by factors.

    Attributes:
      factors: The iteration space.
      operands: For each operand, its `Dims` over `factors`.
      results: For each result, its `Dims` over `factors`.
      flops: Floating-point operations of the whole (unsharded) operation.
      is_heavy: Whether the operation runs as a kernel of its own (matrix products, convolutions, gathers,
        sorts, ...) rather than being fused into its neighbours by the compiler.
      origin: `table` (autoshard's own rule table), `shardy` (read from the partitioner) or `replicated`
        (nothing is known: everything stays whole, and the plan reports it).
      touched: What is touched of the first operand; None for all of it.
      by_shards: Whether execution must run the operation on each device's shards by itself, because XLA's partitioner
        would gather the operands first.
      is_rounded: Whether it multiplies at the device's default precision, which rounds float32 to bfloat16 on some.
      narrowed_bytes: To how many bytes a product's algorithm narrows an element of what it multiplies (one of
        `jax.lax.DotAlgorithmPreset`, which `jax.nn.dot_product_attention` asks for); None for products that take their
        operands as they are.
      look_up: Which rows it takes or adds to, where they may be exchanged for ids; None for any other operation.
      counted: The factor along which the result of an `iota` counts; None for any other operation.
      convolved: What kind of convolution it is; None for any other operation.
      attention: Which pass of fused attention it is; None for any other operation.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    flops: float
    is_heavy: bool
    origin: str
    touched: Touched | None = None
    by_shards: bool = False
    is_rounded: bool = False
    narrowed_bytes: int | None = None
    look_up: LookUp | None = None
    counted: int | None = None
    convolved: Convolved | None = None
    attention: Attention | None = None


class OperationKind(enum.Enum):
    """What part of a program an operation stands for."""

    EQUATION = "equation"  # one equation of the traced program
    LOOP_CARRY = "loop_carry"  # a loop's carried value: (initial, from the body) -> (in the body, after the loop)
    SCAN_SLICE = "scan_slice"  # one iteration's slice of a scanned input
    SCAN_STACK = "scan_stack"  # the stacking of one output over iterations
    BRANCH_JOIN = "branch_join"  # the value that a conditional's branches agree on


FixedLayout = tuple[tuple[str, ...] | None, ...]
"""For each dimension, the mesh axis names that must shard it, major to minor; None leaves the dimension free."""


class OperandsAndResults:
    """What an operation, or an equation that nests some, reads and makes.

    Attributes:
      operands: Value indices; None for a literal.
      results: Value indices; None where a result is never used.
    """

    __slots__ = ()
    name: str
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]

    def operand(self, slot: int) -> int:
        """The value that operand `slot` is. Raises ValueError if it is a literal."""
        if (value := self.operands[slot]) is None:
            raise ValueError(f"Operand {slot} of `{self.name}` is a literal, where a value is needed: {self}.")
        return value

    def result(self, slot: int = 0) -> int:
        """The value that result `slot` is. Raises ValueError if it is never used."""
        if (value := self.results[slot]) is None:
            raise ValueError(f"Result {slot} of `{self.name}` is never used, but a value is needed: {self}.")
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """What each device runs of a part that a program splits by hand (`shard_map`): a program of its own.

    Attributes:
      mesh: The axes of the mesh that it is written for, major to minor, with their sizes.
      body: The program of one device. All in it is whole: its shapes are those of shards. Its collectives name the mesh
        axes that they run over (`Operation.over`).
    """

    mesh: tuple[tuple[str, int], ...]
    body: "Graph"


@dataclasses.dataclass(frozen=True, slots=True)
class Operation(OperandsAndResults):
    """One operation of the flattened program.

    Attributes:
      index: Position in `Graph.operations`, which is program order.
      equation: Number of the traced equation it comes from, counting depth first through nested programs.
      kind: See `OperationKind`.
      name: Primitive name.
      operands, results: As in `OperandsAndResults`.
      rule: How its dimensions are tied.
      trips: How often it runs in one call of the program (product of the trip counts around it).
      source: The user's line, `file.py:12 (function)`.
      fixed_results: A layout that the program itself demands of each result; None where it demands nothing.
      fixed_operands: Likewise for operands.
      slot: Which input of the equation's body a carry or slice is, or which result a stack or join is; 0 otherwise.
      blocks: The annotated blocks that it stands in, the outermost first.
      region: What it runs on each device, where the program splits that by hand.
      over: In the body of a region, the mesh axes that a collective runs over.
    """

    index: int
    equation: int
    kind: OperationKind
    name: str
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    rule: FactorRule
    trips: float
    source: str
    fixed_results: tuple[FixedLayout | None, ...] | None = None
    fixed_operands: tuple[FixedLayout | None, ...] | None = None
    slot: int = 0
    blocks: tuple[Block, ...] = ()
    region: Region | None = None
    over: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Its name and the user's line, if that is known."""
        return f"{self.name} at {self.source}" if self.source else self.name


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A loop body: operations `start <= index < stop` of the graph run `trips` times."""

    start: int
    stop: int
    trips: float


@dataclasses.dataclass(frozen=True, slots=True)
class Nesting:
    """An equation that nests programs: a call, a loop or a conditional. What it nests stands in the graph by itself.

    Attributes:
      equation, name, operands, results: As in `Operation`.
      starts: The first equation of each nested program, in the order of their numbers.
      stop: One past the last nested equation.
      is_inlined: Whether execution inlines the program: what it makes is as if the equations around it had made it.
      is_checkpoint: Whether it calls a checkpointed function.
    """

    equation: int
    name: str
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    starts: tuple[int, ...]
    stop: int
    is_inlined: bool
    is_checkpoint: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """One flattened argument of the program.

    Attributes:
      value: Its value index.
      position: Which positional argument it belongs to.
      name: Path such as `0.params.wte.embedding`, used by pins.
      donated: Whether its buffer may be reused for an output.
      fixed: Layout demanded by the argument's own annotation (Flax partitioning metadata), if any.
    """

    value: int
    position: int
    name: str
    donated: bool
    fixed: FixedLayout | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """One flattened output: its value (None for a literal), its path, and the argument whose successor it is, if any.

    An output succeeds an argument where the function returns a new version of its state: both then share one layout,
    so that the function can be called on its own result.
    """

    value: int | None
    name: str
    successor_of: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    """A whole program: values, operations in program order, loops, and its interface.

    Attributes:
      equations: Signature of every traced equation in depth-first order, which identifies the program.
      unknown: Sources of the equations of which no sharding rule is known (kept whole).
      checkpoints: (first operation, one past the last) of each checkpointed function: the compiler shares nothing that
        is made inside with what is made outside.
      nestings: The equations that nest operations of the graph, in the order of their numbers.
      host_copies: Lines of the program's own copies between devices and the memory of their hosts.
    """

    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    loops: tuple[Loop, ...]
    arguments: tuple[Argument, ...]
    outputs: tuple[Output, ...]
    equations: tuple[str, ...]
    unknown: tuple[str, ...]
    checkpoints: tuple[tuple[int, int], ...] = ()
    nestings: tuple[Nesting, ...] = ()
    host_copies: tuple[str, ...] = ()

    def checkpoint_of(self) -> tuple[int, ...]:
        """For each operation, the number of the innermost checkpointed function around it; -1 for none."""
        inside = [-1] * len(self.operations)
        for number, (start, stop) in sorted(enumerate(self.checkpoints), key=lambda c: c[1][0] - c[1][1]):
            inside[start:stop] = [number] * (stop - start)
        return tuple(inside)

"""The unified graph: values, and operations whose dimensions are tied together by factors.

This room knows nothing of JAX. `autoshard.trace` builds a `Graph` from a jaxpr; everything below reads only this.

A *factor* is one index of an operation's iteration space, as in Shardy's op sharding rules: a matrix product
`ij,jk->ik` has the factors i, j and k. Splitting a factor over a mesh axis splits every tensor dimension that
carries it; a factor that appears in no result is a reduction and leaves a partial result on each shard.
"""

import dataclasses
import enum
import math


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


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    """One index of an iteration space.

    Attributes:
      size: Extent of the index.
      reduction: None if every result carries the factor; otherwise how partial results combine
        (`add`, `max`, `min`, `mul`, `and`, `or`).
    """

    size: int
    reduction: str | None = None


Dims = tuple[tuple[int, ...], ...]
"""For each dimension of a tensor, the factors (major to minor) that it is made of; `()` must stay whole."""


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
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    flops: float
    is_heavy: bool
    origin: str

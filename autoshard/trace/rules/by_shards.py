"""Rules of primitives that are parallel, but whose operands XLA's partitioner gathers (tried on jax 0.10.2, CPU).

Execution runs them on each device's shards by itself, see `autoshard/execution/by_shards.py`. Convolutions with groups
are of this kind too, see `contractions`.
"""

import math

from autoshard.graph.graph import Dims, FactorRule
from autoshard.trace.rules.iteration_space import WHOLE, IterationSpace
from autoshard.trace.rules.leaf import Leaf

SPECIAL_FUNCTIONS = frozenset("igamma igamma_grad_a igammac random_gamma_grad regularized_incomplete_beta".split())
"""Functions of one element that are computed by a loop of a fixed number of terms at most."""

_FLOPS_PER_TERM = 10.0
"""An estimate: a term of a power series or continued fraction multiplies, divides and adds a few times."""

_NUM_TERMS = 20.0
"""An estimate of how many terms are summed until they no longer matter in float32."""


def fft(leaf: Leaf) -> FactorRule:
    """The transformed dimensions, which are the last ones, stay whole.

    A transform of n points is counted as the customary 5 n log2(n) operations, one from or to reals as half.
    """
    (operand,), (result,) = leaf.operands, leaf.results
    lengths = tuple(leaf.params["fft_lengths"])
    batch = operand.shape[: len(operand.shape) - len(lengths)]
    space = IterationSpace()
    dims: Dims = space.parallel(batch) + (WHOLE,) * len(lengths)
    num_points = math.prod(lengths)
    is_complex = operand.dtype.startswith("complex") and result.dtype.startswith("complex")
    flops = (5.0 if is_complex else 2.5) * math.prod(batch) * num_points * math.log2(max(num_points, 1))
    return space.close((dims,), (dims,), flops=flops, is_heavy=True, by_shards=True)


def top_k(leaf: Leaf) -> FactorRule:
    """`top_k` and `approx_top_k`: the dimension of which some elements are taken stays whole."""
    (operand,) = leaf.operands
    axis = leaf.params["reduction_dimension" if leaf.name == "approx_top_k" else "axis"] % len(operand.shape)
    space = IterationSpace()
    dims = tuple(WHOLE if i == axis else space.factor(size) for i, size in enumerate(operand.shape))
    return space.close((dims,), (dims,) * len(leaf.results), flops=operand.size, is_heavy=True, by_shards=True)


def special_function(leaf: Leaf) -> FactorRule | None:
    """All tensors have one shape; each element is computed by itself."""
    shape = leaf.results[0].shape
    if any(tensor.shape != shape for tensor in leaf.operands):
        return None
    space = IterationSpace()
    dims = space.parallel(shape)
    flops = _FLOPS_PER_TERM * _NUM_TERMS * leaf.results[0].size
    return space.close((dims,) * len(leaf.operands), (dims,), flops=flops, is_heavy=True, by_shards=True)

"""Rules of random numbers: keys are small and stay whole, the bits made from them are parallel.

Threefry computes every element from the key and the element's position (`jax_threefry_partitionable`, the default),
so that each shard can make its own part.
"""

from autoshard.graph.graph import FactorRule
from autoshard.trace.rules.iteration_space import IterationSpace, whole
from autoshard.trace.rules.leaf import Leaf


def random_bits(leaf: Leaf) -> FactorRule:
    """Bits of one key are parallel; dimensions that come from several keys must stay whole."""
    (keys,), (result,) = leaf.operands, leaf.results
    space = IterationSpace()
    rank = len(keys.shape)
    dims = whole(keys.shape) + space.parallel(result.shape[rank:])
    return space.close((whole(keys.shape),), (dims,), flops=result.size)

"""Rules of primitives that stay whole, though some are parallel in theory.

Random keys are small, and every shard wants them. Tokens have no dimensions. The others XLA's partitioner does not
split: given split operands it gathers them first (seen in the programs it compiles for CPU, jax 0.10.2).
"""

from autoshard.graph.graph import FactorRule
from autoshard.trace.rules.iteration_space import REPLICATED, IterationSpace, whole
from autoshard.trace.rules.leaf import Leaf

LIGHT = frozenset(
    """after_all axis_index create_token dce_sink random_clone random_fold_in random_seed random_split random_unwrap
    random_wrap rng_uniform""".split()
)
"""Keys and tokens, a generator that XLA keeps whole, and the number of a device."""

HEAVY = frozenset("random_gamma rng_bit_generator".split())
"""Primitives with a kernel of their own."""


CALLBACKS = frozenset("debug_callback debug_print io_callback pure_callback".split())
"""Functions of the host, such as `jax.debug.print`: it is given whole arrays."""


def _rigid(leaf: Leaf, flops: float, is_heavy: bool) -> FactorRule:
    return IterationSpace().close(
        tuple(whole(operand.shape) for operand in leaf.operands),
        tuple(whole(result.shape) for result in leaf.results),
        flops=flops,
        is_heavy=is_heavy,
    )


def replicated(leaf: Leaf) -> FactorRule:
    """The rule of an equation of which nothing is known: all of it stays whole, and the plan reports it."""
    return IterationSpace().close(
        tuple(whole(operand.shape) for operand in leaf.operands),
        tuple(whole(result.shape) for result in leaf.results),
        flops=sum(result.size for result in leaf.results),
        is_heavy=True,
        origin=REPLICATED,
    )


def light(leaf: Leaf) -> FactorRule:
    """Rule of a primitive in `LIGHT`."""
    return _rigid(leaf, 0.0, is_heavy=False)


def heavy(leaf: Leaf) -> FactorRule:
    """Rule of a primitive in `HEAVY`; its cost is taken as one operation an element of the operands."""
    return _rigid(leaf, float(sum(operand.size for operand in leaf.operands)), is_heavy=True)


def callback(leaf: Leaf) -> FactorRule:
    """Rule of a primitive in `CALLBACKS`; what the host computes is not counted."""
    return _rigid(leaf, 0.0, is_heavy=True)


def collective(leaf: Leaf) -> FactorRule:
    """Rule of a collective inside a region: each device has its own operands and results."""
    return _rigid(leaf, 0.0, is_heavy=True)

"""Rules of factorisations and triangular systems: batch dimensions are parallel."""

from autoshard.graph.graph import FactorRule
from autoshard.trace.rules.iteration_space import IterationSpace, whole
from autoshard.trace.rules.leaf import Leaf


def _batched(leaf: Leaf, core_rank: int, flops: float) -> FactorRule:
    """All tensors share their leading dimensions; the last `core_rank` of each must stay whole."""
    shape = leaf.operands[0].shape
    space = IterationSpace()
    batch = space.parallel(shape[: len(shape) - core_rank])
    dims = batch + whole(shape[len(shape) - core_rank :])
    return space.close((dims,) * len(leaf.operands), (dims,) * len(leaf.results), flops=flops, is_heavy=True)


def cholesky(leaf: Leaf) -> FactorRule:
    """n^3/3 operations a matrix (Golub and Van Loan, Matrix Computations, 4.2)."""
    (operand,) = leaf.operands
    return _batched(leaf, 2, operand.size * operand.shape[-1] / 3)


def triangular_solve(leaf: Leaf) -> FactorRule:
    """n^2 operations for each right-hand side of n elements (Golub and Van Loan, Matrix Computations, 3.1)."""
    matrix, rhs = leaf.operands
    return _batched(leaf, 2, rhs.size * matrix.shape[-1])

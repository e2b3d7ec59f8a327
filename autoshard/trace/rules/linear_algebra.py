"""Rules of factorisations, triangular systems and Fourier transforms: batch dimensions are parallel."""

import math

from autoshard.graph.graph import FactorRule
from autoshard.trace.rules.iteration_space import IterationSpace, whole
from autoshard.trace.rules.operation import Operation


def _batched(operation: Operation, core_rank: int, flops: float) -> FactorRule:
    """All tensors share their leading dimensions; the last `core_rank` of each must stay whole."""
    shape = operation.operands[0].shape
    space = IterationSpace()
    batch = space.parallel(shape[: len(shape) - core_rank])
    dims = batch + whole(shape[len(shape) - core_rank :])
    return space.close((dims,) * len(operation.operands), (dims,) * len(operation.results), flops=flops, is_heavy=True)


def cholesky(operation: Operation) -> FactorRule:
    """n^3/3 operations a matrix (Golub and Van Loan, Matrix Computations, 4.2)."""
    (operand,) = operation.operands
    return _batched(operation, 2, operand.size * operand.shape[-1] / 3)


def triangular_solve(operation: Operation) -> FactorRule:
    """n^2 operations for each right-hand side of n elements (Golub and Van Loan, Matrix Computations, 3.1)."""
    matrix, rhs = operation.operands
    return _batched(operation, 2, rhs.size * matrix.shape[-1])


def fft(operation: Operation) -> FactorRule:
    """5 n log2 n operations a transform, the customary count (fftw.org/speed)."""
    lengths = operation.params["fft_lengths"]
    points = math.prod(lengths)
    flops = 5 * operation.operands[0].size * math.log2(max(points, 1))
    return _batched(operation, len(lengths), flops)

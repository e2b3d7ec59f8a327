"""Rules of factorisations and triangular systems: batch dimensions are parallel.

Operations are counted as in Golub and Van Loan, Matrix Computations (4th edition), whose sections are named. Some
libraries choose algorithms with more of them.
"""

import math
from collections.abc import Callable, Mapping

from autoshard.graph.graph import FactorRule
from autoshard.trace.rules.iteration_space import IterationSpace, whole
from autoshard.trace.rules.leaf import Leaf


def _batched(leaf: Leaf, flops: float) -> FactorRule:
    """All tensors share the dimensions before the first operand's matrices; the others must stay whole."""
    space = IterationSpace()
    batch = space.parallel(leaf.operands[0].shape[:-2])
    dims = lambda tensor: batch + whole(tensor.shape[len(batch) :])
    operands, results = tuple(map(dims, leaf.operands)), tuple(map(dims, leaf.results))
    return space.close(operands, results, flops=flops, is_heavy=True)


def cholesky(leaf: Leaf) -> FactorRule:
    """n^3/3 operations a matrix (4.2)."""
    (operand,) = leaf.operands
    return _batched(leaf, operand.size * operand.shape[-1] / 3)


def triangular_solve(leaf: Leaf) -> FactorRule:
    """n^2 operations for each right-hand side of n elements (3.1)."""
    matrix, rhs = leaf.operands
    return _batched(leaf, rhs.size * matrix.shape[-1])


def _eliminated(m: int, n: int) -> float:
    """An m x n matrix made triangular by elimination (3.2): 2/3 n^3 where it is square."""
    k = min(m, n)
    return 2 * (m * n * k - (m + n) * k**2 / 2 + k**3 / 3)


def _reflected(m: int, n: int) -> float:
    """The same by Householder reflections, or what these make of the unit matrix's first columns (5.2)."""
    return 2 * _eliminated(m, n)


def _lu(leaf: Leaf, m: int, n: int) -> float:
    return _eliminated(m, n)


def _geqrf(leaf: Leaf, m: int, n: int) -> float:
    return _reflected(m, n)


def _qr(leaf: Leaf, m: int, n: int) -> float:
    """Reflections, and the orthonormal columns that they make: min(m, n) of them, or all m (5.2)."""
    k = min(m, n)
    return _reflected(m, n) + (
        4 * (m**2 * k - m * k**2 + k**3 / 3) if leaf.params["full_matrices"] else _reflected(m, k)
    )


def _eigh(leaf: Leaf, m: int, n: int) -> float:
    """The symmetric QR algorithm with vectors (8.3)."""
    return 9 * n**3


def _tridiagonal(leaf: Leaf, m: int, n: int) -> float:
    """Householder's tridiagonalisation (8.3)."""
    return 4 / 3 * n**3


def _hessenberg(leaf: Leaf, m: int, n: int) -> float:
    """Householder's reduction to Hessenberg form (7.4)."""
    return 10 / 3 * n**3


def _schur(leaf: Leaf, m: int, n: int) -> float:
    """The QR algorithm, with vectors or for the triangle alone (7.5); those of `eig` are substituted back from it."""
    params = leaf.params
    names = ("compute_schur_vectors", "compute_left_eigenvectors", "compute_right_eigenvectors")
    return (25 if any(params.get(name) for name in names) else 10) * n**3


def _svd(leaf: Leaf, m: int, n: int) -> float:
    """Golub and Reinsch's, with all vectors, with min(m, n) of them, or without (8.6)."""
    m, n = max(m, n), min(m, n)
    if not leaf.params["compute_uv"]:
        return 4 * m * n**2 - 4 / 3 * n**3
    if leaf.params["full_matrices"]:
        return 4 * m**2 * n + 8 * m * n**2 + 9 * n**3
    return 14 * m * n**2 + 8 * n**3


FACTORISATIONS: Mapping[str, Callable[[Leaf, int, int], float]] = {
    "eig": _schur,
    "eigh": _eigh,
    "geqrf": _geqrf,
    "hessenberg": _hessenberg,
    "householder_product": _geqrf,
    "lu": _lu,
    "qr": _qr,
    "schur": _schur,
    "svd": _svd,
    "tridiagonal": _tridiagonal,
}
"""The operations that a factorisation of an m x n matrix takes, by primitive."""


def factorisation(leaf: Leaf) -> FactorRule:
    """Rule of a primitive in `FACTORISATIONS`. Complex numbers count as real ones."""
    *batch, m, n = leaf.operands[0].shape
    return _batched(leaf, math.prod(batch) * float(FACTORISATIONS[leaf.name](leaf, m, n)))

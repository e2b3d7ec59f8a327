"""Rules of primitives that treat every element alike, and of those that pass each operand to its own result."""

from autoshard.graph.graph import Dims, FactorRule
from autoshard.trace.rules.iteration_space import WHOLE, IterationSpace, whole
from autoshard.trace.rules.operation import Operation

ARITHMETIC = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
    cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag
    integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mulhi ne neg nextafter not or
    polygamma population_count pow random_gamma real reduce_precision regularized_incomplete_beta rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh threefry2x32
    xor zeta""".split()
)
"""Primitives whose results have one common shape, to which every operand is broadcast; one operation an element."""

CONVERSION = frozenset({"convert_element_type", "copy", "copy_p", "name", "reduced_vary_cast", "stop_gradient"})
"""As `ARITHMETIC`, but no floating-point operation is counted."""

PASS_THROUGH = frozenset(
    {"device_put", "layout_constraint", "mesh_cast", "optimization_barrier", "pvary", "reshard", "sharding_constraint"}
)
"""Primitives that hand operand i to result i unchanged."""


def _broadcast(shape: tuple[int, ...], result_shape: tuple[int, ...], result: Dims) -> Dims | None:
    """The dimensions of an operand that is broadcast to a result: of equal rank with sizes equal or 1, or a scalar."""
    if not shape:
        return ()
    if len(shape) != len(result_shape):
        return None
    dims = []
    for size, result_size, factors in zip(shape, result_shape, result, strict=True):
        if size != result_size and size != 1:
            return None
        dims.append(factors if size == result_size else WHOLE)
    return tuple(dims)


def elementwise(operation: Operation, flops_per_element: float) -> FactorRule | None:
    """All tensors share one index for each dimension of the result.

    Args:
      operation: An elementwise operation with any number of operands and results.
      flops_per_element: Counted for each element of the first result.

    Returns:
      The rule, or None if the shapes are not those of an elementwise operation.
    """
    shape = operation.results[0].shape
    if any(result.shape != shape for result in operation.results):
        return None
    space = IterationSpace()
    dims = space.parallel(shape)
    operands = []
    for operand in operation.operands:
        operand_dims = _broadcast(operand.shape, shape, dims)
        if operand_dims is None:
            return None
        operands.append(operand_dims)
    return space.close(
        tuple(operands), (dims,) * len(operation.results), flops=flops_per_element * operation.results[0].size
    )


def arithmetic(operation: Operation) -> FactorRule | None:
    """Rule of a primitive in `ARITHMETIC`."""
    return elementwise(operation, flops_per_element=1.0)


def conversion(operation: Operation) -> FactorRule | None:
    """Rule of a primitive in `CONVERSION`."""
    return elementwise(operation, flops_per_element=0.0)


def pass_through(operation: Operation) -> FactorRule | None:
    """Each operand and the result of the same position share indices of their own."""
    if [operand.shape for operand in operation.operands] != [result.shape for result in operation.results]:
        return None
    space = IterationSpace()
    dims = tuple(space.parallel(operand.shape) for operand in operation.operands)
    return space.close(dims, dims)


def bitcast(operation: Operation) -> FactorRule:
    """`bitcast_convert_type`: as a conversion, but a trailing dimension that appears or goes must stay whole."""
    (operand,), (result,) = operation.operands, operation.results
    space = IterationSpace()
    common = min(len(operand.shape), len(result.shape))
    dims = space.parallel(operand.shape[:common])
    return space.close(
        (dims + whole(operand.shape[common:]),),
        (dims + whole(result.shape[common:]),),
    )


def without_arrays(operation: Operation) -> FactorRule | None:
    """Tokens and sinks: nothing can be split."""
    return IterationSpace().close(
        tuple(whole(operand.shape) for operand in operation.operands),
        tuple(whole(result.shape) for result in operation.results),
    )

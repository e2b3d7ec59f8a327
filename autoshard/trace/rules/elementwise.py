"""Rules of primitives that treat every element alike, and of those that pass each operand to its own result."""

from autoshard.graph.graph import Dims, FactorRule
from autoshard.trace.rules.iteration_space import WHOLE, IterationSpace, whole
from autoshard.trace.rules.leaf import Leaf

ARITHMETIC = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
    cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le le_to lgamma
    log log1p logistic lt lt_to max min mul ne neg nextafter not or polygamma population_count pow real reduce_precision
    rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan
    tanh threefry2x32 xor zeta""".split()
)
"""Primitives whose results have one common shape, to which every operand is broadcast; one operation an element."""

LATER_ARITHMETIC = frozenset({"one_minus_square"})
"""The same, of JAX versions later than the oldest supported one."""

CONVERSION = frozenset({"convert_element_type", "copy", "name", "stop_gradient"})
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


def elementwise(leaf: Leaf, flops_per_element: float) -> FactorRule | None:
    """All tensors share one index for each dimension of the result.

    Args:
      leaf: A leaf with any number of operands and results.
      flops_per_element: Counted for each element of the first result.

    Returns:
      The rule, or None if the shapes are not those of an elementwise operation.
    """
    shape = leaf.results[0].shape
    if any(result.shape != shape for result in leaf.results):
        return None
    space = IterationSpace()
    dims = space.parallel(shape)
    operands = []
    for operand in leaf.operands:
        operand_dims = _broadcast(operand.shape, shape, dims)
        if operand_dims is None:
            return None
        operands.append(operand_dims)
    return space.close(tuple(operands), (dims,) * len(leaf.results), flops=flops_per_element * leaf.results[0].size)


def arithmetic(leaf: Leaf) -> FactorRule | None:
    """Rule of a primitive in `ARITHMETIC` or `LATER_ARITHMETIC`."""
    return elementwise(leaf, flops_per_element=1.0)


def conversion(leaf: Leaf) -> FactorRule | None:
    """Rule of a primitive in `CONVERSION`."""
    return elementwise(leaf, flops_per_element=0.0)


def pass_through(leaf: Leaf) -> FactorRule | None:
    """Each operand and the result of the same position share indices of their own."""
    if [operand.shape for operand in leaf.operands] != [result.shape for result in leaf.results]:
        return None
    space = IterationSpace()
    dims = tuple(space.parallel(operand.shape) for operand in leaf.operands)
    return space.close(dims, dims)


def bitcast(leaf: Leaf) -> FactorRule:
    """`bitcast_convert_type`: as a conversion, but a trailing dimension that appears or goes must stay whole."""
    (operand,), (result,) = leaf.operands, leaf.results
    space = IterationSpace()
    common = min(len(operand.shape), len(result.shape))
    dims = space.parallel(operand.shape[:common])
    return space.close(
        (dims + whole(operand.shape[common:]),),
        (dims + whole(result.shape[common:]),),
    )

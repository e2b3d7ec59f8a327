"""The table: for each primitive the function that states its rule."""

from collections.abc import Callable

from autoshard.graph.graph import FactorRule
from autoshard.trace.rules import (
    contractions,
    elementwise,
    indexing,
    layout,
    linear_algebra,
    random_bits,
    reductions,
    slicing,
)
from autoshard.trace.rules.operation import Operation

Rule = Callable[[Operation], FactorRule | None]
"""States the rule of an operation, or None if the operation has a form that the function does not cover."""

TABLE: dict[str, Rule] = {
    **dict.fromkeys(elementwise.ARITHMETIC, elementwise.arithmetic),
    **dict.fromkeys(elementwise.CONVERSION, elementwise.conversion),
    **dict.fromkeys(elementwise.PASS_THROUGH, elementwise.pass_through),
    **dict.fromkeys(reductions.COMBINERS, reductions.reduce_known),
    **dict.fromkeys(("argmax", "argmin", "reduce", "reduce_xor"), reductions.reduce_whole),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), reductions.cumulative),
    **dict.fromkeys(
        (
            "reduce_window",
            "reduce_window_max",
            "reduce_window_min",
            "reduce_window_sum",
            "select_and_gather_add",
            "select_and_scatter_add",
        ),
        reductions.window,
    ),
    **dict.fromkeys((*indexing.COMBINERS, "scatter"), indexing.scatter),
    **dict.fromkeys(
        (
            "random_fold_in",
            "random_seed",
            "random_split",
            "random_unwrap",
            "random_wrap",
            "rng_bit_generator",
            "rng_uniform",
        ),
        random_bits.keys_whole,
    ),
    **dict.fromkeys(("after_all", "create_token", "dce_sink"), elementwise.without_arrays),
    **dict.fromkeys(("iota", "empty2"), layout.iota),
    **dict.fromkeys(("slice", "dynamic_slice"), slicing.slice_),
    "approx_top_k": reductions.approx_top_k,
    "bitcast_convert_type": elementwise.bitcast,
    "broadcast_in_dim": layout.broadcast_in_dim,
    "cholesky": linear_algebra.cholesky,
    "concatenate": slicing.concatenate,
    "conv_general_dilated": contractions.conv_general_dilated,
    "dot_general": contractions.dot_general,
    "dynamic_update_slice": slicing.dynamic_update_slice,
    "fft": linear_algebra.fft,
    "gather": indexing.gather,
    "pad": slicing.pad,
    "random_bits": random_bits.random_bits,
    "reshape": layout.reshape,
    "rev": slicing.rev,
    "sort": reductions.sort,
    "split": slicing.split,
    "squeeze": layout.squeeze,
    "stack": slicing.stack,
    "tile": slicing.tile,
    "top_k": reductions.top_k,
    "transpose": layout.transpose,
    "triangular_solve": linear_algebra.triangular_solve,
    "unstack": slicing.unstack,
}


def table_rule(operation: Operation) -> FactorRule | None:
    """Looks an operation up.

    Args:
      operation: A leaf operation.

    Returns:
      Its rule, or None if the table does not know the primitive, or not in this form.
    """
    rule = TABLE.get(operation.name)
    return None if rule is None else rule(operation)

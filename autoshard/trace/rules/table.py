"""The table: for each primitive the function that states its rule."""

from collections.abc import Callable

from autoshard.graph.graph import PLACES, FactorRule
from autoshard.trace.rules import (
    attention,
    by_shards,
    collectives,
    contractions,
    elementwise,
    indexing,
    layout,
    linear_algebra,
    random_bits,
    reductions,
    rigid,
    slicing,
)
from autoshard.trace.rules.leaf import Leaf

Rule = Callable[[Leaf], FactorRule | None]
"""States the rule of an equation, or None if it has a form that the function does not cover."""

TABLE: dict[str, Rule] = {
    **dict.fromkeys(elementwise.ARITHMETIC | elementwise.LATER_ARITHMETIC, elementwise.arithmetic),
    **dict.fromkeys(elementwise.CONVERSION, elementwise.conversion),
    **dict.fromkeys(elementwise.PASS_THROUGH, elementwise.pass_through),
    **dict.fromkeys(reductions.COMBINERS, reductions.reduce_known),
    **dict.fromkeys(PLACES, reductions.extreme_place),
    **dict.fromkeys(("reduce", "reduce_xor"), reductions.reduce_whole),
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
    **dict.fromkeys((*indexing.COMBINERS, "scatter", "scatter-sub"), indexing.scatter),
    **dict.fromkeys(by_shards.SPECIAL_FUNCTIONS, by_shards.special_function),
    **dict.fromkeys(("approx_top_k", "top_k"), by_shards.top_k),
    **dict.fromkeys(linear_algebra.FACTORISATIONS, linear_algebra.factorisation),
    **dict.fromkeys(attention.FUSED, attention.fused),
    **dict.fromkeys(attention.FUSED_FP8, rigid.replicated),
    **dict.fromkeys(rigid.LIGHT, rigid.light),
    **dict.fromkeys(rigid.HEAVY, rigid.heavy),
    **dict.fromkeys(rigid.CALLBACKS, rigid.callback),
    **dict.fromkeys(collectives.NAMES, rigid.collective),
    **dict.fromkeys(("iota", "empty2"), layout.iota),
    **dict.fromkeys(("slice", "dynamic_slice"), slicing.slice_),
    "bitcast_convert_type": elementwise.bitcast,
    "broadcast_in_dim": layout.broadcast_in_dim,
    "cholesky": linear_algebra.cholesky,
    "concatenate": slicing.concatenate,
    "conv_general_dilated": contractions.conv_general_dilated,
    "dot_general": contractions.dot_general,
    "dynamic_update_slice": slicing.dynamic_update_slice,
    "fft": by_shards.fft,
    "gather": indexing.gather,
    "pad": slicing.pad,
    "ragged_dot_general": contractions.ragged_dot,
    "random_bits": random_bits.random_bits,
    "reshape": layout.reshape,
    "rev": slicing.rev,
    "sort": reductions.sort,
    "split": slicing.split,
    "squeeze": layout.squeeze,
    "stack": slicing.stack,
    "tile": slicing.tile,
    "transpose": layout.transpose,
    "triangular_solve": linear_algebra.triangular_solve,
    "unstack": slicing.unstack,
}

BY_SHARDS = frozenset(
    name
    for name, rule in TABLE.items()
    if rule
    in (
        attention.fused,
        by_shards.fft,
        by_shards.special_function,
        by_shards.top_k,
        contractions.conv_general_dilated,
        contractions.ragged_dot,
        reductions.extreme_place,
    )
)
"""The primitives whose rules may say `FactorRule.by_shards`."""


def table_rule(leaf: Leaf) -> FactorRule | None:
    """Looks an equation up.

    Args:
      leaf: A leaf equation.

    Returns:
      Its rule, or None if the table does not know the primitive, or not in this form.
    """
    rule = TABLE.get(leaf.name)
    return None if rule is None else rule(leaf)

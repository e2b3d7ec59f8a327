"""The rule of cuDNN's fused attention, `jax.nn.dot_product_attention(..., implementation="cudnn")`.

Its kernels never store the scores (FlashAttention; Dao et al. 2022, arXiv:2205.14135). Examples and heads are parallel;
positions and the elements of a head stay whole, as JAX's own partitioning of these kernels demands. JAX states no rule
for them that Shardy could tell: that which it states leaves the examples of keys and values apart from those of queries
(jax 0.10.2). They run by shards.

Several query heads may share a head of keys and values (grouped-query attention; Ainslie et al. 2023,
arXiv:2305.13245): heads are split as those of keys and values are, so that each device has whole groups.
"""

from autoshard.graph.attention_flops import attention_flops
from autoshard.graph.graph import Attention, Dims, FactorRule
from autoshard.trace.rules.iteration_space import WHOLE, IterationSpace
from autoshard.trace.rules.leaf import Leaf, TensorType
from autoshard.trace.rules.rigid import replicated

FUSED = frozenset({"dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"})
"""What JAX calls its forward and backward pass (0.10 to 0.12)."""

FUSED_FP8 = frozenset({"dot_product_attention_fp8_fwd_wrapper", "dot_product_attention_fp8_bwd_wrapper"})
"""Those for 8-bit floats, which have other operands; they stay whole."""

_HEADS_FIRST = 1
"""The value of the parameter `layout` for (examples, heads, positions, head); else positions come before heads."""
_NUM_FORWARD, _NUM_BACKWARD = 10, 13
"""Operands: queries, keys, values, bias, two lengths, two offsets, two page tables; then, of the backward pass, the
statistics of the softmax, the result, and its gradient. Those that are absent have no elements."""
_BIAS, _LENGTHS, _PAGE_TABLES = 3, slice(4, 8), slice(8, 10)


def fused(leaf: Leaf) -> FactorRule:
    """Examples and heads are parallel, all else stays whole.

    Nothing is split of keys in pages (for inference), of several sequences packed into one example, of scores that the
    user's own function changes, and of the gradient of a bias that examples or heads share.
    """
    is_backward = leaf.name == "dot_product_attention_bwd_wrapper"
    attention = Attention.BACKWARD if is_backward else Attention.FORWARD
    count = _NUM_BACKWARD if is_backward else _NUM_FORWARD
    packed = any(len(length.shape) > 1 for length in leaf.operands[_LENGTHS])
    if packed or len(leaf.operands) != count or any(table.size for table in leaf.operands[_PAGE_TABLES]):
        return replicated(leaf)
    if leaf.params.get("score_mod") is not None:  # since jax 0.12
        return replicated(leaf)
    query, key, value = leaf.operands[:3]
    is_heads_first = leaf.params["layout"] == _HEADS_FIRST
    at_heads, at_positions = (1, 2) if is_heads_first else (2, 1)
    space = IterationSpace()
    example, head = space.factor(query.shape[0]), space.factor(key.shape[at_heads])
    of_array: Dims = (example, head, WHOLE, WHOLE) if is_heads_first else (example, WHOLE, head, WHOLE)
    of_rows: Dims = (example, head, WHOLE)
    bias = leaf.operands[_BIAS]
    of_bias = _of_bias(bias, query.shape[0], query.shape[at_heads], example, head)
    if is_backward and leaf.params["variadic_args"][1] and of_bias[:2] != (example, head):
        return replicated(leaf)  # the gradient of a bias is summed over what shares it
    lengths = tuple((example,) if length.size else (WHOLE,) for length in leaf.operands[_LENGTHS])
    tables = tuple((WHOLE,) * len(table.shape) for table in leaf.operands[_PAGE_TABLES])
    operands = (of_array, of_array, of_array, of_bias, *lengths, *tables)
    if is_backward:
        operands = (*operands, of_rows, of_array, of_array)
    results = (of_array, of_array, of_array, of_bias) if is_backward else (of_array, of_rows)
    flops = attention_flops(
        attention,
        query.shape[0] * query.shape[at_heads],
        query.shape[at_positions],
        key.shape[at_positions],
        (query.shape[-1], value.shape[-1]),
        is_causal="CAUSAL" in leaf.params["mask_type"].name,
        window=leaf.params["sliding_window_length"],
    )
    return space.close(
        operands, results[: len(leaf.results)], flops=flops, is_heavy=True, by_shards=True, attention=attention
    )


def _of_bias(
    bias: TensorType, num_examples: int, num_heads: int, example: tuple[int, ...], head: tuple[int, ...]
) -> Dims:
    """The dimensions of a bias (examples or 1, heads or 1, queries, keys); of one that is absent, a whole one."""
    if len(bias.shape) != 4:
        return (WHOLE,) * len(bias.shape)
    return (
        example if bias.shape[0] == num_examples else WHOLE,
        head if bias.shape[1] == num_heads else WHOLE,
        WHOLE,
        WHOLE,
    )

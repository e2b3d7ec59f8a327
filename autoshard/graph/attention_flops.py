"""The arithmetic of attention that never stores its scores (FlashAttention; Dao et al. 2022, arXiv:2205.14135).

The forward pass has two products, of queries with keys and of weights with values. The backward pass has those of the
gradients of both operands of each, and the first one again. Only what a causal mask or a window leaves is computed: the
kernels leave out blocks of scores that are masked entirely. Padding, whose lengths are not known, is computed.
"""

from autoshard.graph.graph import Attention


def attention_flops(
    attention: Attention,
    heads: int,
    num_queries: int,
    num_keys: int,
    head_dims: tuple[int, int],
    *,
    is_causal: bool,
    window: int | None,
) -> float:
    """Floating-point operations of fused attention; a multiplication and an addition are two.

    Args:
      attention: Which pass. heads: Of queries, times examples.
      head_dims: Elements of a head of queries and keys, and of values.
      is_causal: Whether query n sees the keys 0 to n alone. window: How many of these it sees at most; None for all.
    """
    seen = num_keys if not (is_causal and window) else min(window, num_keys)
    most = min(num_queries, seen)  # query n sees n + 1 keys, but no more than `seen`
    pairs = most * (most + 1) / 2 + (num_queries - most) * seen if is_causal else num_queries * num_keys
    of_scores, of_values = (2.0 * heads * pairs * head_dim for head_dim in head_dims)
    return of_scores + of_values if attention is Attention.FORWARD else 3 * of_scores + 2 * of_values

"""cuDNN's attention, as `jax.nn.dot_product_attention` traces it; rules and operations derived by hand."""

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.graph.graph import Attention, Factor
from autoshard.trace.rules import rule_of

EXAMPLE, HEAD = 0, 1
ARRAY, ROWS = ((EXAMPLE,), (), (HEAD,), ()), ((EXAMPLE,), (HEAD,), ())  # (examples, positions, heads, head)
PAIRS = 4 * 8 * (16 * 17 / 2)  # examples x heads x what a causal mask leaves of 16 x 16


def bf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def attend(**options):
    return lambda q, k, v, *bias: jax.nn.dot_product_attention(q, k, v, *bias, implementation="cudnn", **options)


def rules(function, *avals):
    """Of the forward and of the backward pass."""
    loss = lambda *args: function(*args).astype(jnp.float32).sum()
    with autoshard.assume_cudnn():
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=tuple(range(len(avals)))))(*avals).jaxpr
    return [rule_of(e) for e in jaxpr.eqns if e.primitive.name.startswith("dot_product_attention")]


def test_examples_and_heads_are_parallel():
    forward, backward = rules(attend(is_causal=True), bf(4, 16, 8, 32), bf(4, 16, 8, 32), bf(4, 16, 8, 32))
    assert forward.factors == backward.factors == (Factor(4), Factor(8))
    assert forward.operands[:3] == (ARRAY, ARRAY, ARRAY)
    assert forward.results == (ARRAY, ROWS)
    assert backward.operands[:3] == (ARRAY, ARRAY, ARRAY)
    assert backward.operands[10:] == (ROWS, ARRAY, ARRAY)
    assert backward.results == (ARRAY, ARRAY, ARRAY)
    assert (forward.attention, backward.attention) == (Attention.FORWARD, Attention.BACKWARD)
    assert forward.by_shards and backward.by_shards
    assert forward.flops == 2 * 2 * PAIRS * 32  # queries with keys, weights with values
    assert backward.flops == 5 * 2 * PAIRS * 32


def test_groups_of_query_heads_stay_together():
    forward, backward = rules(attend(is_causal=True), bf(4, 16, 8, 32), bf(4, 16, 2, 32), bf(4, 16, 2, 32))
    assert forward.factors == backward.factors == (Factor(4), Factor(2))
    assert forward.operands[:3] == (ARRAY, ARRAY, ARRAY)
    assert backward.results == (ARRAY, ARRAY, ARRAY)
    assert forward.flops == 2 * 2 * PAIRS * 32  # as many as with heads of their own


@pytest.mark.parametrize(
    ("options", "num_keys", "pairs"),
    [
        ({}, 16, 16 * 16),
        ({}, 24, 16 * 24),
        ({"is_causal": True}, 24, 16 * 17 / 2),  # query n sees keys 0 to n
        ({"is_causal": True}, 8, 8 * 9 / 2 + 8 * 8),
        ({"is_causal": True, "local_window_size": (3, 0)}, 16, 4 * 5 / 2 + 12 * 4),  # itself and three before it
    ],
)
def test_what_a_mask_leaves_is_computed(options, num_keys, pairs):
    forward, _ = rules(attend(**options), bf(4, 16, 8, 32), bf(4, num_keys, 8, 32), bf(4, num_keys, 8, 32))
    assert forward.flops == 4 * 8 * 2 * 2 * pairs * 32


def test_a_bias_of_its_own_is_split_and_one_that_is_shared_is_not():
    own, _ = rules(attend(), *[bf(4, 16, 8, 32)] * 3, bf(4, 8, 16, 16))
    assert own.operands[3] == ((EXAMPLE,), (HEAD,), (), ())
    shared, backward = rules(attend(), *[bf(4, 16, 8, 32)] * 3, bf(1, 8, 16, 16))
    assert shared.operands[3] == ((), (HEAD,), (), ())
    # its gradient is a sum over examples, which the kernel makes by itself
    assert not any(factors for dims in backward.operands for factors in dims)


def test_cudnn_is_assumed_only_inside():
    from jax._src.cudnn import fused_attention_stablehlo as fused_attention

    before = fused_attention.check_cudnn_version, fused_attention.check_compute_capability
    with pytest.raises(ZeroDivisionError), autoshard.assume_cudnn():
        assert fused_attention.check_cudnn_version() >= 90_000
        1 / 0  # noqa: B018
    assert (fused_attention.check_cudnn_version, fused_attention.check_compute_capability) == before

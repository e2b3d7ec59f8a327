"""cuDNN's attention on shards is that of the whole. cuDNN is not on CPUs: there, its kernels are computed as they are
defined, by the primitives that JAX calls them by, on the shards that a plan hands them."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused_attention
from jax.interpreters import mlir

import autoshard
from autoshard.train.config import load_config
from autoshard.train.planning import arguments
from autoshard.train.registry import train_functions

EXAMPLES, POSITIONS, HEADS, HEAD = 4, 16, 8, 8


def reference(query, key, value, bias, is_causal):
    """The result and the logarithm of the sum of exponentials of each row of scores, in float32."""
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    scores = jnp.einsum("bqhe,bkhe->bhqk", query, key) / query.shape[-1] ** 0.5
    if bias.size:
        scores += bias.astype(jnp.float32)
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    rows = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum("bhqk,bkhe->bqhe", jnp.exp(scores - rows[..., None]), value), rows


def forward(query, key, value, bias, *_, mask_type, is_training, **__):
    result, rows = reference(query, key, value, bias, "CAUSAL" in mask_type.name)
    return [result.astype(query.dtype), rows] if is_training else [result.astype(query.dtype)]


def backward(query, key, value, bias, *others, mask_type, variadic_args, **_):
    *_, gradient = others
    attend = lambda *given: reference(*given, "CAUSAL" in mask_type.name)[0]
    gradients = jax.vjp(attend, query, key, value, bias)[1](gradient.astype(jnp.float32))
    return list(gradients if variadic_args[1] else gradients[:3])


@pytest.fixture(autouse=True, scope="module")
def cudnn_on_cpu():
    for primitive, kernel in (
        (fused_attention._dot_product_attention_fwd_p, forward),
        (fused_attention._dot_product_attention_bwd_p, backward),
    ):
        mlir.register_lowering(primitive, mlir.lower_fun(kernel, multiple_results=True), platform="cpu")


def inputs(kv_heads, bias=None):
    random = np.random.default_rng(0)
    drawn = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.bfloat16)
    arrays = [drawn(EXAMPLES, POSITIONS, heads, HEAD) for heads in (HEADS, kv_heads, kv_heads)]
    return [*arrays, *([] if bias is None else [drawn(*bias)])]


def gradients(*args):
    attend = lambda *given: jax.nn.dot_product_attention(*given, is_causal=True, implementation="cudnn")
    loss = lambda *given: (attend(*given).astype(jnp.float32) ** 2).sum()
    return jax.value_and_grad(loss, argnums=tuple(range(len(args))))(*args)


KINDS = {"heads": (HEADS, None), "grouped heads": (2, None), "bias": (HEADS, (EXAMPLES, HEADS, POSITIONS, POSITIONS))}
CASES = [
    pytest.param(*own, seed, id=f"{kind}-{seed}", marks=[] if seed == n else pytest.mark.exhaustive)
    for n, (kind, own) in enumerate(KINDS.items())
    for seed in range(3)
]
"""One plan of each kind in every run."""


@pytest.mark.parametrize(("kv_heads", "bias", "seed"), CASES)
def test_any_plan_computes_the_same(random_plan, seed, kv_heads, bias):
    args = inputs(kv_heads, bias)
    plan = random_plan(gradients, args, {"data": 4, "tensor": 2}, seed)
    with autoshard.assume_cudnn():
        expected = jax.jit(gradients)(*args)
        found = plan.jit(gradients)(*args)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        own, other = np.asarray(own, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(own, other, rtol=2e-2, atol=2e-2 * np.abs(other).max())  # bfloat16


def test_a_plan_splits_examples_and_heads_and_sends_nothing(cluster):
    """Of arguments that are split so: 2 x 4 devices, each with half of the examples and a quarter of the heads."""
    layout = jax.sharding.PartitionSpec("data", None, "tensor")
    args = [jax.ShapeDtypeStruct((4, 2048, heads, 64), jnp.bfloat16) for heads in (8, 4, 4)]
    pins = {str(n): layout for n in range(3)}
    plan = autoshard.plan(gradients, *args, cluster=cluster, mesh={"data": 2, "tensor": 4}, pins=pins)
    assert not plan.warnings
    attention = [c for c in plan.estimate.compute if c.name.startswith("dot_product_attention")]
    pairs = 4 * 8 * 2048 * 2049 / 2
    assert sorted(c.flops for c in attention) == [2 * 2 * pairs * 64 / 8, 5 * 2 * pairs * 64 / 8]
    assert {c.kind for c in plan.estimate.communication} == {"all-reduce"}, "of the loss alone"


@pytest.mark.parametrize("config", ["gpt_tiny", "llama_tiny", "moe_tiny", "vit_tiny"])
def test_models_with_fused_attention_are_the_models(config):
    """The loss of a batch, in bfloat16."""
    path = pathlib.Path(__file__).parents[2] / "configs" / f"{config}.yaml"
    losses = []
    for fused in ("false", "true"):
        overrides = {"dtype": "bfloat16", "num_layers": 1, "fused_attention": fused}
        own = load_config(path, [f"model.overrides.{name}={value}" for name, value in overrides.items()])
        functions = train_functions(own)
        state = functions.init(0)
        batch = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), arguments(own, functions)[1])
        with autoshard.assume_cudnn():
            losses.append(jax.jit(lambda *args, step=functions.step: step(*args)[1]["loss"])(state, batch))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)

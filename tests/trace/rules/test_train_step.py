"""The equations of a transformer's train step are all in the table."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from jax.extend import core

from autoshard.trace.rules import rule_of, signature_of

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 64, 16, 2, 8, 4
TOKENS = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, mask):
        h = linen.LayerNorm()(x)
        h = linen.MultiHeadDotProductAttention(HEADS, dropout_rate=0.1, deterministic=False)(h, h, mask=mask)
        x = x + linen.Dropout(0.1, deterministic=False)(h)
        h = linen.Dense(4 * WIDTH)(linen.RMSNorm()(x))
        return x + linen.Dense(WIDTH)(linen.gelu(h))


class LinenGPT(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        embed = linen.Embed(VOCABULARY, WIDTH)
        x = embed(tokens) + linen.Embed(LENGTH, WIDTH)(jnp.arange(LENGTH))
        mask = linen.make_causal_mask(tokens)
        for _ in range(2):
            x = linen.remat(LinenBlock)()(x, mask)
        return embed.attend(linen.LayerNorm()(x))


class NnxGPT(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, deterministic=True, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens))
        x = x + self.down(nnx.silu(self.up(x)))
        return self.head(x)


def optimizer():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))


def loss_of(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def linen_step():
    model, tx = LinenGPT(), optimizer()

    def init(key):
        params = model.init({"params": key, "dropout": key}, jnp.zeros(TOKENS.shape, jnp.int32))
        return params, tx.init(params)

    def step(state, tokens, key):
        params, opt = state
        loss, grads = jax.value_and_grad(
            lambda p: loss_of(model.apply(p, tokens, rngs={"dropout": jax.random.fold_in(key, 1)}), tokens)
        )(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.make_jaxpr(step)(jax.eval_shape(init, key), TOKENS, key), jax.make_jaxpr(init)(key)


def nnx_step():
    graph, state = nnx.split(nnx.eval_shape(lambda: NnxGPT(nnx.Rngs(0))))
    tx = optimizer()

    def step(state, opt, tokens):
        def loss(params, rest):
            model = nnx.merge(graph, params, rest)
            return loss_of(model(tokens), tokens), nnx.state(model)

        _, params, rest = nnx.split(nnx.merge(graph, state), nnx.Param, ...)
        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params, rest)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, value

    params = nnx.state(nnx.merge(graph, state), nnx.Param)
    return (jax.make_jaxpr(step)(state, jax.eval_shape(tx.init, params), TOKENS),)


def leaf_equations(jaxpr):
    for eqn in jaxpr.eqns:
        called = list(core.jaxprs_in_params(eqn.params))
        calls = [inner for inner in called if len(inner.eqns)]
        if calls and eqn.primitive.name not in ("scatter-add", "scatter", "reduce"):
            for inner in calls:
                yield from leaf_equations(inner)
        elif not called:
            yield eqn
        elif eqn.primitive.name in ("scatter-add", "scatter", "reduce"):
            yield eqn


@pytest.mark.parametrize("make", [linen_step, nnx_step])
def test_all_equations_are_in_the_table(make):
    rules = {}
    for program in make():
        for eqn in leaf_equations(program.jaxpr):
            rules.setdefault(signature_of(eqn), (eqn.primitive.name, rule_of(eqn).origin))
    assert len(rules) > 50
    assert {name for name, origin in rules.values() if origin != "table"} == set()

"""Which losses are known to be plain means over examples: the mean over halves of the batch is then the same loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from autoshard.graph.example_mean import why_no_means
from autoshard.trace.trace import trace

EXAMPLES, DIM, LAYERS = 12, 6, 3
PARAMS = {
    "layers": jax.random.normal(jax.random.key(0), (LAYERS, DIM, DIM)),
    "table": jax.random.normal(jax.random.key(1), (20, DIM)),
}
BATCH = {
    "x": jax.random.normal(jax.random.key(2), (EXAMPLES, DIM)),
    "ids": jax.random.randint(jax.random.key(3), (EXAMPLES, 5), 0, 20),
    "labels": jax.random.randint(jax.random.key(4), (EXAMPLES,), 0, DIM),
}


def layers(p, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])[0]


def unrolled(p, x):
    for w in p["layers"]:
        x = x + jax.checkpoint(lambda h, w: jax.nn.gelu(h @ w))(x, w)
    return x


def picked(p, b):
    """The target's logit by comparing, of bags of embeddings."""
    logits = layers(p, p["table"][b["ids"]].sum(1))
    here = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == b["labels"][:, None]
    return jax.nn.logsumexp(logits, -1) - jnp.where(here, logits, 0.0).sum(-1)


def carried_sum(p, b):
    """A loss that layers add to."""

    def body(carry, w):
        h = jnp.tanh(carry[0] @ w)
        return (h, carry[1] + jnp.square(h).mean()), None

    (_, total), _ = lax.scan(body, (b["x"], jnp.zeros(())), p["layers"])
    return total


def tokens(p, b):
    """Tokens of all examples in one dimension, and back; a last example that is short is none."""
    x = p["table"][b["ids"]] + jnp.arange(5.0)[:, None]
    flat = layers(p, x.reshape(-1, DIM)).reshape(x.shape)
    scores = jnp.einsum("bqd,bkd->bqk", flat, flat)
    causal = jnp.tril(jnp.ones((5, 5), bool))
    return jnp.mean(jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ flat)


MEANS = {
    "layers in a loop": lambda p, b: jnp.mean(layers(p, b["x"]) ** 2),
    "layers": lambda p, b: jnp.mean(jnp.sum(unrolled(p, b["x"]), -1)),
    "cross entropy": lambda p, b: jnp.mean(picked(p, b)),
    "decayed": lambda p, b: jnp.mean(picked(p, b)) * 3.0 + sum(jnp.sum(w**2) for w in jax.tree.leaves(p)),
    "carried": carried_sum,
    "tokens": tokens,
    "taken": lambda p, b: -jnp.mean(jnp.take_along_axis(layers(p, b["x"]), b["labels"][:, None], -1)),
    "some entries of each": lambda p, b: jnp.mean(layers(p, b["x"])[:, jnp.array([0, 0, 5])]),
    "all but the first entry": lambda p, b: jnp.mean(layers(p, b["x"]).at[:, 0].set(0.0)),
    "another entry of each": lambda p, b: jnp.mean(
        jax.vmap(lambda h, k: h.at[k].set(0.0))(layers(p, b["x"]), b["labels"])
    ),
    "optax": lambda p, b: optax.softmax_cross_entropy_with_integer_labels(layers(p, b["x"]), b["labels"]).mean(),
    "of nothing": lambda p, b: jnp.sum(p["table"] ** 2),
}
OTHERS = {
    "masked": lambda p, b: jnp.sum(picked(p, b) * (b["labels"] > 2)) / jnp.sum(b["labels"] > 2),
    "batch norm": lambda p, b: jnp.mean(jnp.tanh(b["x"] / jnp.std(b["x"] @ p["layers"][0], 0))),
    "root": lambda p, b: jnp.sqrt(jnp.mean(b["x"] @ p["layers"][0]) ** 2 + 1),
    "contrastive": lambda p, b: jnp.mean(jax.nn.logsumexp(layers(p, b["x"]) @ b["x"].T, -1)),
    "the worst": lambda p, b: jnp.max(picked(p, b)),
    "numbered": lambda p, b: jnp.mean(picked(p, b) * jnp.arange(EXAMPLES)[: b["x"].shape[0]]),
    "product of means": lambda p, b: jnp.mean(b["x"]) * jnp.mean(layers(p, b["x"])),
    "of the first": lambda p, b: jnp.mean(layers(p, b["x"])[:2]),
    "some by number": lambda p, b: jnp.mean(layers(p, b["x"])[jnp.array([0, 0, 5])]),
    "all but the first": lambda p, b: jnp.mean(layers(p, b["x"]).at[0].set(0.0)),
    "sorted": lambda p, b: jnp.mean(jnp.sort(b["x"], 0) * layers(p, b["x"])),
    "running": lambda p, b: jnp.mean(jnp.tanh(jnp.cumsum(b["x"] @ p["layers"][0], 0))),
    "branched": lambda p, b: lax.cond(jnp.sum(b["x"]) > 0, jnp.mean, lambda x: 2 * jnp.mean(x), layers(p, b["x"])),
    "branched constant": lambda p, b: lax.cond(jnp.sum(b["x"]) > 0, lambda: 1.0, lambda: 2.0) * jnp.mean(b["x"]),
    "counted": lambda p, b: lax.while_loop(lambda n: n < b["labels"][0], lambda n: n + 1, 0) * jnp.sum(p["table"]),
    "while": lambda p, b: lax.while_loop(lambda x: jnp.mean(x**2) > 1.0, lambda x: 0.5 * x, b["x"]).mean(),
}


def verdict(loss, params=PARAMS, batch=BATCH):
    graph = trace(loss, (params, batch)).graph
    (why,) = why_no_means(graph, {a.value for a in graph.arguments if a.position == 1}, EXAMPLES)
    return why


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_known_and_is_the_mean_over_halves(name):
    assert verdict(MEANS[name]) is None
    halves = [jax.tree.map(lambda x, k=k: x[k : k + EXAMPLES // 2], BATCH) for k in (0, EXAMPLES // 2)]
    gradient = jax.jit(jax.grad(MEANS[name]))
    whole, parts = gradient(PARAMS, BATCH), [gradient(PARAMS, half) for half in halves]
    jax.tree.map(lambda w, a, b: np.testing.assert_allclose(w, (a + b) / 2, rtol=1e-4, atol=1e-5), whole, *parts)


@pytest.mark.parametrize("name", OTHERS)
def test_what_mixes_examples_is_no_mean(name):
    assert "test_example_mean.py" in verdict(OTHERS[name])


def test_the_line_that_mixes_is_told():
    assert verdict(OTHERS["masked"]).startswith("div at ")
    assert verdict(lambda p, b: layers(p, b["x"])[0, 0]) is not None

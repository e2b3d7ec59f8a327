"""Which steps stay the same in micro-batches: what is known of one is compared with the step run in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import autoshard
from autoshard.plans.mean_loss import why_no_mean_of

EXAMPLES, DIM, CLASSES = 16, 4, 5
PARAMS = {
    "kernel": jax.random.normal(jax.random.key(0), (DIM, DIM)),
    "head": jax.random.normal(jax.random.key(1), (DIM, CLASSES)),
    "margin": jnp.float32(0.3),
}
BATCH = {
    "x": jax.random.normal(jax.random.key(2), (EXAMPLES, DIM)),
    "label": jax.random.randint(jax.random.key(3), (EXAMPLES,), 0, CLASSES),
}


def hidden(p, b):
    return jnp.tanh(b["x"] @ p["kernel"])


def losses(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(hidden(p, b) @ p["head"], b["label"])


def count(b):
    return b["x"].shape[0]


def decay(p):
    return sum(jnp.sum(w**2) for w in jax.tree.leaves(p))


def with_rule(backward):
    """The identity, with a rule of its own for gradients."""
    own = jax.custom_vjp(lambda x: x)
    own.defvjp(lambda x: (x, None), lambda _, gradient: (backward(gradient),))
    return own


def looped(p, b, each):
    """A sum over layers in a loop, beside a mean over what the last makes."""
    x, sums = lax.scan(lambda x, _: (jnp.tanh(x @ p["kernel"]), each(x)), b["x"], None, length=3)
    return jnp.mean(x**2) + jnp.sum(sums)


def tangents(inner, p):
    return jax.jvp(jax.grad(inner), (p["kernel"],), (jnp.ones((DIM, DIM)),))[1].sum()


def penalty(p, b, critic):
    return jnp.mean(jnp.sum(jax.grad(critic)(b["x"]) ** 2, -1))


MEANS = {
    "sum over their number": lambda p, b: losses(p, b).sum() / count(b),
    "decayed": lambda p, b: losses(p, b).mean() + 0.01 * decay(p),
    "sum, and decay as often": lambda p, b: (losses(p, b).sum() + count(b) * decay(p)) / count(b),
    "shares squared": lambda p, b: count(b) * jnp.sum((hidden(p, b) / count(b)) ** 2),
    "counted by ones": lambda p, b: losses(p, b).sum() / jnp.ones_like(losses(p, b)).sum(),
    "moments": lambda p, b: jnp.sum((hidden(p, b).T @ hidden(p, b) / count(b)) * p["kernel"]),
    "looped": lambda p, b: looped(p, b, lambda x: jnp.sum(x**2) / count(b)),
    "variance of each": lambda p, b: jnp.mean(jnp.var(hidden(p, b), -1, ddof=1)),
    "product with a Hessian": lambda p, b: tangents(lambda w: jnp.mean(jnp.tanh(b["x"] @ w) ** 2), p),
    "penalty of each": lambda p, b: penalty(p, b, lambda x: jnp.sum(jnp.tanh(x @ p["kernel"]))),
    "penalty made of each": lambda p, b: penalty(p, b, lambda x: count(b) * jnp.mean(jnp.tanh(x @ p["kernel"]))),
    "reversed gradient": lambda p, b: jnp.mean(with_rule(lambda g: -0.3 * g)(hidden(p, b)) ** 2),
    "a metric": lambda p, b: (losses(p, b).mean(), {"accuracy": jnp.mean(losses(p, b) < 1.0), "decay": decay(p)}),
    "short floats": lambda p, b: jnp.mean((b["x"].astype(jnp.bfloat16) @ p["kernel"].astype(jnp.bfloat16))[:, :1]),
}
OTHERS = {
    "sum": lambda p, b: losses(p, b).sum(),
    "sum and mean": lambda p, b: losses(p, b).sum() + jnp.mean(hidden(p, b) ** 2),
    "mean and a share of decay": lambda p, b: losses(p, b).mean() + decay(p) / count(b),
    "share of both": lambda p, b: (losses(p, b).sum() + decay(p)) / count(b),
    "mean and decay as often": lambda p, b: losses(p, b).mean() + count(b) * decay(p),
    "looped sum": lambda p, b: looped(p, b, lambda x: jnp.sum(x**2)),
    "scaled layers": lambda p, b: jnp.mean(jnp.tanh(b["x"] @ p["kernel"] / count(b))),
    "temperature": lambda p, b: jnp.mean(jax.nn.logsumexp(hidden(p, b) / np.sqrt(count(b)), -1)),
    "power": lambda p, b: losses(p, b).mean() + p["margin"] ** count(b),
    "largest few": lambda p, b: lax.top_k(hidden(p, b), count(b) // 8)[0].mean(),
    "as many layers": lambda p, b: lax.fori_loop(0, count(b), lambda _, x: jnp.tanh(x @ p["kernel"]), b["x"]).mean(),
    "one less": lambda p, b: losses(p, b).sum() / (count(b) - 1),
    "no less than": lambda p, b: losses(p, b).sum() / max(count(b), 8),
    "by size": lambda p, b: losses(p, b).mean() * (2.0 if count(b) > 8 else 1.0),
    "rewritten by size": lambda p, b: losses(p, b).mean() if count(b) > 8 else jnp.exp(losses(p, b)).mean(),
    "numbers of its own": lambda p, b: (losses(p, b) * np.linspace(0.0, 1.0, count(b), dtype=np.float32)).mean(),
    "sum's product with a Hessian": lambda p, b: tangents(lambda w: jnp.sum(jnp.tanh(b["x"] @ w) ** 2), p),
    "penalty of a mean": lambda p, b: penalty(p, b, lambda x: jnp.mean(jnp.tanh(x @ p["kernel"]))),
    "gradient scaled": lambda p, b: jnp.mean(with_rule(lambda g: g * count(b))(hidden(p, b)) ** 2),
    "gradient normalised": lambda p, b: jnp.mean(with_rule(lambda g: g / jnp.linalg.norm(g))(hidden(p, b)) ** 2),
    "weight's gradient clipped": lambda p, b: jnp.mean(
        (b["x"] @ with_rule(lambda g: jnp.clip(g, -0.01, 0.01))(p["kernel"])) ** 2
    ),
    "a sum as a metric": lambda p, b: (losses(p, b).mean(), {"right": jnp.sum(losses(p, b) < 1.0)}),
    "a count as a metric": lambda p, b: (losses(p, b).mean(), {"examples": jnp.float32(count(b))}),
    "perplexity": lambda p, b: (losses(p, b).mean(), {"perplexity": jnp.exp(losses(p, b).mean())}),
    "whole share": lambda p, b: (losses(p, b).mean(), {"share": lax.div(jnp.sum(b["label"]), 3)}),
}


def step_of(loss):
    return autoshard.TrainStep(lambda params, batch: loss(params, batch), optax.sgd(1.0))


def in_parts(loss, num_parts):
    """The largest difference of parameters and metrics after a step in equal parts from those after a whole one."""
    step = step_of(loss)
    results = [
        jax.jit(s)(step.init(PARAMS), BATCH) for s in (step, step.in_parts((EXAMPLES // num_parts,) * num_parts))
    ]
    (whole, told), (cut, told_of_parts) = [(state.params, metrics) for state, metrics in results]
    differences = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), (whole, told), (cut, told_of_parts))
    return max(map(float, jax.tree.leaves(differences)))


@pytest.mark.parametrize("name", MEANS)
def test_what_is_known_as_a_mean_is_the_same_in_parts(name):
    step = step_of(MEANS[name])
    assert why_no_mean_of(step, step.init(PARAMS), BATCH) is None
    assert in_parts(MEANS[name], 4) < (1e-2 if name == "short floats" else 1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_another_step_in_parts_is_not_taken_for_a_mean(name):
    step = step_of(OTHERS[name])
    assert why_no_mean_of(step, step.init(PARAMS), BATCH) is not None
    assert in_parts(OTHERS[name], 4) > 1e-3


def test_the_line_and_the_result_are_told():
    def why(loss):
        step = step_of(loss)
        return why_no_mean_of(step, step.init(PARAMS), BATCH)

    assert why(OTHERS["sum and mean"]).startswith("add at plans/test_mean_loss.py:")
    assert "meets what changes otherwise" in why(OTHERS["sum and mean"])
    assert "tanh at plans/test_mean_loss.py" in why(OTHERS["scaled layers"])
    assert why(OTHERS["perplexity"]).endswith("in the metric `perplexity`")
    assert why(OTHERS["gradient scaled"]).endswith("in the gradient of `kernel`")
    assert "is another one" in why(OTHERS["rewritten by size"])


@pytest.mark.parametrize("num_examples", [2, 3, 9, 10])
def test_any_number_of_examples_is_compared_with_fewer(num_examples):
    few = jax.tree.map(lambda x: x[:num_examples], BATCH)
    for loss, is_mean in [(MEANS["decayed"], True), (OTHERS["sum and mean"], False)]:
        step = step_of(loss)
        assert (why_no_mean_of(step, step.init(PARAMS), few) is None) == is_mean

"""What scans stack is stored as it is written, with the same results."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import autoshard
from autoshard.graph.equation_plan import EquationPlan


def loss(weights, x):
    """Scanned layers of products over examples, whose results are stacked with their rows and columns exchanged."""

    def layer(x, w):
        scores = jnp.tanh(jnp.einsum("bqd,bkd->bkq", x @ w, x)) / 16
        return x + jnp.einsum("bkq,bkd->bqd", scores, x), None

    return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


def step(weights, x):
    return weights - 0.1 * jax.grad(loss)(weights, x)


def test_a_plan_that_keeps_stacks_row_by_row_computes_the_same():
    first, second = jax.random.split(jax.random.key(0))
    args = jax.random.normal(first, (3, 16, 16)) / 4, jax.random.normal(second, (16, 8, 16))
    plan = autoshard.plan(step, *args, mesh={"data": 4, "tensor": 2})
    stacking = {n: p for n, p in plan.shardings if p.results and p.body}
    assert stacking

    def kept(p: EquationPlan) -> EquationPlan:
        return dataclasses.replace(p, row_major_stacks=tuple(slot for slot, _ in p.results))

    shardings = tuple((n, kept(p) if n in stacking else p) for n, p in plan.shardings)
    found = dataclasses.replace(plan, shardings=shardings).jit(step)(*args)
    np.testing.assert_allclose(found, jax.jit(step)(*args), rtol=1e-4, atol=1e-5)

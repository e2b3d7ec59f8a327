"""Products that a loop adds up: one product of stacks, behind the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lstm_layer import lstm

from autoshard.trace.trace import trace


def rnn(x, first, w, u):
    """The inputs' weights are read in the loop, too: nothing stacks the gradient of what the products add up to."""

    def cell(h, row):
        h = jnp.tanh(row @ u + h @ w)
        return h, h

    return jax.lax.scan(cell, first, x, reverse=True)[1]


def side_by_side(x, first, w, u):
    """As Flax's `OptimizedLSTMCell`, which puts the weights of all gates side by side in each step."""

    def cell(h, row):
        gate, value = jnp.split(row + h @ jnp.concatenate([w, u], axis=1), 2, axis=-1)
        h = jax.nn.sigmoid(gate) * jnp.tanh(value)
        return h, h

    return jax.lax.scan(cell, first, x)[1]


def gradients(layer):
    names = tuple(range(layer.__code__.co_argcount))
    return jax.grad(lambda *args: jnp.sum(jnp.square(layer(*args)).astype(jnp.float32)), names)


def products(traced):
    """Those inside of loops and those outside."""
    operations = [o for o in traced.graph.operations if o.name == "dot_general"]
    return sum(o.trips > 1 for o in operations), sum(o.trips == 1 for o in operations)


@pytest.mark.parametrize(
    ("layer", "shapes", "inside", "outside"),
    [
        pytest.param(lstm, [(7, 3, 32), (3, 8), (8, 32)], 2, 1, id="lstm"),
        pytest.param(rnn, [(7, 3, 8), (3, 8), (8, 8), (8, 8)], 4, 2, id="rnn"),
        pytest.param(side_by_side, [(7, 3, 16), (3, 8), (8, 8), (8, 8)], 2, 1, id="side by side"),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_of_recurrent_weights_is_one_product(layer, shapes, inside, outside, dtype):
    """In the loops stay the products of forward, and backward those by the weights. It is no less exact than before."""
    arrays = [jax.random.normal(jax.random.key(n), shape).astype(dtype) for n, shape in enumerate(shapes)]
    traced = trace(gradients(layer), arrays)
    assert products(traced) == (inside, outside)
    made = jax.core.eval_jaxpr(traced.jaxpr.jaxpr, traced.jaxpr.consts, *arrays)
    exact = gradients(layer)(*[a.astype(jnp.float32) for a in arrays])
    for own, plain, wanted in zip(made, gradients(layer)(*arrays), exact, strict=True):
        assert own.dtype == plain.dtype == dtype
        error, was = (np.abs(np.asarray(g, np.float32) - wanted).max() / np.abs(wanted).max() for g in (own, plain))
        assert error <= max(1e-5, 1.1 * was)


def test_nothing_is_stacked_twice():
    """The gates' gradient is stacked once, for the inputs and for the weights, and no other stack is added."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(7, 3, 32), (3, 8), (8, 32)]]
    stacks = [o for o in trace(gradients(lstm), shapes).graph.operations if o.name == "scan_stack"]
    plain = jax.make_jaxpr(gradients(lstm))(*shapes)
    loops = [e for e in plain.jaxpr.eqns if e.primitive.name == "scan"]
    stacked = sum(
        len(v.aval.shape) != len(i.aval.shape) for e in loops for v, i in zip(e.outvars, inner(e), strict=True)
    )
    assert len(stacks) == stacked


def inner(equation):
    return equation.params["jaxpr"].jaxpr.outvars


def test_what_micro_batches_make_is_not_stacked():
    """Hidden rows of a micro-batch are wider than its examples: stacked, they would need what the loop frees."""

    def loss(ws, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ ws[0]) @ ws[1]))

    def step(ws, parts):
        body = lambda sums, part: (jax.tree.map(jnp.add, sums, jax.grad(loss)(ws, part)), None)
        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, ws), parts)[0]

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    traced = trace(step, [[f32(16, 64), f32(64, 16)], f32(5, 8, 16)])
    assert products(traced) == (5, 0)


def test_sums_that_the_loop_reads_stay():
    """The state of linear attention is read by each step."""

    def attend(q, k, v):
        def step(state, at):
            state = state + at[1].T @ at[2]
            return state, at[0] @ state

        return jax.lax.scan(step, jnp.zeros((q.shape[-1], v.shape[-1])), (q, k, v))[1]

    traced = trace(attend, [jax.ShapeDtypeStruct((5, 4, 8), jnp.float32)] * 3)
    assert products(traced) == (2, 0)


def test_products_that_others_read_stay():
    """Here the loop also stacks the sum of each product."""

    def f(first, x, y):
        def step(total, at):
            made = at[0].T @ at[1]
            return total + made, jnp.sum(made)

        return jax.lax.scan(step, first, (x, y))

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    assert products(trace(f, [f32(8, 16), f32(5, 4, 8), f32(5, 4, 16)])) == (1, 0)

"""When an update waits for a scalar that is made of all gradients."""

import jax
import jax.numpy as jnp
import optax
import pytest

from autoshard.compiler.analysis import analyse
from autoshard.graph.graph import OperationKind
from autoshard.trace.flatten import TraceOptions
from autoshard.trace.trace import trace

PARAMS = {name: jax.ShapeDtypeStruct((16, 16), jnp.float32) for name in ("one", "two", "last")}
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def analysed(optimizer: optax.GradientTransformation):
    """The analysis of a step with an optimizer."""

    def step(state, x):
        params, opt_state = state
        loss = lambda p: jnp.sum(jnp.tanh(jnp.tanh(x @ p["one"]) @ p["two"]) @ p["last"])
        updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = PARAMS, jax.eval_shape(optimizer.init, PARAMS)
    return analyse(trace(step, (state, X), (0,), TraceOptions()).graph)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_without_clipping_nothing_waits_for_all_gradients(name):
    found = analysed(getattr(optax, name)(0.1))
    assert found.gradients and found.gradients_until == len(found.graph.operations)


def test_clipping_by_the_global_norm_waits_for_all_gradients():
    """All products come before; what waits first is made of the norm's square root, behind all three sums."""
    found = analysed(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)))
    operations, until = found.graph.operations, found.gradients_until
    assert until < len(operations)
    before, after = operations[:until], operations[until:]
    assert not any(o.name == "dot_general" for o in after)
    assert sum(o.name == "reduce_sum" and len(o.rule.factors) == 2 for o in before) >= 3
    assert any(o.name == "sqrt" and not found.graph.values[o.results[0]].shape for o in before)


def test_a_scalar_of_one_gradient_holds_up_that_one_alone():
    """Adafactor divides each gradient's update by a mean square of its own."""
    found = analysed(optax.adafactor(0.1, min_dim_size_to_factor=8))
    assert found.gradients_until == len(found.graph.operations)


def loop_carries(step, *args):
    """By shape: whether what a loop carries is found to be a sum of gradients."""
    found = analyse(trace(step, args, (0,), TraceOptions()).graph)
    carries = [o for o in found.graph.operations if o.kind is OperationKind.LOOP_CARRY]
    shape = lambda o: found.graph.values[o.operands[1]].shape
    return {shape(o): all(r in found.accumulated for r in o.results) for o in carries if shape(o)}


def test_gradients_that_a_loop_adds_up_are_waited_for_by_nobody():
    """Each micro-batch adds its own to the sum, which only the update reads; the running mean is read by a product."""

    def step(state, xs):
        def body(carry, x):
            total, mean = carry
            loss = lambda w: jnp.sum(jnp.tanh((x - mean) @ w) ** 2)
            return (total + jax.grad(loss)(state), 0.9 * mean + 0.1 * jnp.mean(x, 0)), None

        (total, mean), _ = jax.lax.scan(body, (jnp.zeros_like(state), jnp.zeros(16)), xs)
        return state - 0.1 * total, mean

    w, xs = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)
    assert loop_carries(step, w, xs) == {(16, 32): True, (16,): False}


def test_what_each_iteration_multiplies_with_is_no_sum_of_gradients():
    """Of a recurrence, backwards: the hidden state's gradient goes into products, the weights' is only added up.

    Rows of an iteration are larger than the weights, so that their products stay in the loop.
    """

    def step(w, xs):
        def loss(w):
            h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros((24, 16)), xs)
            return jnp.sum(h)

        return w - 0.1 * jax.grad(loss)(w)

    w, xs = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((4, 24, 16), jnp.float32)
    assert loop_carries(step, w, xs) == {(24, 16): False, (16, 16): True}

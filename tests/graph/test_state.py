"""When an update waits for a scalar that is made of all gradients."""

import jax
import jax.numpy as jnp
import optax
import pytest

from autoshard.compiler.analysis import analyse
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

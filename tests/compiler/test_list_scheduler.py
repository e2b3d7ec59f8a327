"""Products that XLA makes before the one in front of them, since an activation ends with them."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.analysis import analyse
from autoshard.trace.trace import trace


@pytest.mark.parametrize(("width", "is_freed"), [(64, True), (256, False)])
def test_activations_of_experts_end_before_their_gradients_are_made(width, is_freed):
    """Of 4 experts, 128 rows of 64 elements in 2 groups: 262 kB end with the gradient of a weight of 65 kB, while the
    gradient of these rows takes 262 kB. With 256 columns the weight takes 262 kB as well, and nothing is gained."""

    def step(weights, x):
        def loss(weights):
            h = jnp.square(jnp.einsum("gecd,edf->gecf", x, weights[0]))
            return jnp.sum(jnp.square(jnp.einsum("gecf,efd->gecd", h, weights[1])))

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    graph = trace(step, ((f32(4, 32, 64), f32(4, 64, width)), f32(2, 4, 128, 32)), donate_argnums=(0,)).graph
    made = next(o.results[0] for o in graph.operations if o.name == "square")
    weight = graph.arguments[1].value
    gradient = [o for o in graph.operations if o.name == "dot_general" and weight in o.operands][-1]
    stop = next(life.stop for life in analyse(graph).live.ranges if life.value == made)
    assert (stop <= gradient.index) == is_freed

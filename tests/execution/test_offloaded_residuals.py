"""Policies of `jax.checkpoint` that offload what they keep: told of, and run with equal results on the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import autoshard

WIDTH, LAYERS = 64, 3


def _offloading(names):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst="pinned_host",
    )


def _layer(x, w):
    x = checkpoint_name(x, "residual")
    return x + jnp.tanh(x @ w[0]) @ w[1]


def _gradients(weights, x):
    layer = jax.checkpoint(_layer, policy=_offloading(["residual"]))

    def loss(weights):
        y = x
        for w in weights:
            y = layer(y, w)
        return jnp.mean(jnp.square(y))

    return jax.value_and_grad(loss)(weights)


@pytest.fixture(scope="module")
def arguments():
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS + 1)
    shapes = ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
    draw = lambda n, shape: 0.1 * jax.random.normal(keys[n], shape)
    weights = [tuple(draw(2 * n + k, shape) for k, shape in enumerate(shapes)) for n in range(LAYERS)]
    return weights, draw(-1, (32, WIDTH))


def test_copies_to_the_host_are_told_of_with_their_line_and_not_made(arguments):
    jaxpr = jax.make_jaxpr(_gradients)(*arguments)
    assert "<host>" in str(jaxpr), "JAX no longer offloads under this policy, and the test tests nothing"
    plan = autoshard.plan(_gradients, *arguments, mesh={"data": 2, "tensor": 4})
    told = [w for w in plan.warnings if "memory of the host" in w]
    assert told and all("test_offloaded_residuals.py" in w for w in told)
    run = plan.jit(_gradients)
    loss, gradients = run(*arguments)
    expected_loss, expected = jax.jit(_gradients)(*arguments)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), gradients, expected)
    assert "pinned_host" not in jax.jit(run).lower(*arguments).as_text()


def test_other_transfers_are_not_told_of(arguments):
    plan = autoshard.plan(lambda x: jax.device_put(x) * 2, arguments[1], mesh={"data": 2, "tensor": 4})
    assert not any("memory of the host" in w for w in plan.warnings)

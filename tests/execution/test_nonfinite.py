"""Finding the first value that is not finite: the operation, the user's line, the path of an argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard.execution.nonfinite import find_nonfinite


def sheltered(w, x):
    """Infinities that do no harm, in a mask, before a logarithm that may do some."""
    scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), x @ w, -jnp.inf)
    return jnp.log(jax.nn.softmax(scores) + 1 - 2 * w[0, 0])


def test_harmless_infinities_are_passed_by():
    assert find_nonfinite(sheltered, (jnp.zeros((4, 4)), jnp.eye(4))) is None
    found = find_nonfinite(sheltered, (jnp.eye(4), jnp.eye(4)))
    assert found.operation == "log(f32[4,4]) -> f32[4,4]" and "test_nonfinite.py" in found.line
    assert "(sheltered)" in found.line and found.kind == "NaN" and found.outputs == ("",)
    assert found.operands[0].least < 0


def looped(parameters, x):
    def body(carry, layer):
        carry = jax.lax.cond(carry.sum() > 0, lambda c: jnp.sqrt(c @ layer), lambda c: c, carry)
        return carry, carry

    return {"last": jax.lax.scan(jax.checkpoint(body), x, parameters["layers"])[0], "count": jnp.int32(0)}


def test_loops_conditionals_and_calls_are_searched():
    layers = jnp.stack([jnp.eye(3), jnp.eye(3), -jnp.eye(3), jnp.eye(3)])
    found = find_nonfinite(looped, ({"layers": layers}, jnp.ones((2, 3))))
    assert found.operation.startswith("sqrt(") and found.iterations == (2,) and found.outputs == ("last",)
    assert (found.operands[0].least, found.operands[0].greatest) == (-1.0, -1.0)


def test_a_while_loop_is_searched_to_the_iteration():
    doubled = lambda x: jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * c[1]), (0, x))[1]
    found = find_nonfinite(doubled, (jnp.float32(1e10),))
    assert (found.kind, found.iterations) == ("infinity", (1,)) and found.operation.startswith("mul(")


def test_operands_and_bad_arguments_are_named_by_their_paths():
    args = ({"w": jnp.full((4, 4), 3e38)}, {"x": jnp.ones((2, 4))})
    product = lambda state, batch: (batch["x"] @ state["w"].T) * 0.5
    found = find_nonfinite(product, args)
    assert [operand.came_from for operand in found.operands] == ["batch.x", "state.w"]
    assert found.operands[1].greatest == pytest.approx(3e38, rel=1e-6)
    bad = {"x": jnp.ones((2, 4)).at[1, 2].set(jnp.nan)}
    assert find_nonfinite(product, ({"w": jnp.ones((4, 4))}, bad)).argument == "batch.x"


def test_sharded_arguments_give_the_same_answer():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    place = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    x = np.ones((8, 8), np.float32)
    x[3] = -1
    root = lambda w, x: jax.grad(lambda w: jnp.sqrt(jnp.sum(x @ w, axis=1)).sum())(w)
    here, there = find_nonfinite(root, (x, x)), find_nonfinite(root, (place(x), place(x)))
    assert here == there and here is not None

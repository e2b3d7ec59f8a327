"""What XLA's combiner makes of sums that are waited for, by XLA:CPU's compiler."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, EXAMPLES = 3, 16, 64


def square(y, mean):
    return y * y


def deviation(y, mean):
    return jnp.square(y - mean)


@pytest.mark.parametrize(("second", "is_joined"), [(square, True), (deviation, False)])
def test_two_means_over_examples_are_one_collective_unless_the_one_is_made_of_the_other(
    formulated, mesh_of, second, is_joined
):
    def layers(params, x):
        for w in params:
            y = x @ w
            mean = jnp.mean(y, 0)
            x = (y - mean) * jax.lax.rsqrt(jnp.mean(second(y, mean), 0) + 1.0)
        return x @ params[0]  # which waits for all of them

    shapes = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS, jax.ShapeDtypeStruct((EXAMPLES, WIDTH), "f4")
    mesh = Mesh(np.array(jax.devices()), ("a",))
    split, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
    compiled = jax.jit(layers, in_shardings=(whole, split), out_shardings=split).lower(*shapes).compile()
    joined = len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text() or ""))
    f = formulated(layers, shapes, mesh_of(8))
    shares = f.program.analysis.combined.awaited_shares
    assert joined == (LAYERS if is_joined else 2 * LAYERS)
    assert list(shares.values()) == ([1 / 2] * 2 * LAYERS if is_joined else [])

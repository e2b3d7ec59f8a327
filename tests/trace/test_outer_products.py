"""Products that sum nothing: multiplications, which whoever reads them computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.trace.trace import trace


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("btd,dn->btdn", [(3, 4, 5), (5, 6)]),
        ("i,j->ij", [(3,), (4,)]),
        ("abc,cb->bca", [(2, 3, 4), (4, 3)]),
        ("bik,bkj->jbi", [(2, 3, 1), (2, 1, 4)]),
        ("btd,btn,btd->btdn", [(2, 3, 4), (2, 3, 5), (2, 3, 4)]),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_that_sum_nothing_are_multiplications(subscripts, shapes, dtype):
    def product(*arrays):
        return jnp.einsum(subscripts, *arrays, preferred_element_type=jnp.float32)

    arrays = [jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes)]
    traced = trace(product, arrays)
    assert not any(o.rule.is_heavy for o in traced.graph.operations)
    (made,) = jax.core.eval_jaxpr(traced.jaxpr.jaxpr, traced.jaxpr.consts, *arrays)
    np.testing.assert_array_equal(made, jax.jit(product)(*arrays))


def test_they_have_the_line_and_the_block_of_the_product():
    @autoshard.split(2, dims={"rows": 8})
    def product(x, y):
        return jax.lax.dot_general(x, y, (((), ()), ((), ())))

    operations = trace(product, [jax.ShapeDtypeStruct((8,), jnp.float32)] * 2).graph.operations
    assert [o.name for o in operations] == ["broadcast_in_dim", "broadcast_in_dim", "mul"]
    assert all(o.source.startswith("trace/test_outer_products.py:") for o in operations)
    assert all([str(b) for b in o.blocks] == ["split(2, rows=8)"] for o in operations)


def test_products_that_sum_stay_products_wherever_they_are():
    def program(x, w):
        def body(carry, row):
            return carry @ w + row[:, None] @ row[None, :], None

        return jax.lax.scan(jax.checkpoint(body), w, x)[0]

    shapes = jax.ShapeDtypeStruct((5, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    products = [o for o in trace(program, shapes).graph.operations if o.name == "dot_general"]
    assert [(o.trips, o.rule.flops) for o in products] == [(5.0, 2.0 * 8**3)]


def test_they_are_not_stored():
    """The states of a state-space layer are one value in memory, not also what they decay by and what is added."""

    def step(decay, x, gates):
        outer = jnp.einsum("td,dn->tdn", x, decay)
        return jnp.einsum("tdn->td", jnp.exp(outer) * jnp.einsum("td,tn->tdn", x, gates))

    t, d, n = 4096, 512, 16
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((d, n), (t, d), (t, n))]
    plan = autoshard.plan(step, *shapes, mesh={"data": 1}, cluster="configs/clusters/h100x1.yaml")
    assert plan.estimate.peak_bytes < 4 * (2 * t * d + d * n + t * n) * 1.01

"""Products of small matrices with a vector each: multiplications and sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.trace.trace import trace


def _traced(subscripts, shapes, dtype=jnp.float32, **options):
    product = lambda *arrays: jnp.einsum(subscripts, *arrays, **options)
    return product, trace(product, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes])


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("btdn,btn->btd", [(2, 3, 4, 5), (2, 3, 5)]),
        ("bn,bkn->bk", [(2, 5), (2, 4, 5)]),
        ("nbk,bn->bk", [(5, 2, 4), (2, 5)]),
        ("abij,bai->abj", [(2, 3, 4, 5), (3, 2, 4)]),
        ("bd,bd->b", [(3, 4), (3, 4)]),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_a_batch_of_products_with_vectors_is_multiplied_and_summed(subscripts, shapes, dtype):
    product, traced = _traced(subscripts, shapes, dtype)
    assert not any(o.rule.is_heavy for o in traced.graph.operations)
    arrays = [10 * jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes)]
    arrays = [array.astype(dtype) for array in arrays]
    (made,) = jax.core.eval_jaxpr(traced.jaxpr.jaxpr, traced.jaxpr.consts, *arrays)
    wanted = jax.jit(product)(*arrays)
    assert made.dtype == wanted.dtype
    np.testing.assert_allclose(np.asarray(made, np.float64), np.asarray(wanted, np.float64), rtol=1e-5, atol=1e-4)


def test_they_are_summed_in_single_precision():
    """In half precision, 256 and one are 256."""
    product, traced = _traced("bkn,bn->bk", [(1, 1, 65), (1, 65)], jnp.bfloat16)
    ones, row = jnp.ones((1, 65), jnp.bfloat16), jnp.ones((1, 1, 65), jnp.bfloat16).at[0, 0, 0].set(256)
    (made,) = jax.core.eval_jaxpr(traced.jaxpr.jaxpr, traced.jaxpr.consts, row, ones)
    assert float(made[0, 0]) == 320 == float(product(row, ones)[0, 0])


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("kn,n->k", [(4, 5), (5,)]),
        ("bkn,bn->bk", [(2, 4096, 4096), (2, 4096)]),
        ("bkn,bmn->bkm", [(2, 4, 5), (2, 3, 5)]),
    ],
    ids=["no batch", "a large matrix", "matrices"],
)
def test_others_stay_products(subscripts, shapes):
    _, traced = _traced(subscripts, shapes)
    assert [o.name for o in traced.graph.operations if o.rule.is_heavy] == ["dot_general"]

"""Rules derived by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from autoshard.graph.graph import Factor
from autoshard.trace.rules import rule_of
from autoshard.trace.rules.elementwise import ARITHMETIC
from autoshard.trace.rules.table import TABLE


def f(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def last_rule(function, *avals):
    return rule_of(jax.make_jaxpr(function)(*avals).jaxpr.eqns[-1])


def test_matrix_product():
    rule = last_rule(lambda x, y: jnp.einsum("bik,bkj->bij", x, y), f(2, 3, 5), f(2, 5, 7))
    batch, contracted, row, column = range(4)
    assert rule.factors == (Factor(2), Factor(5, "add"), Factor(3), Factor(7))
    assert rule.operands == (((batch,), (row,), (contracted,)), ((batch,), (contracted,), (column,)))
    assert rule.results == (((batch,), (row,), (column,)),)
    assert rule.flops == 2 * 2 * 3 * 5 * 7
    assert rule.is_heavy


def test_complex_matrix_product_counts_eight():
    aval = jax.ShapeDtypeStruct((4, 4), jnp.complex64)
    assert last_rule(lambda x, y: x @ y, aval, aval).flops == 8 * 4**3


def test_convolution_flops():
    """Each of 2*6*8*8 outputs multiplies and adds 3*5*5 pairs; with 3 groups, a third of the features."""
    x, k = f(2, 3, 8, 8), f(6, 3, 5, 5)
    assert last_rule(lambda x, k: lax.conv(x, k, (1, 1), "SAME"), x, k).flops == 2 * (2 * 6 * 8 * 8) * (3 * 5 * 5)
    grouped = last_rule(
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=3), x, f(6, 1, 5, 5)
    )
    assert grouped.flops == 2 * (2 * 6 * 8 * 8) * (1 * 5 * 5)
    # with a zero between any two elements of the image, as of its gradient where the kernel went two steps at a time
    dilated = last_rule(lambda x, k: lax.conv_general_dilated(x, k, (1, 1), [(2, 2)] * 2, (2, 2)), x, k)
    assert dilated.flops == 2 * (2 * 6 * 15 * 15) * (3 * 5 * 5) / 4


def test_factorisations_count_the_cubes_of_their_sides():
    n, m, square = 6, 10, f(3, 6, 6)
    of = lambda function, aval: last_rule(function, aval).flops / 3
    assert of(lax.linalg.lu, square) == pytest.approx(2 / 3 * n**3)
    assert of(lambda x: lax.linalg.eigh(x), square) == 9 * n**3
    assert of(lambda x: lax.linalg.qr(x, full_matrices=False), f(3, m, n)) == pytest.approx(4 * n**2 * (m - n / 3))
    full = 2 * n**2 * (m - n / 3) + 4 * (m**2 * n - m * n**2 + n**3 / 3)
    assert of(lambda x: lax.linalg.qr(x, full_matrices=True), f(3, m, n)) == pytest.approx(full)
    values = lambda x: lax.linalg.svd(x, compute_uv=False)
    assert of(values, f(3, n, m)) == of(values, f(3, m, n)) == pytest.approx(4 * m * n**2 - 4 / 3 * n**3)
    assert of(lambda x: lax.linalg.svd(x, full_matrices=False), f(3, m, n)) == 14 * m * n**2 + 8 * n**3
    schur = lambda has_vectors: lambda x: lax.linalg.schur(x, compute_schur_vectors=has_vectors)
    assert last_rule(schur(True), f(n, n)).flops == 2.5 * last_rule(schur(False), f(n, n)).flops == 25 * n**3


def test_the_channels_of_a_convolution_and_of_its_gradients():
    """Of 3 channels to 6 features. They are the images of the gradient of the kernel; that of the image has 6."""
    x, k = f(2, 3, 8, 8), f(6, 3, 5, 5)
    conv = lambda x, k: lax.conv(x, k, (1, 1), "SAME")

    def convolved(function):
        rules = [rule_of(e) for e in jax.make_jaxpr(function)(x, k).jaxpr.eqns]
        (rule,) = [r for r in rules if r.convolved is not None]
        return [rule.factors[c].size for c in rule.convolved.channels], rule.convolved.is_kernel_gradient

    assert convolved(conv) == ([3], False)
    assert convolved(lambda x, k: jax.linear_transpose(lambda x: conv(x, k), x)(jnp.ones((2, 6, 8, 8)))) == ([6], False)
    assert convolved(lambda x, k: jax.linear_transpose(lambda k: conv(x, k), k)(jnp.ones((2, 6, 8, 8)))) == ([3], True)


def test_elementwise_counts_one_and_movement_none():
    assert last_rule(lambda x: jnp.tanh(x), f(4, 5)).flops == 20
    assert last_rule(lambda x: x.T, f(4, 5)).flops == 0
    assert last_rule(lambda x: x.astype(jnp.bfloat16), f(4, 5)).flops == 0
    assert last_rule(lambda x: x.sum(), f(4, 5)).flops == 20


def test_broadcast_operands_stay_whole():
    rule = last_rule(lambda x, y: x * y, f(4, 5), f(1, 5))
    assert rule.operands == (((0,), (1,)), ((), (1,)))
    rule = last_rule(lambda x: x * 2.0, f(4, 5))
    assert rule.operands == (((0,), (1,)), ())


def test_embedding():
    rule = last_rule(lambda table, index: table[index], f(100, 16), i(4, 8))
    assert rule.factors == (Factor(4), Factor(8), Factor(100, "add"), Factor(16))
    assert rule.operands == (((2,), (3,)), ((0,), (1,), ()))
    assert rule.results == (((0,), (1,), (3,)),)


def test_embedding_gradient():
    rule = last_rule(lambda t, index, g: t.at[index].add(g), f(100, 16), i(4, 8), f(4, 8, 16))
    assert rule.factors == (Factor(4, "add"), Factor(8, "add"), Factor(100), Factor(16))
    assert rule.operands == (((2,), (3,)), ((0,), (1,), ()), ((0,), (1,), (3,)))
    assert rule.results == (((2,), (3,)),)


def test_barrier_ties_nothing_across_operands():
    rule = last_rule(lambda x, y: lax.optimization_barrier((x, y)), f(4), f(4))
    assert rule.operands == rule.results == (((0,),), ((1,),))


def test_sharding_constraint_passes():
    sharding = NamedSharding(AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,)), PartitionSpec("x"))
    rule = last_rule(lambda x: lax.with_sharding_constraint(x, sharding), f(4, 5))
    assert rule.operands == rule.results == (((0,), (1,)),)


def test_keys_stay_whole():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4))
    rule = last_rule(lambda k: jax.random.key_data(k), keys)
    assert rule.operands == (((),),) and rule.results == (((), ()),)


@pytest.mark.parametrize("name", sorted(ARITHMETIC))
def test_elementwise_primitives_exist(name):
    """A misspelt row would never be used."""
    primitives = [getattr(lax, attribute) for attribute in dir(lax) if attribute.endswith("_p")]
    primitives += [getattr(jax.extend.core.primitives, a) for a in dir(jax.extend.core.primitives) if a.endswith("_p")]
    assert name in {primitive.name for primitive in primitives if hasattr(primitive, "name")}


def test_light_rows_are_not_heavy():
    light = [lambda x: x + x, lambda x: x.T, lambda x: x.sum(0), lambda x: x.reshape(20)]
    heavy = [lambda x: jnp.dot(x, x.T), lambda x: lax.cumsum(x), lambda x: lax.sort(x), lambda x: lax.top_k(x, 2)]
    assert not any(last_rule(function, f(4, 5)).is_heavy for function in light)
    assert all(last_rule(function, f(4, 5)).is_heavy for function in heavy)


def test_the_table_has_no_call_like_primitive():
    assert not {"jit", "scan", "while", "cond", "custom_jvp_call", "custom_vjp_call", "shard_map"} & set(TABLE)

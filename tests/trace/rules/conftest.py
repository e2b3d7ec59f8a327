"""The catalogue of example equations that the rule tests share, as parameters of the fixture `example`."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.extend.random import threefry_2x32

CALLS = ("jit", "custom_jvp_call", "custom_vjp_call", "checkpoint")


def leaves(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """The equations of a program, those of called programs included, calls themselves not."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CALLS:
            for called in core.jaxprs_in_params(eqn.params):
                yield from leaves(called)
        else:
            yield eqn


@dataclasses.dataclass(frozen=True)
class Example:
    """One equation: that of the named primitive in the program of `function`; `eqn` is traced when first needed."""

    name: str
    primitive: str
    function: Callable[..., Any]
    avals: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def eqn(self) -> core.JaxprEqn:
        jaxpr = jax.make_jaxpr(lambda *arrays: self.function(*arrays))(*self.avals).jaxpr  # a new trace each time
        return [eqn for eqn in leaves(jaxpr) if eqn.primitive.name == self.primitive][-1]


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def b(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


def c(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.complex64)


def bf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def u(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.uint32)


def keys(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), shape) if shape else jax.random.key(0))


def conv(lhs: jax.Array, rhs: jax.Array, **options: Any) -> jax.Array:
    return lax.conv_general_dilated(lhs, rhs, (1, 1), "SAME", **options)


def max_pool(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (2, 1), "VALID")


def slices(x: jax.Array, starts: jax.Array, size: int) -> jax.Array:
    return jax.vmap(lambda start: lax.dynamic_slice(x, (start, 0), (size, x.shape[1])))(starts)


def update_slices(x: jax.Array, update: jax.Array, starts: jax.Array) -> jax.Array:
    return jax.vmap(lambda row, part, start: lax.dynamic_update_slice(row, part, (start, 0)))(x, update, starts)


X = f(16, 8)
CATALOGUE = [
    Example(name, primitive, function, tuple(avals))
    for name, primitive, function, *avals in [
        # elementwise
        ("add", "add", lax.add, X, X),
        ("add_scalar", "add", lambda x: x + 1.0, X),
        ("add_size_one", "add", lambda x, y: x + y, X, f(16, 1)),
        ("erf", "erf", lax.erf, X),
        ("erf_inv", "erf_inv", lax.erf_inv, X),
        ("integer_pow", "integer_pow", lambda x: x**3, X),
        ("logistic", "logistic", lax.logistic, X),
        ("clamp", "clamp", lambda x: lax.clamp(0.0, x, 1.0), X),
        ("select_n", "select_n", lax.select_n, b(16, 8), X, X),
        ("select_n_scalar", "select_n", lax.select_n, b(), X, X),
        ("convert", "convert_element_type", lambda x: x.astype(jnp.bfloat16), X),
        ("reduce_precision", "reduce_precision", lambda x: lax.reduce_precision(x, 8, 7), X),
        ("is_finite", "is_finite", lax.is_finite, X),
        ("complex", "complex", lax.complex, X, X),
        ("bitcast_narrow", "bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.uint16), X),
        ("stop_gradient", "stop_gradient", lax.stop_gradient, X),
        ("barrier", "optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), X, f(4, 8)),
        # layout
        ("broadcast", "broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (16, 4, 8), (0, 2)), X),
        ("broadcast_stretch", "broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (16, 8), (0, 1)), f(16, 1)),
        ("transpose", "transpose", lambda x: lax.transpose(x, (2, 0, 1)), f(2, 8, 4)),
        ("squeeze", "squeeze", lambda x: lax.squeeze(x, (1,)), f(8, 1, 4)),
        ("reshape_split", "reshape", lambda x: x.reshape(2, 4, 8), f(8, 8)),
        ("reshape_merge", "reshape", lambda x: x.reshape(32), f(2, 16)),
        ("reshape_refine", "reshape", lambda x: x.reshape(2, 16), f(4, 8)),
        ("reshape_ones", "reshape", lambda x: x.reshape(8, 1, 4, 1), f(1, 8, 4)),
        ("reshape_misfit", "reshape", lambda x: x.reshape(6, 4, 8), f(4, 6, 8)),
        ("reshape_permuted", "reshape", lambda x: lax.reshape(x, (8, 16), (1, 0)), X),
        ("iota", "iota", lambda: lax.broadcasted_iota(jnp.float32, (16, 8), 0)),
        # slicing
        ("slice", "slice", lambda x: x[2:9], X),
        ("dynamic_slice", "dynamic_slice", lambda x, k: lax.dynamic_slice(x, (k, 0), (4, 8)), X, i()),
        (
            "update_slice",
            "dynamic_update_slice",
            lambda x, y, k: lax.dynamic_update_slice(x, y, (k, 0)),
            X,
            f(4, 8),
            i(),
        ),
        ("update_row", "dynamic_update_slice", lambda x, y, k: lax.dynamic_update_slice(x, y, (k, 0)), X, f(1, 8), i()),
        ("pad", "pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 0))), X),
        ("concatenate", "concatenate", lambda x, y: lax.concatenate([x, y], 0), X, X),
        ("split", "split", lambda x: lax.split(x, (4, 12), 0), X),
        ("stack", "stack", lambda x, y: jnp.stack([x, y], 1), X, X),
        ("unstack", "unstack", jnp.unstack, f(2, 8)),
        ("tile", "tile", lambda x: jnp.tile(x, (1, 2)), X),
        ("rev", "rev", lambda x: x[::-1], X),
        # reductions
        ("reduce_sum", "reduce_sum", lambda x: x.sum(0), X),
        ("reduce_sum_bf16", "reduce_sum", lambda x: lax.reduce_sum(x, (0,)), bf(16, 8)),
        ("reduce_max", "reduce_max", lambda x: x.max(1), X),
        ("reduce_min_all", "reduce_min", lambda x: x.min(), X),
        ("reduce_prod", "reduce_prod", lambda x: x.prod(1), X),
        ("reduce_and", "reduce_and", lambda x: x.all(1), b(16, 8)),
        ("reduce_or", "reduce_or", lambda x: x.any(0), b(16, 8)),
        ("reduce_xor", "reduce_xor", lambda x: lax.reduce_xor(x, (0,)), i(16, 8)),
        ("reduce_other", "reduce", lambda x: lax.reduce(x, 0.0, lambda p, q: p + 2 * q, (1,)), X),
        ("argmax", "argmax", lambda x: x.argmax(0), X),
        ("argmin_of_ties", "argmin", lambda x: lax.argmin(x, 1, jnp.uint8), i(16, 8)),
        ("argmax_of_bools", "argmax", lambda x: lax.argmax(x, 0, jnp.int32), b(16, 8)),
        ("argmax_bf16", "argmax", lambda x: lax.argmax(x, 1, jnp.int32), bf(16, 8)),
        ("cumsum", "cumsum", lambda x: jnp.cumsum(x, 0), X),
        ("cumlogsumexp", "cumlogsumexp", lambda x: lax.cumlogsumexp(x, 1), X),
        ("sort", "sort", lambda x: jnp.sort(x, 0), X),
        ("sort_pairs", "sort", lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), X, i(16, 8)),
        ("top_k", "top_k", lambda x: lax.top_k(x, 3), X),
        ("window_sum", "reduce_window_sum", lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (2, 1), "VALID"), X),
        ("window_max", "reduce_window_max", max_pool, X),
        ("window_gradient", "select_and_scatter_add", jax.grad(lambda x: max_pool(x).sum()), X),
        ("window_tangent", "select_and_gather_add", lambda x: jax.jvp(max_pool, (x,), (x,)), X),
        # contractions
        ("matmul", "dot_general", lambda x, y: x @ y, f(16, 8), f(8, 4)),
        ("matmul_bf16", "dot_general", lambda x, y: x @ y, bf(16, 8), bf(8, 4)),
        ("attention", "dot_general", lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), f(2, 8, 4, 8), f(2, 4, 4, 8)),
        ("two_contracted", "dot_general", lambda x, y: jnp.einsum("thd,hdm->tm", x, y), f(16, 4, 8), f(4, 8, 4)),
        ("ragged_dot", "ragged_dot_general", lax.ragged_dot, f(16, 8), f(4, 8, 16), i(4)),
        (
            "ragged_dot_gradient",
            "ragged_dot_general",
            jax.grad(lambda w, x, sizes: lax.ragged_dot(x, w, sizes).sum()),
            f(4, 8, 16),
            f(16, 8),
            i(4),
        ),
        ("conv", "conv_general_dilated", conv, f(8, 8, 4, 4), f(16, 8, 3, 3)),
        (
            "conv_kernel_gradient",
            "conv_general_dilated",
            jax.grad(lambda k, x: conv(x, k).sum()),
            f(16, 8, 3, 3),
            f(8, 8, 4, 4),
        ),
        (
            "conv_depthwise",
            "conv_general_dilated",
            lambda x, k: conv(x, k, feature_group_count=8),
            f(8, 8, 4, 4),
            f(16, 1, 3, 3),
        ),
        (
            "conv_grouped",
            "conv_general_dilated",
            lambda x, k: conv(x, k, feature_group_count=2),
            f(8, 8, 4, 4),
            f(16, 4, 3, 3),
        ),
        (
            "conv_grouped_kernel_gradient",
            "conv_general_dilated",
            jax.grad(lambda k, x: conv(x, k, feature_group_count=4).sum()),
            f(8, 4, 3, 3),
            f(8, 16, 4, 4),
        ),
        # indexing
        ("embedding", "gather", lambda t, k: t[k], f(32, 16), i(8, 4)),
        ("embedding_fill", "gather", lambda t, k: t.at[k].get(mode="fill", fill_value=0), f(32, 16), i(8, 4)),
        ("embedding_clip", "gather", lambda t, k: t.at[k].get(mode="clip"), f(32, 16), i(8, 4)),
        ("gather_bool", "gather", lambda t, k: t[k], b(32, 16), i(8, 4)),
        ("gather_columns", "gather", lambda x, k: x[:, k], f(8, 16, 4), i(8)),
        ("gather_points", "gather", lambda x, k, l: x[k, l], f(8, 16, 4), i(8), i(8)),
        ("gather_rows", "gather", lambda x, k: slices(x, k, 1), f(16, 8), i(8)),
        ("gather_slices", "gather", lambda x, k: slices(x, k, 3), f(16, 8), i(8)),
        ("label_logits", "gather", lambda x, k: jnp.take_along_axis(x, k, -1), f(8, 4, 16), i(8, 4, 1)),
        ("scatter_add", "scatter-add", lambda t, k, x: t.at[k].add(x), f(32, 16), i(8, 4), f(8, 4, 16)),
        ("scatter_points", "scatter-add", lambda t, k, l, x: t.at[k, l].add(x), f(8, 16, 4), i(8), i(8), f(8, 4)),
        (
            "label_gradient",
            "scatter-add",
            jax.grad(lambda x, k: jnp.take_along_axis(x, k, -1).sum()),
            f(8, 4, 16),
            i(8, 4, 1),
        ),
        ("scatter_mul", "scatter-mul", lambda t, k, x: t.at[k].multiply(x), f(32, 16), i(8), f(8, 16)),
        ("scatter_max", "scatter-max", lambda t, k, x: t.at[k].max(x), f(32, 16), i(8), f(8, 16)),
        ("scatter_min", "scatter-min", lambda t, k, x: t.at[k].min(x), f(32, 16), i(8), f(8, 16)),
        ("scatter_sub", "scatter-sub", lambda t, k, x: t.at[k].subtract(x), f(32, 16), i(8), f(8, 16)),
        ("scatter", "scatter", lambda t, k, x: t.at[k].set(x), f(32, 16), i(8), f(8, 16)),
        ("cache_rows", "scatter", update_slices, f(8, 16, 8), f(8, 1, 8), i(8)),
        ("cache_slices", "scatter", update_slices, f(8, 16, 8), f(8, 3, 8), i(8)),
        # random numbers
        ("random_bits", "random_bits", lambda k: jax.random.bits(k, (16, 8)), keys()),
        ("random_bits_of_keys", "random_bits", jax.vmap(lambda k: jax.random.bits(k, (16, 8))), keys(4)),
        ("random_split", "random_split", lambda k: jax.random.split(k, 4), keys()),
        ("random_fold_in", "random_fold_in", jax.random.fold_in, keys(), u()),
        ("threefry", "threefry2x32", lambda k, x: threefry_2x32(k, x), u(2), u(128)),
        # linear algebra
        ("cholesky", "cholesky", lax.linalg.cholesky, f(8, 4, 4)),
        (
            "triangular_solve",
            "triangular_solve",
            lambda x, y: lax.linalg.triangular_solve(x, y, left_side=True),
            f(8, 4, 4),
            f(8, 4, 2),
        ),
        ("eigh", "eigh", lambda x: lax.linalg.eigh(x), f(8, 4, 4)),
        ("hessenberg", "hessenberg", lax.linalg.hessenberg, f(8, 4, 4)),
        ("lu", "lu", lax.linalg.lu, f(8, 4, 4)),
        ("qr", "qr", lambda x: lax.linalg.qr(x), f(8, 6, 4)),
        ("reflections", "householder_product", lax.linalg.householder_product, f(8, 6, 4), f(8, 4)),
        ("svd", "svd", lambda x: lax.linalg.svd(x), f(8, 6, 4)),
        ("tridiagonal", "tridiagonal", lambda x: lax.linalg.tridiagonal(x), f(8, 4, 4)),
        # by shards
        ("fft", "fft", jnp.fft.fft, c(8, 4)),
        ("fft_planes", "fft", jnp.fft.rfft2, f(8, 16, 4)),
        ("top_k_rows", "top_k", lambda x: lax.top_k(x, 3, axis=0), X),
        ("approx_top_k", "approx_top_k", lambda x: lax.approx_max_k(x, 3), X),
        ("igamma", "igamma", lax.igamma, X, X),
    ]
]

PAIRED = frozenset(
    """attention conv embedding gather_columns gather_rows label_logits label_gradient scatter_add scatter_points
    cache_rows argmax argmin_of_ties conv_grouped conv_grouped_kernel_gradient update_row two_contracted reduce_min_all
    ragged_dot ragged_dot_gradient""".split()
)
"""Examples with factors of different kinds."""


def softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x, 0)


def flat_increment(x: jax.Array) -> jax.Array:
    return (x.reshape(-1) + 1).reshape(x.shape)


def loop(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda _, y: jnp.cumsum(y, 1), x)


FALLBACK = [
    Example(name, primitive, function, tuple(avals))
    for name, primitive, function, *avals in [
        ("tridiagonal_solve", "tridiagonal_solve", lax.linalg.tridiagonal_solve, *[f(8, 4)] * 3, f(8, 4, 2)),
        ("composite_sum", "composite", lax.composite(lambda x: jnp.sin(x).sum(0), name="test.sum"), X),
        ("composite_softmax", "composite", lax.composite(softmax, name="test.softmax"), X),
        ("composite_merge", "composite", lax.composite(flat_increment, name="test.merge"), X),
        ("composite_loop", "composite", lax.composite(loop, name="test.loop"), X),
    ]
]


def _random_array(rng: np.random.Generator, aval: Any) -> jax.Array:
    """An operand for an example: keys from seed 0, integers in [0, 8), small floats, positive definite at that."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), aval.shape) if aval.shape else jax.random.key(0)
    if aval.dtype == jnp.bool_:
        return jnp.asarray(rng.random(aval.shape) < 0.5)
    if jnp.issubdtype(aval.dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, 8, aval.shape), aval.dtype)
    values = rng.uniform(0.1, 0.9, aval.shape)
    if len(aval.shape) >= 2 and aval.shape[-1] == aval.shape[-2]:
        values = (values + np.swapaxes(values, -1, -2)) / 2 + 4 * np.eye(aval.shape[-1])
    return jnp.asarray(values, aval.dtype)


@pytest.fixture
def random_array() -> Callable[[np.random.Generator, Any], jax.Array]:
    """Makes an operand of a given type."""
    return _random_array


@pytest.fixture(params=CATALOGUE, ids=lambda example: example.name)
def example(request: pytest.FixtureRequest) -> Example:
    """One equation whose rule is in the table."""
    return request.param


@pytest.fixture(params=CATALOGUE + FALLBACK, ids=lambda example: example.name)
def any_example(request: pytest.FixtureRequest) -> Example:
    """One equation whose rule is in the table or comes from Shardy."""
    return request.param


@pytest.fixture(params=FALLBACK, ids=lambda example: example.name)
def fallback_example(request: pytest.FixtureRequest) -> Example:
    """One equation whose rule comes from Shardy."""
    return request.param


@pytest.fixture(params=[e for e in CATALOGUE + FALLBACK if e.name in PAIRED], ids=lambda example: example.name)
def paired_example(request: pytest.FixtureRequest) -> Example:
    """One equation of which several factors can be split together."""
    return request.param


@pytest.fixture
def catalogue() -> dict[str, Example]:
    """All examples of the table by name."""
    return {example.name: example for example in CATALOGUE}

"""Random programs under random legal plans on eight devices compute what they compute on one."""

import dataclasses
import math
from collections.abc import Callable

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from jax import lax

MESHES = ({"a": 8}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2})
MAX_SIZE = 2048
Pool = list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation on the pool of arrays; the numbers choose operands, axes and the like."""

    operation: str
    numbers: tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Program:
    """Steps on a pool that begins with the arguments; the result is the pool's last arrays, and gradients if asked."""

    steps: tuple[Step, ...]
    has_gradient: bool

    def __call__(self, params, ids):
        def forward(params):
            pool = list(params)
            for step in self.steps:
                pool.append(jnp.atleast_1d(jnp.tanh(OPERATIONS[step.operation](pool, ids, *step.numbers))))
            return pool[len(params) :][-4:]

        if not self.has_gradient:
            return forward(params)
        return jax.value_and_grad(lambda p: sum((x * x).mean() for x in forward(p)))(params)


@jax.custom_vjp
def scaled(x):
    return 2 * x


scaled.defvjp(lambda x: (2 * x, x), lambda x, g: (g * jnp.cos(x),))


def partner(pool: Pool, x: jax.Array, k: int) -> jax.Array:
    """An array of the shape of x."""
    same = [y for y in pool if y.shape == x.shape]
    return same[k % len(same)]


def matmul(pool, ids, i, j, k):
    x = pool[i % len(pool)]
    fitting = [
        y for y in pool if y.shape[0] == x.shape[-1] and x.size // x.shape[-1] * (y.size // y.shape[0]) <= MAX_SIZE
    ]
    return jnp.tensordot(x, fitting[j % len(fitting)], 1) if fitting else x * 0.5


def batched(pool, ids, i, j, k):
    x = pool[i % len(pool)]
    y = partner(pool, x, j)
    if x.ndim < 2 or x.size * x.shape[-2] // x.shape[-1] > MAX_SIZE:
        return x - y
    return x @ jnp.swapaxes(y, -1, -2)


def reduce(pool, ids, i, j, k):
    x = pool[i % len(pool)]
    if x.ndim < 2:
        return x
    return (jnp.sum, jnp.max, jnp.mean, jnp.min)[k % 4](x, axis=j % x.ndim)


def broadcast(pool, ids, i, j, k):
    x, y = pool[i % len(pool)], pool[j % len(pool)]
    return x * y.mean() + y.sum(tuple(range(y.ndim - 1)))[0]


def transpose(pool, ids, i, j, k):
    x = pool[i % len(pool)]
    return jnp.moveaxis(x, j % x.ndim, k % x.ndim)


def reshape(pool, ids, i, j, k):
    x = pool[i % len(pool)]
    d = j % x.ndim
    if k % 2 and x.shape[d] >= 4 and x.ndim < 4:
        return x.reshape(*x.shape[:d], 2, x.shape[d] // 2, *x.shape[d + 1 :])
    if d and x.ndim > 1:
        return x.reshape(*x.shape[: d - 1], x.shape[d - 1] * x.shape[d], *x.shape[d + 1 :])
    return x.reshape(-1)


def gather(pool, ids, i, j, k):
    x = pool[i % len(pool)]
    x = jnp.moveaxis(x, j % x.ndim, 0)
    return x[ids % x.shape[0]] if ids.size * x.size // x.shape[0] <= MAX_SIZE else x[0]


def scatter(pool, ids, i, j, k):
    x = pool[i % len(pool)]
    return partner(pool, x, j).at[ids[:2] % x.shape[0]].add(x[:2])


def concatenate(pool, ids, i, j, k):
    x = pool[i % len(pool)]
    return jnp.concatenate([x, partner(pool, x, j)], k % x.ndim) if 2 * x.size <= MAX_SIZE else x


def slices(pool, ids, i, j, k):
    x = pool[i % len(pool)]
    d = j % x.ndim
    if k % 3 == 0:
        return lax.slice_in_dim(x, 0, max(x.shape[d] // 2, 1), axis=d)
    if k % 3 == 1:
        return lax.dynamic_slice_in_dim(x, ids[0] % 2, max(x.shape[d] // 2, 1), axis=d)
    return jnp.flip(jnp.pad(x, [(0, 0)] * d + [(1, 1)] + [(0, 0)] * (x.ndim - d - 1)), d)


def scan(pool, ids, i, j, k):
    x = pool[i % len(pool)]
    if x.ndim < 2:
        return jnp.cumsum(x)
    last, rows = lax.scan(
        lambda c, row: ((jnp.tanh(c[1] + row), c[0]), c[0] * row), (x[0], x[-1]), x, reverse=bool(k % 2)
    )
    return rows + last[j % 2]


def loop(pool, ids, i, j, k):
    x = pool[i % len(pool)]
    y = partner(pool, x, j)
    return lax.fori_loop(0, 3, lambda n, c: jnp.sin(c) * y + n, x)


def choose(pool, ids, i, j, k):
    x = pool[i % len(pool)]
    y = partner(pool, x, j)
    return lax.cond(x.sum() > 0.12345, lambda x, y: jnp.sin(x) + y, lambda x, y: x * y, x, y)


def along(function: Callable) -> Callable:
    return lambda pool, ids, i, j, k: function(pool[i % len(pool)], axis=j % pool[i % len(pool)].ndim)


def pointwise(function: Callable) -> Callable:
    return lambda pool, ids, i, j, k: function(pool[i % len(pool)], partner(pool, pool[i % len(pool)], j))


OPERATIONS = {
    "matmul": matmul,
    "batched": batched,
    "reduce": reduce,
    "broadcast": broadcast,
    "transpose": transpose,
    "reshape": reshape,
    "gather": gather,
    "scatter": scatter,
    "concatenate": concatenate,
    "slices": slices,
    "scan": scan,
    "loop": loop,
    "choose": choose,
    "softmax": along(jax.nn.softmax),
    "cumsum": along(jnp.cumsum),
    "sort": along(jnp.sort),
    "select": pointwise(lambda x, y: jnp.where(x > y, x, 2 * y)),
    "add": pointwise(lambda x, y: x + y),
    "checkpoint": pointwise(jax.checkpoint(lambda x, y: jnp.sin(jnp.sin(x) * y))),
    "custom_vjp": pointwise(lambda x, y: scaled(x) + y),
    "call": pointwise(jax.jit(lambda x, y: x * y - x)),
    "mask": pointwise(lambda x, y: jnp.where(jnp.arange(x.shape[-1]) % 3 == 0, x, y)),
}

PARAMS = ((8, 16), (16, 8), (16,), (4, 8, 8), (8, 16))
STEPS = st.builds(Step, st.sampled_from(sorted(OPERATIONS)), st.tuples(*[st.integers(0, 11)] * 3))
PROGRAMS = st.builds(Program, st.lists(STEPS, min_size=3, max_size=9).map(tuple), st.booleans())


def arguments():
    rng = np.random.default_rng(0)
    params = tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in PARAMS)
    return params, jnp.asarray(rng.integers(0, 64, 8), jnp.int32)


def assert_same(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5 * (1 + float(np.abs(y).max(initial=0.0))))


# No shrinking: each example compiles a program for eight devices, and a program of nine steps can be read as it is.
QUIET = settings(
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
DRAWN = given(program=PROGRAMS, mesh=st.sampled_from(MESHES), seed=st.integers(0, 2**32 - 1))


@settings(QUIET, max_examples=8)
@DRAWN
def test_random_programs_under_random_plans(random_plan, program, mesh, seed):
    check(random_plan, program, mesh, seed)


@pytest.mark.exhaustive
@settings(QUIET, max_examples=48)
@DRAWN
def test_many_random_programs_under_random_plans(random_plan, program, mesh, seed):
    check(random_plan, program, mesh, seed)


def check(random_plan, program, mesh, seed):
    args = arguments()
    expected = jax.jit(program)(*args)
    plan = random_plan(program, args, mesh, seed)
    assert_same(plan.jit(program)(*args), expected)


def test_the_operations_cover_what_they_promise():
    """Every operation runs on its own, keeps sizes bounded and yields something that depends on its input."""
    args = arguments()
    for name in OPERATIONS:
        for numbers in ((0, 1, 1), (3, 2, 0)):
            (result,) = Program((Step(name, numbers),), False)(*args)
            assert 0 < math.prod(result.shape) <= 2 * MAX_SIZE and np.isfinite(result).all()

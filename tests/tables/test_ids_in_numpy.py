"""Ids computed in NumPy are those that JAX computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.tables.ids_in_numpy import in_numpy
from autoshard.trace.inline import inlined

ROWS = 37


def sliced(ids):
    return ids[:, 1]


def wrapped(ids):
    return jnp.where(ids < 0, ids + ROWS, ids)


def hashed(ids):
    return (ids * 7919 + 13) % ROWS


def truncated(ids):
    return jax.lax.rem(ids, jnp.int32(5))


def clipped(ids):
    return jnp.clip(ids, 0, ROWS - 1).reshape(-1, 2).T


def joined(ids):
    return jnp.concatenate([ids[::2], jnp.broadcast_to(ids[:1], (3, ids.shape[1]))])


def masked(ids):
    return jnp.where((ids >= 3) & (ids != 7) | (ids <= -2), ids.astype(jnp.uint8).astype(jnp.int32), -1)


def chosen(ids):
    return jax.lax.select_n(jnp.abs(jnp.sign(ids)) + 0 * ids, ids, -ids)


PROGRAMS = (sliced, wrapped, hashed, truncated, clipped, joined, masked)


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_equal_to_jax(fn):
    rng = np.random.default_rng(0)
    for ids in (rng.integers(-50, 300, (6, 4)), rng.integers(-(2**31), 2**31, (6, 4))):
        ids = ids.astype(np.int32)
        run = in_numpy(inlined(jax.make_jaxpr(fn)(ids)))
        assert run is not None
        (found,) = run(ids)
        expected = np.asarray(fn(jnp.asarray(ids)))
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_other_programs_are_left_to_jax():
    of = lambda fn, x: in_numpy(inlined(jax.make_jaxpr(fn)(x)))
    ids = np.zeros((6, 4), np.int32)
    assert of(chosen, ids) is None  # `sign` is not known here
    assert of(lambda x: (x * 0.5).astype(jnp.int32), ids) is None  # floats may be rounded otherwise
    assert of(lambda x: jnp.cumsum(x, 0), ids) is None

"""Bags of rows: pooling against a loop over examples, and a recommender that reads them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import zoo_checks
from autoshard_models import dlrm
from autoshard_models.embedding_bags import NO_ID, EmbeddingBags
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

ROWS, SIZES = (5, 3), (3, 2)


def pooled(tables: list[np.ndarray], ids: np.ndarray, is_mean: bool) -> np.ndarray:
    result = np.zeros((len(ids), 2, 4))
    for example, row in enumerate(ids):
        for table, own in enumerate((row[:3], row[3:])):
            vectors = [tables[table][k] for k in own if k != NO_ID]
            if vectors:
                result[example, table] = np.mean(vectors, axis=0) if is_mean else np.sum(vectors, axis=0)
    return result


@given(
    st.lists(
        st.tuples(*[st.integers(NO_ID, ROWS[0] - 1)] * SIZES[0], *[st.integers(NO_ID, ROWS[1] - 1)] * SIZES[1]),
        min_size=4,
        max_size=4,
    ),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_bags_are_summed_or_averaged_and_may_be_empty(ids, is_mean):
    ids = np.array(ids, np.int32)
    layer = EmbeddingBags(ROWS, 4, SIZES, is_mean=is_mean, rngs=zoo_checks.rngs())
    tables = [np.asarray(table.embedding[...]) for table in layer.tables]
    np.testing.assert_allclose(layer(jnp.asarray(ids)), pooled(tables, ids, is_mean), rtol=1e-5, atol=1e-6)


def test_a_row_is_moved_as_often_as_it_is_read_and_by_no_missing_id():
    layer = EmbeddingBags(ROWS, 4, SIZES, rngs=zoo_checks.rngs())
    ids = jnp.array([[1, NO_ID, 1, 0, 0], [NO_ID, NO_ID, NO_ID, 0, 0]])
    gradient = nnx.grad(lambda layer: layer(ids).sum())(layer)["tables"][0]["embedding"][...]
    np.testing.assert_array_equal(gradient, np.array([0, 2, 0, 0, 0])[:, None] * np.ones(4))


def test_bags_of_one_id_are_what_the_recommender_reads_without_bags():
    plain = dlrm.PRESETS["tiny"]
    bags = dataclasses.replace(plain, bag_sizes=(1,) * len(plain.table_rows))
    model, other = dlrm.DLRM(plain, rngs=zoo_checks.rngs()), dlrm.DLRM(bags, rngs=zoo_checks.rngs())
    numbers = jnp.linspace(-1, 1, 8 * plain.num_numbers).reshape(8, -1)
    ids = jnp.arange(8)[:, None] % jnp.array(plain.table_rows)
    other.bottom, other.top = model.bottom, model.top
    for table, source in zip(other.bags.tables, model.tables, strict=True):
        table.embedding[...] = source.embedding[...]
    np.testing.assert_array_equal(other(numbers, ids), model(numbers, ids))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one size for each table; received 1 for 2"):
        EmbeddingBags(ROWS, 4, (1,), rngs=zoo_checks.rngs())
    with pytest.raises(ValueError, match="each of the 4 tables; received 1"):
        dataclasses.replace(dlrm.PRESETS["tiny"], bag_sizes=(1,))
    with pytest.raises(ValueError, match="bag_sizes is empty"):
        dataclasses.replace(dlrm.PRESETS["tiny"], averages_bags=True)

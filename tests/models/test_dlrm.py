"""The recommender: size, the products of pairs, padding, tables split by rows."""

import jax
import jax.numpy as jnp
import numpy as np
import zoo_checks
from autoshard_models import dlrm
from autoshard_models.optimizers import sgd
from autoshard_models.train_step import build

SMALL = dlrm.PRESETS["tiny"]


def batch_of(seed: int = 0, batch_size: int = 16) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    columns = [rng.integers(rows, size=batch_size, dtype=np.int32) for rows in SMALL.table_rows]
    batch = {
        "numbers": rng.normal(size=(batch_size, SMALL.num_numbers)).astype(np.float32),
        "categories": np.stack(columns, axis=1),
        "clicks": rng.integers(2, size=batch_size).astype(np.float32),
    }
    return jax.tree.map(jnp.asarray, batch)


def test_parameters_are_the_tables_and_two_small_mlps():
    """188 million rows of 128 features, 26 categories; 27 vectors make 351 pairs."""
    rows = 5 * 40_000_512 + 39_936 + 17_408 + 8_192 + 20_480 + 3 + 7_168 + 2_048 + 63 + 3_068_928 + 405_504 + 10
    rows += 3_072 + 12_288 + 155 + 4 + 976 + 14 + 590_848 + 13_312 + 108 + 36
    bottom = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 128 + 128
    top = 479 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 512 + 512 + 512 * 256 + 256 + 256 + 1
    assert zoo_checks.num_params(build(dlrm.PRESETS["criteo"], sgd())) == rows * 128 + bottom + top


def test_padding_rounds_up_large_tables_only():
    assert [dlrm.padded(rows) for rows in (3, 1024, 1025, 40_000_000)] == [3, 1024, 2048, 40_000_512]


def test_logits_come_from_the_products_of_all_pairs():
    model, batch = dlrm.DLRM(SMALL, rngs=zoo_checks.rngs()), batch_of()
    dense = model.bottom(batch["numbers"])
    vectors = [dense, *(table(batch["categories"][:, n]) for n, table in enumerate(model.tables))]
    products = [(vectors[i] * vectors[j]).sum(-1) for i in range(5) for j in range(i)]
    expected = model.top(jnp.concatenate([dense, jnp.stack(products, axis=1)], axis=1))[:, 0]
    np.testing.assert_allclose(model(batch["numbers"], batch["categories"]), expected, rtol=1e-4, atol=1e-6)


def test_batches_are_as_stated():
    stated = dlrm.batch_shapes(SMALL, 16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), batch_of()) == jax.tree.map(lambda x: (x.shape, x.dtype), stated)

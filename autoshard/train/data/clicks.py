"""Click logs of a recommender, drawn from a model of users that stays hidden."""

from collections.abc import Sequence

import numpy as np
from autoshard_models.embedding_bags import NO_ID

from autoshard.train.data.batches import ALL, Batch, Examples

GOLDEN_RATIO = (1 + 5**0.5) / 2
"""Its multiples, less their whole parts, fill the numbers from 0 to 1 evenly and without visible order."""


def click_batch(
    rng: np.random.Generator,
    batch_size: int,
    num_numbers: int,
    table_rows: Sequence[int],
    examples: Examples = ALL,
    *,
    bag_sizes: Sequence[int] = (),
) -> Batch:
    """Examples whose clicks depend on every number and on every category.

    Numbers are normal. Category n of a table has a probability in proportion to log((n + 2) / (n + 1)), about Zipf's
    law, as words and shop items have. The logarithm of the odds of a click is 2 * (w x + sum of effects / sqrt(tables))
    - 1: x are the numbers and w is a vector of length 1; each category has an effect from -1 to 1. Both are the same
    for every seed. Somewhat more than a third of the examples are clicks.

    With bags, an example has from none to all of its ids of a table, every number of them alike likely, and the effect
    of a bag is the sum of those of its ids by the root of its size.

    There is nothing to read, and a batch is made as a whole, whichever examples are asked for: most of the work is to
    draw random numbers in their order, and a sum may be rounded otherwise among fewer rows.

    Args:
        rng: draws users and clicks.
        batch_size: examples.
        num_numbers: numeric features of an example.
        table_rows: categories of each table.
        examples: which of them to return.
        bag_sizes: for each table, the most ids of an example; empty for exactly one of each.

    Returns:
        The batch of `autoshard_models.dlrm.batch_shapes`.
    """
    num_tables, sizes = len(table_rows), np.array(bag_sizes or [1] * len(table_rows))
    table = np.repeat(np.arange(num_tables), sizes)
    rows = np.array(table_rows)[table]
    numbers = rng.standard_normal((batch_size, num_numbers), np.float32)
    places = np.exp(rng.random((batch_size, table.size)) * np.log1p(rows)).astype(np.int64) - 1
    categories = np.minimum(places, rows - 1)
    weights = np.random.default_rng(0).standard_normal(num_numbers)
    weights /= np.linalg.norm(weights)
    # One pseudo-random number from -1 to 1 for each category, without a table of millions of them.
    effects = np.cos(2 * np.pi * ((categories + 1) * GOLDEN_RATIO + table * 2**0.5)) / np.sqrt(sizes[table])
    if bag_sizes:
        place = np.arange(table.size) - (np.cumsum(sizes) - sizes)[table]
        is_id = place < rng.integers(sizes + 1, size=(batch_size, num_tables))[:, table]
        categories, effects = np.where(is_id, categories, NO_ID), effects * is_id
    log_odds = 2 * (numbers @ weights + effects.sum(axis=1) / np.sqrt(num_tables)) - 1
    clicks = rng.random(batch_size) < 1 / (1 + np.exp(-log_odds))
    batch = {"numbers": numbers, "categories": categories.astype(np.int32), "clicks": clicks.astype(np.float32)}
    return {name: x[examples] for name, x in batch.items()}

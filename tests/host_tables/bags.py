"""Batches of bags of ids for tests of tables in host memory."""

import jax
import numpy as np

ROWS, EXAMPLES = 37, 6


def batches(count, ids):
    rng = np.random.default_rng(1)
    draw = {
        "even": lambda: rng.integers(0, ROWS, (EXAMPLES, 4)),
        "zipf": lambda: np.minimum(rng.zipf(1.3, (EXAMPLES, 4)), ROWS) - 1,
        "one worker's": lambda: rng.integers(0, ROWS // 3, (EXAMPLES, 4)) * 3,
    }[ids]
    for _ in range(count):
        bags = draw()
        if rng.random() < 0.2:
            bags[:] = bags[0, 0]  # a single row
        bags[rng.random(EXAMPLES) < 0.3] = -99  # empty bags, and ids that are no rows
        yield {"bags": bags.astype(np.int32), "y": rng.random(EXAMPLES, np.float32)}


def assert_close(a, b, **tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), **tolerance)

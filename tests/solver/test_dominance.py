"""Dominated labels by their definition: written out, label by label, on random tables."""

import itertools
import math

import numpy as np
import pytest

from autoshard.solver.reduce.dominance import row_differences, undominated


def _difference(table: np.ndarray, row: int, other: int) -> float:
    """By how much a row can exceed another, where that one can be taken at all."""
    return max((a - b for a, b in zip(table[row], table[other], strict=True) if math.isfinite(b)), default=-math.inf)


def _random_table(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Few values, so that rows are often equal or no more than others; a tenth is forbidden."""
    table = random.integers(0, 3, (rows, columns)).astype(float)
    return np.where(random.random((rows, columns)) < 0.1, np.inf, table)


@pytest.mark.parametrize("seed", range(20))
def test_differences_of_rows_are_those_of_the_worst_column(seed):
    random = np.random.default_rng(seed)
    rows, columns = random.integers(1, 9, 2)
    table = _random_table(random, rows, columns)
    found = row_differences(table)
    for row, other in itertools.product(range(rows), repeat=2):
        assert found[row, other] == _difference(table, row, other)


@pytest.mark.parametrize("seed", range(40))
def test_of_labels_stay_the_first_of_those_that_no_other_dominates(seed):
    """Two factors, the second of which counts twice; in odd cases rows of the first are too many to be compared, and in
    half of all each row has a least entry of 0, as a presolve leaves them."""
    random = np.random.default_rng(seed)
    labels, is_compared = int(random.integers(1, 12)), seed % 2 == 0
    unary, amounts = random.integers(0, 4, labels).astype(float), random.integers(0, 2, (1, labels)).astype(float)
    tables = [_random_table(random, 3, 4), _random_table(random, 4, 2)]
    if seed % 4 < 2:
        tables = [table - np.min(table, axis=1, where=np.isfinite(table), initial=2.0)[:, None] for table in tables]
    rows = np.array([random.integers(0, len(table), labels) for table in tables])
    differences = [row_differences(table) for table in tables]
    if not is_compared:
        differences[0] = np.zeros((0, 0))
    keep = undominated(
        unary,
        amounts,
        rows,
        np.array([1.0, 2.0]),
        np.concatenate([d.ravel() for d in differences]),
        np.array([0, differences[0].size]),
        np.array([len(d) for d in differences]),
        np.argsort(unary, kind="stable"),
    )

    def dominates(y: int, x: int) -> bool:
        first = _difference(tables[0], rows[0, y], rows[0, x]) if is_compared else 0.0
        is_alike = is_compared or rows[0, y] == rows[0, x]
        worse = unary[y] - unary[x] + first + 2 * _difference(tables[1], rows[1, y], rows[1, x])
        return is_alike and amounts[0, y] <= amounts[0, x] and worse <= 0

    stays = np.flatnonzero(keep).tolist()
    for x in range(labels):
        rivals = [y for y in range(labels) if y != x and dominates(y, x)]
        if keep[x]:
            assert not set(rivals) & set(stays), "what stays is dominated by nothing that stays"
            assert all(y > x for y in rivals if dominates(x, y)), "of equals the first stays"
        else:
            assert set(rivals) & set(stays), "what goes is dominated by something that stays"

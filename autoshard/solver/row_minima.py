"""The least of each row of a table with an amount added to each column: what a factor tells one of its ends."""

import numpy as np

from autoshard.solver.kernels import FAST, inner


@inner(FAST)
def row_minima(table, added, sign, rows, columns, least):
    """least[a] = min over columns b of table[a, b] + sign added[b].

    Four rows side by side, as compilers do not make vectors of one minimum, and in slices, since they do of what is
    counted from 0.

    Args:
      table: float64; its rows lie one behind the other. added: float64 [columns]. sign: 1.0 or -1.0.
      rows, columns: Of the table. least: float64 [rows or more], written.
    """
    even = rows - rows % 4
    for a in range(0, even, 4):
        at = a * columns
        first, second = table[at : at + columns], table[at + columns : at + 2 * columns]
        third, fourth = table[at + 2 * columns : at + 3 * columns], table[at + 3 * columns : at + 4 * columns]
        w, x, y, z = np.inf, np.inf, np.inf, np.inf
        for b in range(columns):
            more = sign * added[b]
            w, x = min(w, first[b] + more), min(x, second[b] + more)
            y, z = min(y, third[b] + more), min(z, fourth[b] + more)
        least[a], least[a + 1], least[a + 2], least[a + 3] = w, x, y, z
    for a in range(even, rows):
        row, best = table[a * columns : (a + 1) * columns], np.inf
        for b in range(columns):
            best = min(best, row[b] + sign * added[b])
        least[a] = best

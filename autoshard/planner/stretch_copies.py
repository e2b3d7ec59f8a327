"""Which stretches of operations are copies of one another: the same operations, in other layers.

Two stretches are copies if their operations are alike one by one: of the same kind, in decisions that colour refinement
does not tell apart (`solver/reduce/colour_refinement.py`). What is best for one layer's stretch is then best for the
other's, ends and memory aside: a problem that is the same under a permutation of its layers is bounded best by weights
that are, too, since the bound is concave in them, and so no lower at their average over all permutations than at each
(Gatermann and Parrilo, Symmetry groups, semidefinite programs, and sums of squares, 2004, for the argument).
"""

import numpy as np

from autoshard.cost.exposure import Stretch
from autoshard.solver.reduce.colour_refinement import refine
from autoshard.solver.reduce.columns import Columns

_ROUNDS = 1
"""How many edges away decisions are told apart: enough to tell what runs forward from what is recomputed. With more,
layers at the ends of a long chain have no copies."""

_BASE = 0x9E3779B97F4A7C15
"""Of the hash, odd, so that it has an inverse modulo 2^64."""


class StretchCopies:
    """Finds the copies of stretches, by a rolling hash (Karp and Rabin, 1987) over the kinds of operations."""

    def __init__(self, kinds: np.ndarray) -> None:
        """Takes the kind of each operation; int64 [operations], >= 0."""
        count = len(kinds)
        values = np.random.default_rng(0).integers(1, 2**63, int(kinds.max(initial=0)) + 1, np.uint64)
        powers = np.full(count + 1, _BASE, np.uint64)
        powers[0] = 1
        powers = np.multiply.accumulate(powers)
        inverse = np.full(count + 1, pow(_BASE, -1, 2**64), np.uint64)
        inverse[0] = 1
        self._inverse = np.multiply.accumulate(inverse)
        self._sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values[kinds] * powers[:-1], dtype=np.uint64)])
        self._known: dict[Stretch, tuple[Stretch, ...]] = {}

    def of(self, stretch: Stretch) -> tuple[Stretch, ...]:
        """All copies of a stretch, itself among them, ascending; one object for all of them."""
        if stretch not in self._known:
            start, stop = stretch
            length = stop - start
            begins = slice(len(self._sums) - length)
            hashes = (self._sums[length:] - self._sums[begins]) * self._inverse[begins]
            starts = np.flatnonzero(hashes == hashes[start]).tolist()
            copies = tuple((first, first + length) for first in starts)
            self._known.update(dict.fromkeys(copies, copies))
        return self._known[stretch]


def operation_kinds(columns: Columns, decision_of: np.ndarray, own_kind: np.ndarray) -> np.ndarray:
    """Numbers operations so that those with equal numbers are alike; int64 [operations].

    Args:
      columns: Of a problem whose prices are the same in all layers.
      decision_of: int64 [operations]; the decision that each is part of, or -1.
      own_kind: int64 [operations], >= 0; what each is by itself.
    """
    classes = refine(columns, (), _ROUNDS).node_class
    of_decision = np.where(decision_of >= 0, classes[decision_of], -1) + 1
    pairs = of_decision * (int(own_kind.max(initial=0)) + 1) + own_kind
    return np.unique(pairs, return_inverse=True)[1]

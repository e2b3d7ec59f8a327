"""What a search has done is counted, so that limits of it are the same on every machine."""

import numpy as np

from autoshard.plans.effort import Effort
from autoshard.solver.problem import Node, Problem


def problem(*sizes):
    return Problem(tuple(Node(f"n{k}", np.zeros(size)) for k, size in enumerate(sizes)), (), (), (), None)


def test_a_limit_is_a_share_of_what_was_done_before():
    effort = Effort()
    assert effort.limit(0.5)(), "nothing is half of nothing"
    effort.count(problem(3, 5))  # 2 x 20 + 8 = 48
    within = effort.limit(2.0)  # up to 3 x 48 = 144
    effort.count(problem(3, 5))  # 96
    assert not within()
    effort.count(problem(27))  # 20 + 27: 143
    assert not within()
    effort.count(problem(1))
    assert within()

"""Integer programs given as matrices: the least of all that is integral, and nothing on the terminal."""

import itertools
import sys

import numpy as np
import pytest
from scipy.sparse import csr_array

from autoshard.solver.exact.integer_program import least_integral
from autoshard.solver.exact.linear_program import LinearProgram

LIMITS = {"node_limit": 500, "time_limit_s": 30.0}


def shared_out(seed, kinds, options, rows, count, unit):
    """A program of the form of `plans/master_program.py`: `count` parts of each kind take options, whatever they wait
    for in some stretches is made up for."""
    rng = np.random.default_rng(seed)
    num_options = kinds * options
    cost = np.concatenate([[0.0], rng.random(num_options) * unit, np.ones(rows)])
    slack = -rng.random((rows, 1)) * count * kinds * unit * 0.5
    waits = rng.random((rows, num_options)) * unit * (rng.random((rows, num_options)) < 0.6)
    equal = np.zeros((1 + kinds, len(cost)))
    equal[0, 0] = 1
    for kind in range(kinds):
        equal[1 + kind, 0] = -count
        equal[1 + kind, 1 + kind * options : 1 + (kind + 1) * options] = 1
    is_integer = np.arange(len(cost)) <= num_options
    sums = np.concatenate([[1.0], np.zeros(kinds)])
    at_most = np.concatenate([slack, waits, -np.tri(rows)], axis=1)
    return LinearProgram(cost, csr_array(at_most), np.zeros(rows), csr_array(equal), sums), is_integer


@pytest.mark.parametrize("seed", range(6))
def test_nothing_integral_costs_less(seed):
    kinds, options, count = 2, 3, 2
    program, is_integer = shared_out(seed, kinds, options, 3, count, 1.0)
    cost, rows, limits, equal, sums = program.cost, program.rows, program.limits, program.equal, program.sums
    found = least_integral(program, is_integer, relative_gap=0.0, **LIMITS)
    assert found is not None
    assert np.allclose(found[is_integer], np.round(found[is_integer]))
    assert (rows @ found <= limits + 1e-6).all() and np.allclose(equal @ found, sums) and (found >= -1e-9).all()
    ways = [way for way in itertools.product(range(count + 1), repeat=options) if sum(way) == count]
    least = np.inf
    for own in itertools.product(ways, repeat=kinds):
        taken = np.array([1, *itertools.chain(*own)], float)
        lacks = np.maximum.accumulate(np.maximum(rows.toarray()[:, : len(taken)] @ taken, 0.0))
        least = min(least, cost[: len(taken)] @ taken + lacks[-1])
    assert cost @ found == pytest.approx(least, abs=1e-6)


def test_where_there_is_none_there_is_none():
    one = csr_array(np.ones((1, 2)))
    bounded = LinearProgram(np.ones(2), one, np.array([0.5]), one, np.array([1.0]))
    assert least_integral(bounded, np.ones(2, bool), relative_gap=0.0, **LIMITS) is None


def test_nothing_is_printed(capfd):
    """HiGHS 1.12 prints the name of one of its functions at the first of these, though it is told to be silent."""
    for program in (shared_out(58, 20, 5, 6, 7, 1e-3), shared_out(0, 40, 4, 12, 24, 1e-2)):
        assert least_integral(*program, relative_gap=1.5e-3, **LIMITS) is not None
    sys.stdout.flush()
    assert capfd.readouterr() == ("", "")

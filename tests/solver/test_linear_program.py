"""Linear programs given as matrices: the least of all, what limits are worth, and the same by either solver."""

import dataclasses

import numpy as np
import pytest
from scipy.sparse import csr_array

from autoshard.solver.exact import linear_program
from autoshard.solver.exact.linear_program import LinearProgram, least_linear


def a_program(seed, kinds=4, options=5, num_rows=3):
    """Parts of each kind share out 1 among options, whose usage is limited."""
    rng = np.random.default_rng(seed)
    count = kinds * options
    rows = csr_array(rng.random((num_rows, count)))
    equal = csr_array(np.kron(np.eye(kinds), np.ones(options)))
    limits = np.full(num_rows, 0.4 * kinds)
    program = LinearProgram(rng.random(count), rows, limits, equal, np.ones(kinds))
    return program, np.zeros(count), np.full(count, np.inf)


@pytest.mark.parametrize("seed", range(5))
def test_multipliers_prove_that_nothing_is_less(seed):
    """Weak duality: at the multipliers' prices the cheapest option of each kind costs as much as what was found."""
    program, least, most = a_program(seed)
    cost, rows, limits, equal, sums = program.cost, program.rows, program.limits, program.equal, program.sums
    found = least_linear(program, least, most)
    assert found is not None
    x, prices = found.variables, found.multipliers
    assert (rows @ x <= limits + 1e-7).all() and np.allclose(equal @ x, sums) and (x >= -1e-9).all()
    assert cost @ x == pytest.approx(found.value)
    assert (prices >= -1e-9).all()
    priced = (cost + prices @ rows).reshape(len(sums), -1)
    assert priced.min(axis=1).sum() - prices @ limits == pytest.approx(found.value, rel=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_the_other_solver_finds_the_same(seed):
    program = a_program(seed)
    one, other = least_linear(*program), linear_program._by_highs(*program)
    assert one is not None and other is not None
    assert one.value == pytest.approx(other.value, rel=1e-7)
    assert one.multipliers == pytest.approx(other.multipliers, abs=1e-6)


def test_variables_stay_between_their_limits():
    program, least, most = a_program(0)
    free = least_linear(program, least, most)
    assert free is not None
    used = int(np.argmax(free.variables))
    most[used] = free.variables[used] - 0.2
    found = least_linear(program, least, most)
    assert found is not None and found.value > free.value
    assert found.variables[used] == pytest.approx(most[used])


def test_where_there_is_none_there_is_none():
    program, least, most = a_program(0)
    assert least_linear(dataclasses.replace(program, limits=np.zeros(3)), least, most) is None

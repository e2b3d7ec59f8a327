"""Budgets hold for what is reserved, gaps included, and the proof stays that of all plans whose peak fits."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.baselines import data_parallel
from autoshard.plans import gaps
from autoshard.plans.gaps import NEGLIGIBLE_BYTES
from autoshard.solver.problem import Certificate, Problem, Solution, Status

WIDTHS = (64, 4096, 3072, 3072, 4096, 16)
"""Of layers. Values of 4, 3, 3 and 4 units: never more than 7 are alive, and no order of packing needs less than 10."""
EXAMPLES = 2**15


def forward(x, *weights):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


@pytest.fixture(scope="module")
def args():
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return f32(EXAMPLES, WIDTHS[0]), *(f32(a, b) for a, b in zip(WIDTHS, WIDTHS[1:], strict=False))


def test_a_plan_that_fits_only_without_its_gaps_is_made_smaller(args, cluster):
    make = lambda budget: autoshard.plan(
        forward, *args, cluster=cluster, mesh={"data": 2, "tensor": 4}, memory_budget_bytes=budget
    )
    free = make(math.inf)
    budget = free.estimate.peak_bytes + NEGLIGIBLE_BYTES
    assert free.estimate.reserved_bytes > budget + NEGLIGIBLE_BYTES
    limited = make(budget)
    assert limited.estimate.reserved_bytes <= budget + NEGLIGIBLE_BYTES and not limited.warnings
    assert limited.certificate.objective == pytest.approx(limited.estimate.step_s)
    assert limited.estimate.step_s > free.estimate.step_s
    assert limited.certificate.bound <= free.certificate.objective
    assert limited.budget_bytes == budget


def test_gaps_that_stay_are_told(args, cluster):
    """Data parallelism has nothing to choose."""
    make = lambda budget: data_parallel(
        forward, *args, cluster=cluster, mesh={"data": 8}, memory_budget_bytes=budget, batch_argnums=0
    )
    free = make(math.inf)
    tight = make(free.estimate.peak_bytes)
    assert tight.estimate == free.estimate and not free.warnings
    assert f"needs {free.estimate.reserved_bytes / 1e9:.4g} GB" in tight.warnings[0]


@dataclasses.dataclass(frozen=True)
class Posed:
    """A formulation as far as gaps are concerned."""

    problem: Problem


def test_twice_the_excess_is_taken_off_where_gaps_grew_meanwhile(monkeypatch):
    """Of 100 MB: 110 are reserved, so 90 may be alive; 104 are reserved still, so 90 - 2 x 4 may; then 99 are."""
    megabytes = iter([(110, 100), (104, 91), (99, 82)])  # reserved, alive at once
    evaluated = lambda reserved, alive: types.SimpleNamespace(reserved_bytes=1e6 * reserved, peak=(1e6 * alive, 0))
    monkeypatch.setattr(gaps, "evaluate", lambda formulation, choices: evaluated(*next(megabytes)))
    limits = []

    def solve(formulation, choices):
        limits.append(formulation.problem.capacity / 1e6)
        return Solution((len(limits),), Certificate(Status.FEASIBLE, 1.0 + len(limits), 1.0, 0.5, 0.0))

    first = Solution((0,), Certificate(Status.OPTIMAL, 1.0, 1.0, 0.0, 0.0))
    found, fits, _ = gaps.with_gaps(Posed(Problem((), (), capacity=1e8)), first, 1e-3, solve)
    assert limits == [90.0, 82.0] and fits
    assert found.choices == (2,) and found.certificate.objective == 3.0 and found.certificate.bound == 1.0

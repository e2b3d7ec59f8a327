"""Budgets hold for what is reserved, gaps included, and the proof stays that of all plans whose peak fits."""

import math

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.baselines import data_parallel
from autoshard.plans.gaps import NEGLIGIBLE_BYTES

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

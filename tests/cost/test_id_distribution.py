"""Expected distinct ids and loads of owners, beside simulation and values derived by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cost.id_distribution import IdDistribution, fitted


def draw(rng: np.random.Generator, exponent: float, num_rows: int, shape: tuple[int, ...], *, is_ranked: bool):
    """Ids drawn one by one from exact probabilities."""
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
    ranks = np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(shape)).clip(0, num_rows - 1)
    return ranks if is_ranked else rng.permutation(num_rows)[ranks]


def test_two_ids_of_two_rows():
    """Two look-ups of two rows alike: one row or two, each half of the time."""
    assert IdDistribution().expected_distinct(2, 2) == pytest.approx(1.5)


def test_zipf_of_three_rows_by_hand():
    """Weights 1, 1/2, 1/3: shares 6/11, 3/11, 2/11; three look-ups."""
    shares = (6 / 11, 3 / 11, 2 / 11)
    known = sum(1 - (1 - p) ** 3 for p in shares)
    assert IdDistribution(1.0).expected_distinct(3, 3) == pytest.approx(known)
    assert IdDistribution(1.0).hottest_share(1, 3) == pytest.approx(6 / 11)
    assert IdDistribution(1.0, is_ranked=True).busiest_owner(3, 3, 3) == pytest.approx(1 - (5 / 11) ** 3)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.2])
@pytest.mark.parametrize("num_rows", [900, 70_000])
def test_blocks_of_ranks_sum_as_all_ranks_do(exponent, num_rows):
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
    p = weights / weights.sum()
    own = IdDistribution(exponent)
    for num_ids in (10, 5000, 400_000):
        assert own.expected_distinct(num_ids, num_rows) == pytest.approx((1 - (1 - p) ** num_ids).sum(), rel=2e-4)
    assert own.hottest_share(num_rows // 7, num_rows) == pytest.approx(p[: num_rows // 7].sum(), rel=2e-3)


@pytest.mark.parametrize("is_ranked", [False, True])
@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.2])
@pytest.mark.parametrize("num_rows", [64, 4096, 50_000])
def test_loads_of_owners_are_as_simulated(is_ranked, exponent, num_rows):
    """The busiest owner in the mean within 5 %, and the largest load between what is seen and 1.6 times that."""
    rng, own, owners, num_ids, tries = np.random.default_rng(0), IdDistribution(exponent, is_ranked), 8, 2048, 24
    ids = draw(rng, exponent, num_rows, (tries, owners, num_ids), is_ranked=is_ranked)
    loads = np.zeros((tries, owners, owners))  # try, who asks, who owns
    for t in range(tries):
        for device in range(owners):
            loads[t, device] = np.bincount(np.unique(ids[t, device]) * owners // num_rows, minlength=owners)
    mean = loads[..., 0].mean() if is_ranked else loads.mean()
    assert own.busiest_owner(num_ids, num_rows, owners) == pytest.approx(mean, rel=0.05)
    largest = loads.max(axis=(1, 2)).mean()
    assert 0.97 * largest <= own.largest_load(num_ids, num_rows, owners) <= 1.6 * largest + 2


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 3), st.integers(1, 10**9), st.integers(1, 10**7), st.sampled_from([1, 2, 8, 64]), st.booleans())
def test_bounds(exponent, num_rows, num_ids, owners, is_ranked):
    own = IdDistribution(exponent, is_ranked)
    distinct = own.expected_distinct(num_ids, num_rows)
    assert 0 < distinct <= min(num_ids, num_rows) * (1 + 1e-6)
    assert distinct <= IdDistribution().expected_distinct(num_ids, num_rows) * (1 + 1e-3), "skew makes fewer"
    assert distinct / owners <= own.busiest_owner(num_ids, num_rows, owners) * (1 + 1e-2)
    assert own.largest_load(num_ids, num_rows, owners) <= min(num_ids, math.ceil(num_rows / owners))


@pytest.mark.parametrize(("exponent", "is_ranked"), [(0.0, False), (0.9, False), (1.1, True)])
def test_fitted_to_a_sample(exponent, is_ranked):
    ids = draw(np.random.default_rng(1), exponent, 20_000, (300_000,), is_ranked=is_ranked)
    found = fitted(ids.reshape(-1, 2), 20_000)
    assert found.zipf_exponent == pytest.approx(exponent, abs=0.08)
    assert found.is_ranked == is_ranked


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="at least 0; received -1"):
        IdDistribution(-1.0)
    with pytest.raises(ValueError, match="0 to 9; received 2 ids from 3 to 12"):
        fitted(np.array([3, 12]), 10)
    with pytest.raises(ValueError, match="received none"):
        fitted(np.array([]), 10)

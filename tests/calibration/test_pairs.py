"""Speeds of pairs: timed on live devices, and figures that follow from times."""

import itertools

import jax
import pytest

from autoshard.calibration.pairs import (
    LARGE_BYTES,
    SMALL_BYTES,
    are_alike,
    exchange,
    missing,
    name_of,
    pair_speeds,
    pairs_of,
)


def times_for(rates, latency_s):
    """Times of exchanges at given bandwidths."""
    return {name_of(pair, size): (latency_s + size / rates[pair],) * 3 for pair, size in pairs_of(4) if pair in rates}


def test_figures_follow_from_two_times():
    rates = {pair: 10e9 if sum(pair) % 2 else 50e9 for pair in itertools.combinations(range(4), 2)}
    found = pair_speeds(times_for(rates, 3e-6), 4, "2026-01-31")
    for (i, j), rate in rates.items():
        assert found.bandwidth_bytes_per_s[i][j] == pytest.approx(rate)
        assert found.latency_s[j][i] == pytest.approx(3e-6)
    assert "2026-01-31" in found.source
    assert not are_alike(found)


def test_pairs_that_differ_by_noise_are_alike():
    rates = {pair: 50e9 * (1 - 0.02 * k) for k, pair in enumerate(itertools.combinations(range(4), 2))}
    assert are_alike(pair_speeds(times_for(rates, 3e-6), 4, "2026-01-31"))


def test_what_was_timed_is_not_timed_again():
    every = list(missing({}, 4))
    assert len(every) == 2 * 6 and {size for *_, size in every} == {SMALL_BYTES, LARGE_BYTES}
    assert [name for name, *_ in missing({every[0][0]: (1.0,)}, 4)] == [name for name, *_ in every[1:]]


def test_two_live_devices_exchange():
    seconds = exchange(jax.devices(), (1, 3), SMALL_BYTES).seconds(1e-3, 2)
    assert len(seconds) == 2 and all(s >= 0 for s in seconds)

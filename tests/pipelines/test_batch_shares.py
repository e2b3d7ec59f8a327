"""Batch shares against brute force; Whale's Algorithm 1 by hand."""

import itertools

import numpy as np
import pytest

from autoshard.errors import StageError
from autoshard.pipelines.search.batch_shares import LinearTime, best_batch_shares
from autoshard.pipelines.search.whale import cut_by_shares, even_cut, whale_shares


def time_s(pipelines, shares):
    return max(row[s.time_model].time_s(s.num_micro_batches) for row, s in zip(pipelines, shares, strict=True))


def brute_force_s(batch_size, pipelines):
    ways = [
        [(p.micro_batch_size * m, p.time_s(m)) for p in row for m in range(batch_size // p.micro_batch_size + 1)]
        for row in pipelines
    ]
    fitting = (joint for joint in itertools.product(*ways) if sum(n for n, _ in joint) == batch_size)
    return min((max(t for _, t in joint) for joint in fitting), default=None)


def test_brute_force():
    rng = np.random.default_rng(0)
    num_impossible = 0
    for _ in range(150):
        batch_size = int(rng.integers(1, 14))
        pipelines = [
            [
                LinearTime(int(rng.integers(1, 4)), float(rng.integers(0, 4)), float(rng.integers(1, 6)))
                for _ in range(rng.integers(1, 3))
            ]
            for _ in range(rng.integers(1, 4))
        ]
        expected = brute_force_s(batch_size, pipelines)
        if expected is None:
            num_impossible += 1
            with pytest.raises(StageError, match=f"batch of {batch_size} examples"):
                best_batch_shares(batch_size, pipelines)
            continue
        shares = best_batch_shares(batch_size, pipelines)
        assert sum(s.num_examples for s in shares) == batch_size
        assert time_s(pipelines, shares) == expected
    assert num_impossible


def test_twice_as_fast_takes_twice_as_much():
    shares = best_batch_shares(96, [[LinearTime(4, 0.0, 1.0)], [LinearTime(4, 0.0, 2.0)]])
    assert [s.num_examples for s in shares] == [64, 32]


def test_a_pipeline_that_only_delays_is_left_out():
    shares = best_batch_shares(8, [[LinearTime(1, 0.0, 1.0)], [LinearTime(1, 100.0, 0.1)]])
    assert [s.num_examples for s in shares] == [8, 0]


def test_micro_batches_of_several_sizes_make_an_odd_batch():
    shares = best_batch_shares(
        7, [[LinearTime(3, 0.0, 1.0), LinearTime(4, 0.0, 1.0)], [LinearTime(3, 0.0, 1.0), LinearTime(4, 0.0, 1.0)]]
    )
    assert sorted(s.num_examples for s in shares) == [3, 4]


def test_many_pipelines_and_examples():
    pipelines = [[LinearTime(2, 1.0, 1.0)]] * 96 + [[LinearTime(2, 1.0, 2.0)]] * 64
    shares = best_batch_shares(1536, pipelines)  # 768 micro-batches: 96 n + 64 n / 2 >= 768 from n = 6
    assert time_s(pipelines, shares) == 7.0


def test_whale_shares_by_speed_where_all_fits():
    assert whale_shares([2.0, 1.0, 1.0], [9.0, 9.0, 9.0], 1.0, 1.0) == (0.5, 0.25, 0.25)


def test_whale_moves_what_does_not_fit_to_the_least_busy_that_has_room():
    """Shares 0.5, 0.25, 0.25 of 8 GB need 4, 2, 2. The first holds 2: it gives 0.25. All are equally busy by speed, and
    the third is emptier by memory (2 of 10 against 2 of 4).
    """
    assert whale_shares([2.0, 1.0, 1.0], [2.0, 4.0, 10.0], 1.0, 8.0) == pytest.approx((0.25, 0.25, 0.5))


def test_whale_gives_up_when_nobody_has_room():
    shares = whale_shares([1.0, 1.0], [1.0, 5.0], 1.0, 8.0)
    assert shares == pytest.approx((3 / 8, 5 / 8))
    assert shares[0] * 8 > 1.0


def test_splittings_without_search():
    assert even_cut(7, 3) == (0, 3, 5, 7)
    assert cut_by_shares([1.0] * 6, [0.5, 1 / 3, 1 / 6]) == (0, 3, 5, 6)
    assert cut_by_shares([100.0, 1.0, 1.0], [0.4, 0.3, 0.3]) == (0, 1, 2, 3)

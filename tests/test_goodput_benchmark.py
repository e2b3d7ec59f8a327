"""benchmarks/goodput.py: simulations agree with what renewal theory gives in closed form."""

import math
import pathlib
import statistics
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))

import goodput
from goodput import DAY_S, DAYS, LLAMA3, Cause, Job, Policy, daly, failed_jobs, simulate

RATE = 1000 / (DAYS * DAY_S)
"""One failure in 78 min."""


def policy(**changes):
    plain = {
        "name": "",
        "detection_s": 0.0,
        "stall_s": 0.0,
        "silent_s": 0.0,
        "restart_s": 0.0,
        "read_memory_s": 0.0,
        "read_disk_s": 0.0,
        "memory_every_s": 0.0,
        "disk_every_s": 1e-3,
        "in_memory": 0.0,
        "repeat": 0.0,
    }
    return Policy(**plain | changes)


def effective(one, shows="crash"):
    """Over 200,000 failures, which leaves about 0.3 % of chance."""
    return statistics.fmean(simulate(one, [Cause("", 1000, shows)], 100 * DAYS, seed).productive for seed in (0, 1))


def test_table_5_adds_up():
    assert sum(cause.count for cause in LLAMA3 if cause.shows != "planned") == 419
    assert sum(cause.count for cause in LLAMA3) == 466


@pytest.mark.parametrize(("restart_s", "every_s"), [(60, 1800), (600, 600), (2000, 7200)])
def test_whole_job_restart_is_as_daly_says(restart_s, every_s):
    found = effective(policy(restart_s=restart_s, disk_every_s=every_s))
    assert found == pytest.approx(daly(RATE, restart_s, every_s), rel=0.01)


def test_daly_is_young_at_first_order():
    """With rare failures a checkpoint interval loses its half: 1 - rate (restart + every / 2)."""
    assert daly(1e-7, 100, 1000) == pytest.approx(1 - 1e-7 * (100 + 500), abs=1e-7)


def test_the_memory_tier_is_daly_with_its_own_interval():
    found = effective(policy(restart_s=300, memory_every_s=60.0, disk_every_s=7200, in_memory=1.0))
    assert found == pytest.approx(daly(RATE, 300, 60), rel=0.01)


def test_a_drained_job_loses_only_its_restart():
    """Steps take 1 / rate until a failure, a restart of R (exp(rate R) - 1) / rate: the share is exp(-rate R)."""
    found = effective(policy(restart_s=900, disk_every_s=1e6), "planned")
    assert found == pytest.approx(math.exp(-RATE * 900), rel=0.01)


def test_a_stall_adds_the_time_until_it_is_noticed():
    """1 / rate of steps, 600 s of stall, then the restart."""
    found = effective(policy(restart_s=900, stall_s=600), "stall")
    assert found == pytest.approx(1 / (math.exp(RATE * 900) + RATE * 600), rel=0.01)


def test_restarts_that_fail_again_are_geometric():
    """With a quarter failing again there are 4 / 3 restarts for each failure."""
    found = effective(policy(restart_s=900, repeat=0.25))
    assert found == pytest.approx(1 / (1 + math.expm1(RATE * 900) * 4 / 3), rel=0.01)


def test_wrong_values_lose_the_time_until_they_are_noticed():
    """As long as failures are rare, each loses what was done since, and half an interval."""
    rare = Cause("", 10, "silent")  # one in 5.4 days
    found = simulate(policy(silent_s=3600, disk_every_s=1800), [rare], 1000 * DAYS, 0)
    assert found.redone == pytest.approx(10 / (DAYS * DAY_S) * (3600 + 900), rel=0.03)


def test_the_parts_are_the_whole():
    found = simulate(policy(restart_s=100, stall_s=50, disk_every_s=600, repeat=0.1), LLAMA3, DAYS, 3)
    assert found.productive + found.redone + found.noticing + found.restarting == pytest.approx(1)


def test_jobs_that_fail():
    """64 GPUs meet x = 64 x 10 x 419 / (16,384 x 54) failures in 10 days, none with probability exp(-x)."""
    met = 64 * 10 * 419 / (16_384 * 54)
    found = failed_jobs([Job(64, 10.0)] * 100_000, own_errors=0.2, seed=0)
    none = lambda share: 1 - 0.8 * math.exp(-met * share)
    bug = 54 / 419
    assert found.alone == pytest.approx(none(1), abs=0.005)
    assert found.elastic == pytest.approx(none(bug), abs=0.005)
    assert found.replaced == pytest.approx(none(1 - (1 - bug) * (1 - goodput.NO_SPARE)), abs=0.005)


def test_the_page_tells_every_constant_with_its_source():
    text, figures = goodput.report(goodput.PROTOTYPE, goodput.Scale(), 2, "command")
    for name in figures["scale"]:
        assert f"| {name} |" in text
    best, worst = figures["policies"][-1], figures["policies"][0]
    assert best["productive"] > worst["productive"] + 0.05

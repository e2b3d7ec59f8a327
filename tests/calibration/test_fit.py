"""Fits: parameters that made the times come out again, also where times are disturbed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.calibration.fit import (
    collective_figures,
    hidden_share,
    inner_rate,
    line,
    narrow_curve,
    product_curve,
    rate_curve,
    separate_share,
    transposed_curve,
)
from autoshard.cluster import AxisLevel, CollectiveKind, Curve, Link, MeshAxis
from autoshard.cost import collectives

SIZES = [4096.0 * 4**k for k in range(6)]
PRICES = {
    CollectiveKind.ALL_GATHER: collectives.all_gather,
    CollectiveKind.REDUCE_SCATTER: collectives.reduce_scatter,
    CollectiveKind.ALL_REDUCE: collectives.all_reduce,
    CollectiveKind.ALL_TO_ALL: collectives.all_to_all,
    CollectiveKind.PERMUTE: collectives.permute,
}


@given(st.floats(1e-5, 1e-3), st.floats(1e-10, 1e-8), st.integers(2, 3))
def test_a_line_is_found_although_one_time_is_disturbed(fixed_s, s_per_byte, disturbed):
    times = [fixed_s + s_per_byte * x for x in SIZES]
    times[disturbed] *= 3
    assert line(SIZES, times) == pytest.approx((fixed_s, s_per_byte), rel=1e-6)


def test_a_line_never_falls_or_starts_below_zero():
    a, b = line([1.0, 2.0, 4.0], [4.0, 2.0, 1.0])
    assert a >= 0 and b > 0


@pytest.mark.parametrize("kind", CollectiveKind)
@pytest.mark.parametrize("size", [2, 8])
def test_the_cost_model_gives_the_times_that_were_measured(kind, size):
    """Whatever is measured of a kind is what its price then is, less the launch, which prices add themselves."""
    launch_s, noise = 3e-6, np.random.default_rng(0).normal(1, 0.02, len(SIZES))
    times = {b: (50e-6 + b * 4e-10) * float(f) for b, f in zip(SIZES, noise, strict=True)}
    link = Link(1.0, 1.0, 0, "test", (collective_figures(kind, size, times, launch_s),))
    axis = MeshAxis("a", size, (AxisLevel(size, link),))
    for size_bytes in SIZES:
        assert PRICES[kind]([axis], size_bytes).time_s + launch_s == pytest.approx(50e-6 + 4e-10 * size_bytes, rel=0.06)
    # two axes of one link are the one group that was measured
    if size == 8 and kind is not CollectiveKind.ALL_TO_ALL:
        parts = [MeshAxis("x", 2, (AxisLevel(2, link),)), MeshAxis("y", 4, (AxisLevel(4, link),))]
        assert PRICES[kind](parts, 1e6).time_s == pytest.approx(PRICES[kind]([axis], 1e6).time_s)


def test_rates_of_products_are_found():
    """A device of 1e10 flop/s for products of at most 1e6 flops and of 4e10 for larger, half of it where n is 8."""
    launch_s, wide = 2e-6, 256
    rate = lambda flops: 1e10 if flops <= 1e6 else 4e10
    share = lambda n: 0.5 if n < 16 else 1.0
    seconds = lambda m, k, n: launch_s + 2 * m * k * n / rate(2 * m * k * n) / share(min(m, k, n))
    shapes = [(wide, wide, wide), *((n, wide, wide) for n in (8, 32)), *((wide, n, wide) for n in (8, 32))]
    narrow = narrow_curve({shape: seconds(*shape) for shape in shapes}, wide, launch_s)
    assert dict(narrow.points) == pytest.approx({8: 0.5, 32: 1.0})
    curve = product_curve({n: seconds(n, n, n) for n in (64, 128, 256)}, narrow, launch_s)
    assert [r for _, r in curve.points] == pytest.approx([1e10, 4e10, 4e10])
    assert curve.at(1) == pytest.approx(1e10) and curve.at(1e12) == pytest.approx(4e10)


def test_what_memory_takes_is_no_narrowness():
    """Products that take as long as their bytes tell nothing; others half as fast as wide ones tell a half."""
    wide, rate = 256, 1e10
    moving_s = lambda shape: 1.0 if min(shape) == 8 else 1e-6
    narrow_s = {8: 1.4, 32: 2 * 2 * 32 * wide * wide / rate}  # 8: less than 1.5 times what moving takes
    seconds = {shape: narrow_s[n] for n in (8, 32) for shape in ((n, wide, wide), (wide, n, wide), (wide, wide, n))}
    seconds[wide, wide, wide] = 2 * wide**3 / rate
    curve = narrow_curve(seconds, wide, 0.0, moving_s)
    assert dict(curve.points) == pytest.approx({32: 0.5, wide: 1.0}) and curve.at(8) == pytest.approx(0.5)
    assert min(n for n, _ in narrow_curve(seconds, wide, 0.0).points) == 8
    assert narrow_curve(seconds, wide, 0.0, lambda _: 10.0).points == ((wide, 1.0),)


def test_larger_work_never_takes_less_time():
    curve = rate_curve({1e3: 5e-6, 1e4: 4e-6, 1e5: 50e-6}, launch_s=0.0)
    times = [size / curve.at(size) for size in (1e3, 3e3, 1e4, 3e4, 1e5, 1e6)]
    assert times == sorted(times) and times[0] == pytest.approx(4e-6)


def test_between_points_a_curve_is_a_power_law():
    curve = Curve(((1e2, 1.0), (1e4, 100.0)))
    assert curve.at(1e3) == pytest.approx(10.0)
    assert (curve.at(1.0), curve.at(1e9)) == (1.0, 100.0)


@pytest.mark.parametrize("rate", [1e9, 4e8])
def test_what_putting_pieces_in_order_takes_is_found_and_priced(rate):
    plain = {b: 20e-6 + b / 5e9 for b in SIZES}
    inner = {b: t + b / rate for b, t in plain.items() if b > 1e5}
    found = inner_rate(plain, inner)
    assert found == pytest.approx(rate)
    assert inner_rate(plain, {b: 1.01 * plain[b] for b in inner}) is None  # noise
    own = collective_figures(CollectiveKind.ALL_GATHER, 8, plain, 0.0, inner_bytes_per_s=found)
    axis = MeshAxis("a", 8, (AxisLevel(8, Link(1.0, 1.0, 0, "test", (own,))),))
    for b, seconds in inner.items():
        assert collectives.all_gather([axis], b, is_inner=True).time_s == pytest.approx(seconds)
        assert collectives.all_gather([axis], b).time_s == pytest.approx(plain[b])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_shares_are_found(share):
    assert hidden_share(3.0, 2.0, 3.0 + (1 - share) * 2.0) == pytest.approx(share)
    assert separate_share(10.0, 10.0 * (1 + 7 * share), 8) == pytest.approx(share)


def test_shares_are_shares():
    assert (hidden_share(1.0, 1.0, 5.0), hidden_share(1.0, 1.0, 0.5)) == (0.0, 1.0)
    assert (separate_share(1.0, 99.0, 8), separate_share(1.0, 0.5, 8)) == (1.0, 0.0)


def test_transposing_is_what_copies_take_longer_by():
    copied = {1e6: 1e-3, 4e6: 4e-3}
    curve = transposed_curve(copied, {4e6: 8e-3, 1e6: 1.5e-3})  # 1 MB in 0.5 ms, 4 MB in 4 ms
    assert [n for point in curve.points for n in point] == pytest.approx([1e6, 2e9, 4e6, 1e9])
    assert transposed_curve(copied, {1e6: 1.5e-3, 4e6: 4.1e-3}) is None  # noise at one of the sizes
    assert transposed_curve({}, {}) is None

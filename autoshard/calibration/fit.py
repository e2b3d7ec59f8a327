"""From times to figures. Pure functions of numbers; each docstring has the mathematics of its fit.

Times are of one operation on one device while all devices run it. L is the launch overhead, the time of a kernel that
has hardly any work.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autoshard.cluster import CollectiveKind, Curve, MeasuredCollective

LEAST_SHARE = 0.1
"""Of a kernel's time, the least that counts as work: where nearly all is launch, the difference is noise."""


MEMORY_BOUND = 1.5
"""How much longer than its bytes alone a product takes at least that waits for its arithmetic: a choice. Products
of 4 to 128 x 8,192 x 8,192 in TensorFloat-32 took 0.8 to 1.25 times as long on an H100 (2026-11-26)."""


def work_s(seconds: float, launch_s: float) -> float:
    """The part of a kernel's time that is not launch: t - L, but at least `LEAST_SHARE` of t."""
    return max(seconds - launch_s, LEAST_SHARE * seconds)


def rate_curve(seconds: Mapping[float, float], launch_s: float) -> Curve:
    """Rates by size: size / (t - L) at each size (operations, or bytes moved) that was measured.

    Between the points the rate is linear in log-log coordinates (`Curve`), so that time, the size over the rate, is a
    power law there. A time may not fall where the size grows: noise that says so is levelled by giving the smaller size
    the time of the larger.
    """
    least_s, points = math.inf, []
    for size, measured_s in sorted(seconds.items(), reverse=True):
        least_s = min(least_s, work_s(measured_s, launch_s))
        points.append((float(size), size / least_s))
    return Curve(tuple(reversed(points)))


def narrow_curve(
    seconds: Mapping[tuple[int, ...], float],
    wide: int,
    launch_s: float,
    moving_s: Callable[[tuple[int, ...]], float] = lambda _: 0.0,
) -> Curve:
    """What is left of the rate of products by their least dimension.

    For each n below `wide`, products of n x wide x wide in all three positions of n, whose rates are r1, r2, r3; of the
    product of wide x wide x wide, r. The share is (r1 r2 r3)^(1/3) / r, made to rise with n (running maximum) and at
    most 1; it is 1 from `wide` on, or from the first n at which it reaches 1. A product that takes less than
    `MEMORY_BOUND` times as long as memory takes to move its matrices tells nothing of arithmetic, and does not count:
    of an H100 that holds for all up to n = 128, whose intensity of n / 2 flops a byte is below the ridge of its
    roofline.

    Args:
      seconds: Time of each product by its dimensions (rows, summed, columns).
      moving_s: What memory takes for one of these dimensions; nothing where caches hold the matrices.
    """
    rate = lambda shape: 2 * math.prod(shape) / work_s(seconds[shape], launch_s)
    whole = rate((wide, wide, wide))
    least: dict[int, list[float]] = {}
    for shape in seconds:
        is_narrow = shape != (wide, wide, wide) and sorted(shape)[1:] == [wide, wide]
        if is_narrow and work_s(seconds[shape], launch_s) >= MEMORY_BOUND * moving_s(shape):
            least.setdefault(min(shape), []).append(rate(shape))
    points, highest = [], 0.0
    for n, rates in sorted(least.items()):
        highest = max(highest, min(1.0, float(np.exp(np.mean(np.log(rates)))) / whole))
        points.append((float(n), highest))
        if highest == 1.0:
            return Curve(tuple(points))
    return Curve((*points, (float(wide), 1.0)))


def product_curve(seconds: Mapping[int, float], narrow: Curve, launch_s: float) -> Curve:
    """Rates of products by flops, from square ones: those measured are of the size 2 n^3 and of the least dimension n.

    The rate of a product is modelled as rate(flops) x share(least dimension), so the point at 2 n^3 is the measured
    rate over share(n).

    Args:
      seconds: Time of the product of n x n x n, by n.
    """
    curve = rate_curve({2.0 * n**3: t for n, t in seconds.items()}, launch_s)
    return Curve(tuple((flops, rate / narrow.at(round((flops / 2) ** (1 / 3)))) for flops, rate in curve.points))


def line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """The line a + b x through times, with a >= 0 and b > 0, that minimises sum_i |a + b x_i - t_i| / t_i.

    Relative errors, so that small sizes count like large ones; absolute values, so that a single disturbed time hardly
    moves it. A line of least absolute deviations goes through two of the points, or through one where a bound holds
    with equality (Bloomfield, Steiger, *Least Absolute Deviations*, 1983): all of them are tried.

    Returns:
      a (s) and b (s per unit of size).
    """
    x, t = np.asarray(sizes, float), np.asarray(seconds, float)
    tried = [(0.0, ti / xi) for xi, ti in zip(x, t, strict=True)]
    for i, j in itertools.combinations(range(len(x)), 2):
        slope = (t[j] - t[i]) / (x[j] - x[i])
        if slope > 0 and t[i] - slope * x[i] >= 0:
            tried.append((float(t[i] - slope * x[i]), float(slope)))
    return min(tried, key=lambda ab: float(np.sum(np.abs(ab[0] + ab[1] * x - t) / t)))


def hidden_share(arithmetic_s: float, memory_s: float, both_s: float) -> float:
    """Which share of the lesser of two times hides behind the greater where a kernel does both.

    With the share h, both take T = max(a, m) + (1 - h) min(a, m): h = (a + m - T) / min(a, m), within [0, 1].
    """
    return min(max((arithmetic_s + memory_s - both_s) / min(arithmetic_s, memory_s), 0.0), 1.0)


def separate_share(one_s: float, many_s: float, count: int) -> float:
    """Which share of a collective's fixed time each of `count` independent ones pays by itself.

    With the share f, many take T = t (1 + (count - 1) f) where one takes t: f = (T / t - 1) / (count - 1), within
    [0, 1].
    """
    return min(max((many_s / one_s - 1) / (count - 1), 0.0), 1.0)


def transposed_curve(copied: Mapping[float, float], transposed: Mapping[float, float]) -> Curve | None:
    """Bytes per second at which arrays are put into another order of dimensions, on top of copying them, by their size.

    Of size B it is B / (t - c), with t the time of a transposed copy and c that of a plain one; None where t is not
    more than `LEAST_SHARE` above c at every size: that is noise, and the device transposes on the way.
    """
    points = [(b, b / (t - copied[b])) for b, t in sorted(transposed.items()) if t > (1 + LEAST_SHARE) * copied[b]]
    return Curve(tuple(points)) if points and len(points) == len(transposed) else None


def inner_rate(seconds: Mapping[float, float], inner: Mapping[float, float]) -> float | None:
    """Bytes per second at which pieces along an inner dimension are put in order.

    The time t of a collective on B bytes along the second dimension, less the line a + b B through the times of the
    same along the first, is what B bytes take: the rate is sum B / sum (t - a - b B) over all B. Where the latter sum
    is below `LEAST_SHARE` of that of the line, it is noise, and the compiler orders nothing.

    Args:
      seconds, inner: Times by bytes, along the first and the second dimension.

    Returns:
      The rate; None where ordering takes nothing.
    """
    fixed_s, s_per_byte = line(list(seconds), list(seconds.values()))
    plain_s = {size: fixed_s + s_per_byte * size for size in inner}
    ordering_s, all_plain_s = sum(inner.values()) - sum(plain_s.values()), sum(plain_s.values())
    return sum(inner) / ordering_s if ordering_s > LEAST_SHARE * all_plain_s else None


def collective_figures(
    kind: CollectiveKind,
    size: int,
    seconds: Mapping[float, float],
    launch_s: float,
    separate: float = 0.0,
    inner_bytes_per_s: float | None = None,
) -> MeasuredCollective:
    """Hop and bandwidth of the ring (`autoshard.cost.collectives`) that takes as long as was measured.

    Times by the bytes B of the larger side are fitted by the line a + b B. With n devices, the ring formula has

        all-gather, reduce-scatter, all-to-all    (n-1) hop + (n-1)/n B / bandwidth
        all-reduce                                twice that
        permute                                   hop + B / bandwidth

    plus a launch, so that hop = (a - L) / hops (at least 0) and bandwidth = share / b.
    """
    fixed_s, s_per_byte = line(list(seconds), list(seconds.values()))
    passes = 2 if kind is CollectiveKind.ALL_REDUCE else 1
    hops, share = (1, 1.0) if kind is CollectiveKind.PERMUTE else (passes * (size - 1), passes * (size - 1) / size)
    hop_s = max(fixed_s - launch_s, 0.0) / hops
    return MeasuredCollective(kind, size, hop_s, share / s_per_byte, separate, inner_bytes_per_s)

"""The schedule on two streams against derivations by hand, and against its formula by brute force."""

import collections
import itertools
import random

import pytest

from autoshard.cost.exposure import Hideable, exposure


def test_a_gather_hides_behind_the_kernels_before_its_reader():
    found = exposure([3.0, 2.0, 4.0], [Hideable(0, 0, 1.0), Hideable(0, 1, 2.0), Hideable(0, 2, 4.0)], 1.0)
    assert found.exposed_s == (1.0, 0.0, 1.0)  # the first has nothing before it; the last lacks 4 - (3 - 2 + 2)
    assert found.stretches == ((0, 2),)  # 1 + 2 + 4 to send beside 3 + 2


def test_the_last_reduction_is_exposed():
    found = exposure([2.0, 2.0, 2.0], [Hideable(1, 3, 1.0), Hideable(2, 3, 1.0), Hideable(3, 3, 1.5)], 1.0)
    assert found.exposed_s == (0.0, 0.0, 1.5)
    assert found.stretches == ((3, 3),)


def test_only_a_share_of_the_kernels_time_hides_collectives():
    found = exposure([4.0, 4.0], [Hideable(0, 2, 6.0)], 0.5)
    assert found.exposed_s == (2.0,) and found.stretches == ((0, 2),)


def test_nothing_waits_where_nothing_is_sent():
    assert exposure([1.0, 2.0], [], 1.0).total_s == 0.0
    assert exposure([], [Hideable(0, 0, 2.0)], 1.0).total_s == 2.0


def of_stretches(kernels_s, collectives, share, stretches):
    """The formula for disjoint stretches."""
    within = lambda c, i: i[0] <= c.start and c.stop <= i[1]
    sent_s = sum(c.time_s for c in collectives if any(within(c, i) for i in stretches))
    return sent_s - share * sum(sum(kernels_s[start:stop]) for start, stop in stretches)


def best_of_all(kernels_s, collectives, share):
    """The most that any disjoint stretches give, by trying all."""
    n = len(kernels_s)
    all_stretches = list(itertools.combinations_with_replacement(range(n + 1), 2))
    best = 0.0
    for number in range(1, n + 2):
        for chosen in itertools.combinations(all_stretches, number):
            if all(one[1] <= next_[0] and one != next_ for one, next_ in itertools.pairwise(chosen)):
                best = max(best, of_stretches(kernels_s, collectives, share, chosen))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_kernels_between_ends_are_as_one_and_collectives_with_one_window_too(seed):
    """So that the time of a step is known without looking at each kernel."""
    rng = random.Random(seed)
    n = rng.randint(2, 30)
    kernels_s = [float(rng.randint(0, 4)) for _ in range(n)]
    windows = [sorted((rng.randint(0, n), rng.randint(0, n))) for _ in range(rng.randint(1, 6))]
    collectives = [Hideable(*rng.choice(windows), float(rng.randint(1, 9))) for _ in range(rng.randint(1, 12))]
    found = exposure(kernels_s, collectives, 0.5)
    ends = sorted({e for c in collectives for e in (c.start, c.stop)})
    joined_s = [sum(kernels_s[one:other]) for one, other in itertools.pairwise([*ends, n])]
    sums_s: dict[tuple[int, int], float] = collections.defaultdict(float)
    for c in collectives:
        sums_s[c.start, c.stop] += c.time_s
    together = exposure(
        joined_s, [Hideable(ends.index(i), ends.index(k), time_s) for (i, k), time_s in sums_s.items()], 0.5
    )
    assert together.total_s == pytest.approx(found.total_s)
    ends.append(n)
    stretches = [(ends[i], ends[k]) for i, k in together.stretches]
    assert of_stretches(kernels_s, collectives, 0.5, stretches) == pytest.approx(found.total_s)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_exposed_is_the_formula(seed):
    rng = random.Random(seed)
    n = rng.randint(1, 4)
    kernels_s = [float(rng.randint(0, 4)) for _ in range(n)]
    collectives = []
    for _ in range(rng.randint(1, 6)):
        start = rng.randint(0, n)
        collectives.append(Hideable(start, rng.randint(start, n), float(rng.randint(1, 5))))
    share = rng.choice([1.0, 0.5])
    found = exposure(kernels_s, collectives, share)
    assert found.total_s == pytest.approx(best_of_all(kernels_s, collectives, share))
    assert of_stretches(kernels_s, collectives, share, found.stretches) == pytest.approx(found.total_s)
    assert all(0 <= e <= c.time_s for e, c in zip(found.exposed_s, collectives, strict=True))
    for c, (hideable, exposed_s) in enumerate(zip(collectives, found.exposed_s, strict=True)):
        own = [piece for piece in found.pieces if piece.collective == c]
        sent_s = sum(share * kernels_s[piece.kernel] * (piece.stop_share - piece.start_share) for piece in own)
        assert sent_s + exposed_s == pytest.approx(hideable.time_s), "what is not waited for runs beside kernels"
        assert all(hideable.start <= piece.kernel < hideable.stop for piece in own)
    for one, following in itertools.pairwise(found.pieces):
        assert (one.kernel, one.stop_share) <= (following.kernel, following.start_share + 1e-12), "one at a time"

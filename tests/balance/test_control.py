"""Shares against brute force over all of them, and the laws of what is done when."""

import dataclasses
import itertools
import random

import pytest

from autoshard.balance.control import Prices, as_it_is, decide, ideal_s, step_s
from autoshard.balance.options import Balance
from autoshard.balance.places import Placing, Room, even_placing, moved, room_for
from autoshard.balance.policy import Action, Disturbance, Part, Policy, act, along_axis
from autoshard.balance.units import UnitDimension


def dimension(size: int, ways: int) -> UnitDimension:
    return UnitDimension(0, "up", "tensor", ways, size, (), 1.0, 1.0, 1, ())


def placed(counts: tuple[int, ...]) -> Placing:
    numbers = iter(range(sum(counts)))
    return Placing(tuple(tuple(itertools.islice(numbers, n)) for n in counts), counts)


def brute_force(placing: Placing, slowness: tuple[float, ...], room: Room, prices: Prices) -> float:
    """The least cost over all counts, and all numbers left out."""
    now, size, ways = placing.counts, room.unit.size, room.unit.ways
    best = float("inf")
    most = int(prices.most_dropped * size / ways + 1e-9)
    for counts in itertools.product(range(room.capacity + 1), repeat=ways):
        if sum(counts) != size or (not prices.may_move and counts != now):
            continue
        moves = sum(max(0, n - b) for n, b in zip(counts, now, strict=True))
        for left_out in itertools.product(range(most + 1), repeat=ways):
            active = tuple(n - x for n, x in zip(counts, left_out, strict=True))
            receives = any(n > b and x for n, b, x in zip(counts, now, left_out, strict=True))
            if min(active) >= 0 and not receives:
                cost = step_s(active, slowness, room, prices)
                cost += moves * prices.move_s / prices.horizon + sum(left_out) * prices.drop_s
                best = min(best, cost)
    return best


@pytest.mark.parametrize("seed", range(60))
def test_the_decision_is_the_best_of_all(seed):
    rng = random.Random(seed)
    ways = rng.choice([2, 3, 3, 4])
    size = rng.randint(ways, 8 if ways < 4 else 7)
    capacity = rng.randint(-(-size // ways), size)
    inner = rng.sample(range(1, capacity), rng.randint(0, min(3, capacity - 1)))
    room = Room(dimension(size, ways), capacity, tuple(sorted({0, capacity, *inner})))
    counts = rng.choice([c for c in itertools.product(range(capacity + 1), repeat=ways) if sum(c) == size])
    slowness = tuple(rng.choice([1.0, 1.0, 1.3, 2.0, 8.0]) for _ in range(ways))
    prices = Prices(
        unit_s=1.0,
        fixed_s=rng.choice([0.0, 0.7]),
        move_s=rng.choice([0.0, 1.0, 20.0]),
        horizon=rng.choice([1.0, 10.0]),
        drop_s=rng.choice([0.0, 0.1, 1.5]),
        most_dropped=rng.choice([0.0, 0.5, 1.0]),
        may_move=rng.random() < 0.8,
    )
    found = decide(placed(counts), slowness, room, prices)
    assert found.cost_s == pytest.approx(brute_force(placed(counts), slowness, room, prices), rel=1e-9)
    assert sum(found.counts) == size and max(found.counts) <= capacity
    assert found.moved == sum(max(0, a - b) for a, b in zip(found.counts, counts, strict=True))
    assert found.step_s == step_s(found.active, slowness, room, prices)


def test_ideal_is_what_work_divided_at_will_takes():
    """8 units of 1 s; one of two devices 3 times slower: 6 and 2 units. With 8 s of its own on each, none can be given
    to the slow one, which ends at 24 s while the other takes 16."""
    room = room_for(dimension(8, 2), 3.0)
    assert ideal_s((1.0, 3.0), room, Prices(1.0)) == pytest.approx(6.0)
    assert ideal_s((1.0, 3.0), room, Prices(1.0, fixed_s=8.0)) == pytest.approx(24.0)
    assert ideal_s((1.0, 3.0), room, Prices(1.0, fixed_s=2.0)) == pytest.approx(9.0)


@pytest.mark.parametrize("seed", range(20))
def test_no_decision_beats_the_ideal(seed):
    rng = random.Random(seed)
    room = room_for(dimension(64, 4), 8.0)
    slowness = tuple(rng.uniform(1, 8) for _ in range(4))
    prices = Prices(1.0, fixed_s=rng.uniform(0, 20))
    found = decide(even_placing(room), slowness, room, prices)
    ideal = ideal_s(slowness, room, prices)
    assert found.step_s >= ideal * (1 - 1e-9)
    assert found.step_s <= as_it_is(even_placing(room), slowness, room, prices).step_s


@pytest.mark.parametrize("ways", [2, 4, 8])
@pytest.mark.parametrize("size", [8, 24, 96, 1000, 8192])
def test_chunks_of_a_loop_fill_an_even_share(size, ways):
    """Places are whole chunks, more than an even share, and at least what a device needs beside one that is s times
    slower. No more than a chunk is computed in vain."""
    room = room_for(dimension(size, ways), 4.0, tile=8, is_looped=True)
    even = size // ways
    assert room.buckets == tuple(range(0, room.capacity + 1, room.chunk))
    assert room.capacity > even and room.capacity >= 4 * size / (4 * (ways - 1) + 1)
    assert room.buckets[room.bucket_of(even)] - even < room.chunk <= max(8, even / 8)
    assert all(room.bucket_of(n) == -(-n // room.chunk) for n in range(even + 1))


def part(placing: Placing | None = None, move_s: float = 0.0, fixed_s: float = 0.0) -> Part:
    room = Room(dimension(64, 4), 24, tuple(range(25)))
    return Part(room, placing or even_placing(room), 1.0, fixed_s, move_s)


def after(one: Part, action: Action) -> Part:
    (decision,) = action.decisions
    now = moved(one.placing, decision.counts)
    return Part(one.room, Placing(now.units, decision.active), one.unit_s, one.fixed_s, one.move_s)


SLOW = (1.0, 1.0, 4.0, 1.0)


@pytest.mark.parametrize("mode", ["off", "migrate", "auto"])
def test_what_is_lossless_leaves_nothing_out(mode):
    assert act(Policy(Balance(mode)), Disturbance(SLOW), [part()]).dropped == 0


@pytest.mark.parametrize("mode", ["off", "resize"])
def test_what_may_not_move_does_not(mode):
    assert act(Policy(Balance(mode)), Disturbance(SLOW), [part()]).moved == 0


def test_what_must_be_computed_is():
    one = part()
    room = dataclasses.replace(one.room, computes_all="`dot` reads it by itself")
    action = act(Policy(Balance("semi")), Disturbance(SLOW), [dataclasses.replace(one, room=room, move_s=100.0)])
    assert action.dropped == 0


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("mode", ["resize", "semi", "auto"])
def test_no_device_leaves_out_more_than_is_allowed(mode, share):
    action = act(Policy(Balance(mode, max_loss_share=share)), Disturbance((1.0, 8.0, 4.0, 2.0)), [part(move_s=100.0)])
    (decision,) = action.decisions
    assert all(n - a <= share * 16 for n, a in zip(decision.counts, decision.active, strict=True))
    assert action.dropped > 0 or share == 0.0


def test_migration_comes_within_a_unit_of_the_ideal():
    """Speeds 1, 1, 1/4, 1: 64 units in 64 / 3.25 s."""
    action = act(Policy(Balance("migrate")), Disturbance(SLOW), [part()])
    assert action.ideal_s == pytest.approx(64 / 3.25)
    assert action.before_s == 64 and action.ideal_s <= action.after_s <= action.ideal_s + 1


def test_semi_leaves_out_what_is_short_and_moves_what_lasts():
    short = act(Policy(Balance("semi")), Disturbance(SLOW, lasted=5), [part(move_s=100.0)])
    lasting = act(Policy(Balance("semi")), Disturbance(SLOW, lasted=5000), [part(move_s=100.0)])
    assert short.dropped > 0 == short.moved
    assert lasting.moved > 0 == lasting.dropped


def test_units_move_once_the_lost_time_would_have_paid_for_it():
    """Each step loses 64 - 20 s of 64 s. Moving 11 units of 400 s each takes what 100 steps lose."""
    acts = [
        act(Policy(Balance("migrate")), Disturbance(SLOW, lasted=n), [part(move_s=400.0)]).moved for n in (1, 80, 130)
    ]
    assert acts[0] == 0 and acts[2] >= 11
    assert acts == sorted(acts)


def test_shares_come_back_when_the_disturbance_is_over():
    slow = after(part(), act(Policy(Balance("migrate")), Disturbance(SLOW, 100), [part()]))
    assert min(slow.placing.counts) < 16
    action = act(Policy(Balance("migrate")), Disturbance((1.0,) * 4, 5), [slow])
    assert action.decisions[0].active == (16,) * 4 and action.changes
    resized = after(part(), act(Policy(Balance("resize")), Disturbance(SLOW, 100), [part()]))
    action = act(Policy(Balance("resize")), Disturbance((1.0,) * 4, 5), [resized])
    assert action.dropped == 0 and action.means == "computed everything again"


def test_shares_do_not_swing():
    """Measured a little differently, what was done is left as it is."""
    slow = after(part(), act(Policy(Balance("migrate")), Disturbance(SLOW, 100), [part()]))
    for factor in (0.97, 1.0, 1.03):
        again = Disturbance((1.0, 1.0, 4.0 * factor, 1.0), 101)
        assert not act(Policy(Balance("migrate")), again, [slow]).changes


def test_another_plan_is_called_for_only_if_shares_do_not_suffice_for_long():
    """Much that does not move: shares cannot even it out."""
    stuck = part(fixed_s=20.0)
    wants = lambda one, lasted: (
        act(Policy(Balance("migrate"), replan_after=500), Disturbance(SLOW, lasted), [one]).wants_plan
    )
    small = Part(Room(dimension(64, 4), 17, (0, 8, 16, 17)), even_placing(stuck.room), 1.0, 0.0, 0.0)
    assert not wants(small, 499) and wants(small, 500)
    assert not wants(part(), 5000)


def test_a_disturbance_goes_on_while_slowness_stays_about_the_same():
    one = Disturbance((1.0, 2.0), 5)
    assert one.then((1.0, 2.2), 5) == Disturbance((1.0, 2.2), 10)
    assert one.then((1.0, 3.0), 5) == Disturbance((1.0, 3.0), 5)
    assert one.then((1.0, 1.0), 1).slow == () and one.slow == (1,)


def test_a_coordinate_is_as_slow_as_its_slowest_device():
    slowness = (1.0, 1.0, 1.0, 2.0, 3.0, 1.0, 1.0, 1.0)  # of (data=2, tensor=4)
    sizes = (("data", 2), ("tensor", 4))
    assert along_axis(slowness, sizes, "tensor") == (3.0, 1.0, 1.0, 2.0)
    assert along_axis(slowness, sizes, "data") == (2.0, 3.0)

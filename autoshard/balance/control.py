r"""Chooses shares from measured slowness: what moves, and what is left out.

Of one unit dimension with U units on T devices, device d holds $n_d$ and needs $w_d\,(f + t\,b(a))$ seconds between two
sums if it computes a of them: $w_d$ is its slowness, t the seconds of a unit, f those of what does not move, and b(a)
the smallest bucket that holds a. All devices meet at the sum, so that the slowest counts. Device d moves $m_d$ units
away and leaves $x_d$ out; one that receives units ($m_d < 0$) leaves none out:

$$\min_{m, x} \; \max_d w_d\,(f + t\, b(a_d)) \; + \; \frac{c}{h} \sum_d \max(0, m_d) \; + \; \lambda \sum_d x_d,
  \qquad x_d \le \gamma\, U / T$$

with c the seconds that moving a unit takes, h the steps that the disturbance is expected to last, and λ the price of a
unit left out, in seconds a step. Each unit dimension is followed by a sum of its own, so that they are decided one by
one.

The maximum is one of the values $w_d (f + t b)$. For each of these deadlines every device has a limit; what is above it
leaves, and each unit that leaves is moved or left out, whichever is cheaper, as far as places and γ allow. That is a
search over at most T |B| deadlines, and exact.
"""

import dataclasses
from collections.abc import Sequence

from autoshard.balance.places import Placing, Room


@dataclasses.dataclass(frozen=True, slots=True)
class Prices:
    """What shares of one unit dimension cost.

    Attributes:
      unit_s: Seconds of one unit on a device that is not slow, in a step.
      fixed_s: Seconds of such a device, in a step, for what does not move and is not followed by a sum of its own.
      move_s: Seconds of moving one unit. horizon: Steps that the disturbance is expected to last.
      drop_s: Seconds a step that a unit left out counts for.
      most_dropped: The most units that a device may leave out, as a share of an even share.
      may_move: Whether units may move.
    """

    unit_s: float
    fixed_s: float = 0.0
    move_s: float = 0.0
    horizon: float = 1.0
    drop_s: float = 0.0
    most_dropped: float = 0.0
    may_move: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """Shares of one unit dimension.

    Attributes:
      counts: Units on each device. active: Those that it computes.
      step_s: Seconds a step that the slowest device needs for them. cost_s: The whole objective.
      moved: Units that change their device.
    """

    counts: tuple[int, ...]
    active: tuple[int, ...]
    step_s: float
    cost_s: float
    moved: int

    @property
    def dropped(self) -> int:
        """Units that nobody computes."""
        return sum(self.counts) - sum(self.active)


def step_s(active: Sequence[int], slowness: Sequence[float], room: Room, prices: Prices) -> float:
    """Seconds that the slowest device needs."""
    pairs = zip(active, slowness, strict=True)
    return max(w * (prices.fixed_s + prices.unit_s * room.buckets[room.bucket_of(n)]) for n, w in pairs)


def ideal_s(slowness: Sequence[float], room: Room, prices: Prices) -> float:
    """Seconds that every device would need if work could be divided at will, what does not move aside.

    The device d then ends with all others at the time s for which $\\sum_d (s / w_d - f) / t = U$; a device that is too
    slow even for what does not move ends at $w_d f$.
    """
    slow = sorted(slowness)
    taking = next(
        n
        for n in range(len(slow), 0, -1)
        if n == 1 or _ends_at(slow[:n], room.unit.size, prices) >= slow[n - 1] * prices.fixed_s
    )
    return max(_ends_at(slow[:taking], room.unit.size, prices), slow[-1] * prices.fixed_s)


def _ends_at(slowness: Sequence[float], units: int, prices: Prices) -> float:
    """When devices end together that divide all units at will."""
    return (units * prices.unit_s + len(slowness) * prices.fixed_s) / sum(1 / w for w in slowness)


def decide(placing: Placing, slowness: Sequence[float], room: Room, prices: Prices) -> Decision:
    """The best shares, from where units are now; of equally good ones, those with the fewest moves.

    Args:
      placing: Where units are. slowness: How many times slower than usual each device is.
      room: The places. prices: See `Prices`.
    """
    now = placing.counts
    times = {(w, b): w * (prices.fixed_s + prices.unit_s * b) for w in slowness for b in room.buckets}
    best: Decision | None = None
    for deadline in sorted(set(times.values())):
        within = lambda w, deadline=deadline: [b for b in room.buckets if times[w, b] <= deadline * (1 + 1e-9)]
        if not all(map(within, slowness)):
            continue
        found = _within([max(within(w)) for w in slowness], now, slowness, room, prices)
        if found is not None and (best is None or _rank(found) < _rank(best)):
            best = found
    assert best is not None  # the latest deadline allows what is now
    return best


def _rank(decision: Decision) -> tuple[float, int, int]:
    """The cheapest first, to 12 digits; then the fewest moves and the fewest units left out."""
    return float(f"{decision.cost_s:.12g}"), decision.moved, decision.dropped


def _within(
    limits: Sequence[int], now: Sequence[int], slowness: Sequence[float], room: Room, prices: Prices
) -> Decision | None:
    """The cheapest shares in which no device computes more than its limit; None if there are none."""
    excess = [max(0, n - limit) for n, limit in zip(now, limits, strict=True)]
    space = sum(max(0, limit - n) for n, limit in zip(now, limits, strict=True)) if prices.may_move else 0
    most = int(prices.most_dropped * room.unit.size / room.unit.ways + 1e-9)
    can_drop = [min(e, most) for e in excess]
    dropped = max(0, sum(excess) - space)
    if dropped > sum(can_drop):
        return None
    if prices.drop_s < prices.move_s / prices.horizon:
        dropped = sum(can_drop)
    left_out = [0] * len(now)
    for d in sorted(range(len(now)), key=lambda d: -slowness[d]):
        left_out[d] = min(can_drop[d], dropped - sum(left_out))
    counts = [n - e + x for n, e, x in zip(now, excess, left_out, strict=True)]
    arriving = sum(excess) - dropped
    for _ in range(arriving):
        open_to = [d for d in range(len(now)) if counts[d] < limits[d] and not excess[d]]
        counts[min(open_to, key=lambda d: (slowness[d] * (counts[d] + 1), d))] += 1
    active = tuple(n - out for n, out in zip(counts, left_out, strict=True))
    seconds = step_s(active, slowness, room, prices)
    cost = seconds + arriving * prices.move_s / prices.horizon + dropped * prices.drop_s
    return Decision(tuple(counts), active, seconds, cost, arriving)


def as_it_is(placing: Placing, slowness: Sequence[float], room: Room, prices: Prices) -> Decision:
    """What is now, priced."""
    seconds = step_s(placing.active, slowness, room, prices)
    return Decision(placing.counts, placing.active, seconds, seconds + placing.dropped * prices.drop_s, 0)

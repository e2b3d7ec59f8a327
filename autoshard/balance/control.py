r"""Chooses shares from measured slowness: what moves, and what is left out.

For one unit dimension with U units on T devices, device d needs $w_d t$ seconds for a unit, and can be given any bucket
$b \in B$ of units, at most its places. All devices meet at a sum, so that a step costs what the slowest takes. With
$n_d$ units now, choose kept $k_d \le n_d$ in place, moved in $m_d$, and computed $a_d = k_d + m_d$:

$$\min_{a, m} \; \max_d w_d t\, b(a_d) \; + \; \frac{c}{h} \sum_d m_d \; + \; \lambda\, \Big(U - \sum_d a_d\Big)$$

with $b(a)$ the smallest bucket that holds $a$, $c$ the seconds that moving a unit takes, $h$ the steps that the
disturbance is expected to last, $\lambda$ the price in seconds of a unit left out, of which there may be at most D.

The maximum is one of the values $w_d t b$; for each of these deadlines every device has a limit, those above theirs
give units away, and each of these is moved or left out, whichever is cheaper, as far as places and D allow. That is a
search over at most T |B| deadlines, and exact.
"""

import dataclasses
from collections.abc import Sequence

from autoshard.balance.places import Placing, Room


@dataclasses.dataclass(frozen=True, slots=True)
class Prices:
    """What shares cost.

    Attributes:
      unit_s: Seconds of one unit on a device that is not slow, in a step.
      move_s: Seconds of moving one unit. horizon: Steps that a disturbance is expected to last.
      drop_s: Seconds a step that a unit left out counts for. most_dropped: Units that may be left out.
      may_move: Whether units may move.
    """

    unit_s: float
    move_s: float = 0.0
    horizon: float = 1.0
    drop_s: float = 0.0
    most_dropped: int = 0
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


def step_s(active: Sequence[int], slowness: Sequence[float], room: Room, unit_s: float) -> float:
    """Seconds that the slowest device needs."""
    pairs = zip(active, slowness, strict=True)
    return max(w * unit_s * room.buckets[room.bucket_of(n)] for n, w in pairs)


def decide(placing: Placing, slowness: Sequence[float], room: Room, prices: Prices) -> Decision:
    """The best shares, from where units are now.

    Args:
      placing: Where units are. slowness: How many times slower than usual each device is.
      room: The places. prices: See `Prices`.
    """
    now = placing.counts
    deadlines = sorted({w * b for w in slowness for b in room.buckets})
    best: Decision | None = None
    for deadline in deadlines:
        limits = [max((b for b in room.buckets if w * b <= deadline * (1 + 1e-9)), default=0) for w in slowness]
        found = _within(limits, now, slowness, room, prices)
        if found is not None and (best is None or found.cost_s < best.cost_s - 1e-15):
            best = found
    assert best is not None  # the largest deadline allows what is now
    return best


def _within(
    limits: Sequence[int], now: Sequence[int], slowness: Sequence[float], room: Room, prices: Prices
) -> Decision | None:
    """The cheapest shares in which no device computes more than its limit; None if there are none."""
    excess = [max(0, n - limit) for n, limit in zip(now, limits, strict=True)]
    free = [max(0, limit - n) for n, limit in zip(now, limits, strict=True)]
    total, space = sum(excess), sum(free) if prices.may_move else 0
    at_least = max(0, total - space)
    if at_least > prices.most_dropped:
        return None
    is_cheaper = prices.drop_s < prices.move_s / prices.horizon
    dropped = min(total, prices.most_dropped) if is_cheaper else at_least
    leaving = list(excess)
    left_out = [0] * len(now)
    for d in sorted(range(len(now)), key=lambda d: -slowness[d]):  # the slowest keep what nobody computes
        take = min(leaving[d], dropped - sum(left_out))
        left_out[d], leaving[d] = take, leaving[d] - take
    counts, arriving = [n - out for n, out in zip(now, leaving, strict=True)], sum(leaving)
    for _ in range(arriving):
        open_to = [d for d in range(len(now)) if counts[d] < limits[d] and not excess[d]]
        d = min(open_to, key=lambda d: (slowness[d] * (counts[d] + 1), d))
        counts[d] += 1
    active = tuple(n - out for n, out in zip(counts, left_out, strict=True))
    seconds = step_s(active, slowness, room, prices.unit_s)
    cost = seconds + arriving * prices.move_s / prices.horizon + dropped * prices.drop_s
    return Decision(tuple(counts), active, seconds, cost, arriving)


def is_worth_it(now: Decision, new: Decision, margin: float) -> bool:
    """Whether a change gains more than a share `margin` of what the step costs as it is: shares do not swing."""
    return now.cost_s - new.cost_s > margin * now.cost_s


def as_it_is(placing: Placing, slowness: Sequence[float], room: Room, prices: Prices) -> Decision:
    """What is now, priced."""
    seconds = step_s(placing.active, slowness, room, prices.unit_s)
    return Decision(placing.counts, placing.active, seconds, seconds + placing.dropped * prices.drop_s, 0)

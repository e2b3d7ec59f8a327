"""What is done about slow devices: which means are allowed, when, and what is reported.

How long a disturbance will last is not known. As long as it has lasted already is the guess that never costs more than
twice what foresight would have (Karlin et al. 1988, "Competitive snoopy caching", on renting and buying): units move
once the time lost so far would have paid for the move. Until then work is left out, where that is allowed.
"""

import dataclasses
import math
from collections.abc import Sequence

from autoshard.balance.control import Decision, Prices, as_it_is, decide, ideal_s
from autoshard.balance.options import Balance
from autoshard.balance.places import Placing, Room

_SAME = 1.25
"""Two slownesses that differ by less are one disturbance."""


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What is allowed.

    Attributes:
      balance: The means.
      loss_price: What a step without a share of its units counts for: with 1 as if that share of a step had to be
        taken again, with 2 (an estimate) twice that.
      margin: Shares change only where that gains more than this part of a step.
      replan_after: Steps after which a disturbance that shares cannot even out calls for another plan.
    """

    balance: Balance = Balance()
    loss_price: float = 2.0
    margin: float = 0.05
    replan_after: int = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One unit dimension as the controller sees it.

    Attributes:
      room: Its places. placing: Where its units are.
      unit_s: Seconds of one unit in a step. fixed_s: Seconds of what does not move, before the same sum.
      move_s: Seconds of moving one unit.
    """

    room: Room
    placing: Placing
    unit_s: float
    fixed_s: float
    move_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Disturbance:
    """How slow each device is, and for how many steps it has been so."""

    slowness: tuple[float, ...]
    lasted: int = 1

    def then(self, slowness: Sequence[float], steps: int) -> "Disturbance":
        """The disturbance so many steps later: the same, or another that begins."""
        pairs = zip(self.slowness, slowness, strict=True)
        is_same = all(max(a, b) <= _SAME * min(a, b) for a, b in pairs)
        return Disturbance(tuple(slowness), self.lasted + steps if is_same else max(1, steps))

    @property
    def slow(self) -> tuple[int, ...]:
        """The devices that are slow."""
        return tuple(d for d, w in enumerate(self.slowness) if w > 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """What is to be done.

    Attributes:
      decisions: Shares of each part. changes: Whether they differ from those of now.
      before_s, after_s: Seconds that the parts take in a step, as it is and with these shares.
      ideal_s: What they would take if work could be divided at will.
      moved: Units that move. dropped: Units that are left out. of: All units.
      wants_plan: Whether the disturbance has outlasted what shares can do, and calls for another plan.
    """

    decisions: tuple[Decision, ...]
    changes: bool
    before_s: float
    after_s: float
    ideal_s: float
    moved: int
    dropped: int
    of: int
    wants_plan: bool

    @property
    def means(self) -> str:
        """What is done, in words."""
        if not self.changes:
            return "nothing"
        done = [f"moved {self.moved} of {self.of} units"] * bool(self.moved)
        done += [f"left out {self.dropped} of {self.of} units"] * bool(self.dropped)
        return " and ".join(done) or "computed everything again"


def act(policy: Policy, disturbance: Disturbance, parts: Sequence[Part]) -> Action:
    """What a policy does about a disturbance.

    Args:
      policy: What is allowed. disturbance: What was measured. parts: The unit dimensions, and where their units are.
    """
    slowness = disturbance.slowness
    before, chosen, ideal = [], [], 0.0
    for part in parts:
        prices = _prices(policy, disturbance, part)
        now = as_it_is(part.placing, slowness, part.room, prices)
        before.append(now)
        chosen.append(now if policy.balance.mode == "off" else decide(part.placing, slowness, part.room, prices))
        ideal += ideal_s(slowness, part.room, prices)
    cost = lambda of: sum(d.cost_s for d in of)
    changes = cost(before) - cost(chosen) > policy.margin * cost(before)
    done = chosen if changes else before
    after_s = sum(d.step_s for d in done)
    return Action(
        tuple(done),
        changes,
        sum(d.step_s for d in before),
        after_s,
        ideal,
        sum(d.moved for d in done),
        sum(d.dropped for d in done),
        sum(p.room.unit.size for p in parts),
        disturbance.lasted >= policy.replan_after and after_s > (1 + 2 * policy.margin) * ideal,
    )


def _prices(policy: Policy, disturbance: Disturbance, part: Part) -> Prices:
    """A unit left out costs its share of an even step, times the price of loss."""
    even_s = part.fixed_s + part.unit_s * math.ceil(part.room.unit.size / part.room.unit.ways)
    return Prices(
        unit_s=part.unit_s,
        fixed_s=part.fixed_s,
        move_s=part.move_s,
        horizon=float(disturbance.lasted),
        drop_s=policy.loss_price * even_s / part.room.unit.size,
        most_dropped=0.0 if part.room.computes_all else policy.balance.most_left_out,
        may_move=policy.balance.moves,
    )


def along_axis(slowness: Sequence[float], sizes: Sequence[tuple[str, int]], axis: str) -> tuple[float, ...]:
    """How slow each coordinate of a mesh axis is: as slow as its slowest device.

    Args:
      slowness: Of every device of the mesh, in row-major order. sizes: The mesh axes. axis: One of them.
    """
    names = [name for name, _ in sizes]
    shape = [size for _, size in sizes]
    stride = math.prod(shape[names.index(axis) + 1 :])
    slowest = [1.0] * shape[names.index(axis)]
    for device, w in enumerate(slowness):
        at = device // stride % len(slowest)
        slowest[at] = max(slowest[at], w)
    return tuple(slowest)

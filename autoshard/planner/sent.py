"""What a plan's step sends between devices, part by part, whether it can hide or kernels wait for it at once.

A part is what is sent for one reader. Where what is gathered is given another form and gathered once more, as over the
axes of two levels of a network, the second gather sends what the first brings, and comes after it.
"""

import collections
import dataclasses

from autoshard.cost.exposure import Hideable
from autoshard.graph.graph import Graph
from autoshard.graph.layout import is_gather
from autoshard.planner.timeline import Timeline

_ROUNDING = 1e-9
"""Of the time of a collective: a part of it that is shorter is none."""


@dataclasses.dataclass(frozen=True, slots=True)
class SentParts:
    """The parts of what a timeline sends between devices.

    Attributes:
      collectives: What can hide, and what kernels wait for at once, whose `start` is its `stop`.
      owners: Of each, the number in `Timeline.communication`.
      hides: Of each, the number in `Timeline.hideable`; None for what is waited for at once.
      again: Of these, by number, the gathers of what is gathered before.
      again_of: What they are parts of, by number in `Timeline.communication`.
    """

    collectives: tuple[Hideable, ...]
    owners: tuple[int, ...]
    hides: tuple[int | None, ...]
    again: frozenset[int]
    again_of: tuple[int, ...]


def sent_parts(times: Timeline) -> SentParts:
    """The parts of what a timeline sends, by when the first reader of each collective waits for it."""
    collectives, owners, hides = list[Hideable](), list[int](), list[int | None]()
    again, again_of, gathered = set[int](), list[int](), set[tuple]()
    for n in sorted(range(len(times.sendings)), key=lambda n: min(times.sendings[n].waiting, default=0)):
        item, about = times.communication[n], times.sendings[n]
        if not item.is_collective:
            continue
        parts = [times.hideable[part] for part in about.hideable]
        own: list[int | None] = list(about.hideable)
        left_s = item.time_s - _beside_s(times, n) - sum(c.time_s for c in parts)
        if left_s > _ROUNDING * item.time_s:
            at_once = [o for o in about.waiting if o not in {c.stop for c in parts}] or about.waiting
            parts += [Hideable(o, o, left_s / len(at_once)) for o in at_once]
            own += [None] * len(at_once)
        key = about.value, about.after, item.kind, item.axes
        if about.before is not None and is_gather(about.before, about.after):
            if key in gathered and about.hideable:
                again.update(range(len(collectives), len(collectives) + len(parts)))
                again_of.append(n)
            gathered.add(key)
        collectives += parts
        owners += [n] * len(parts)
        hides += own
    return SentParts(tuple(collectives), tuple(owners), tuple(hides), frozenset(again), tuple(again_of))


def sent_after(graph: Graph, times: Timeline, sent: SentParts) -> list[tuple[int, ...]]:
    """For each part, those that bring what it sends: gathers of what is then only given another form."""
    made_by = {r: o for o in graph.operations for r in o.results if r is not None}
    brought: dict[tuple[int, int], list[int]] = collections.defaultdict(
        list
    )  # by value and the operation that reads it
    for number, owner in enumerate(sent.owners):
        if times.sendings[owner].before is not None:
            brought[times.sendings[owner].value, sent.collectives[number].stop].append(number)
    found: list[tuple[int, ...]] = []
    for part, owner in zip(sent.hides, sent.owners, strict=True):
        value: int | None = times.sendings[owner].value if part is not None else None
        own: tuple[int, ...] = ()
        while not own and value in made_by and not made_by[value].rule.is_heavy:
            operation = made_by[value]
            operands = [o for o in operation.operands if o is not None]
            own = tuple([number for o in operands for number in brought.get((o, operation.index), ())])
            value = operands[0] if len(operands) == 1 else None
        found.append(own)
    return found


def _beside_s(times: Timeline, n: int) -> float:
    """What hides of a collective beside the pieces of its own product."""
    parts = times.sendings[n].hideable
    hidden_s = sum(times.hideable[part].time_s - times.found.exposed_s[part] for part in parts)
    return times.communication[n].hidden_s - hidden_s

"""The timeline of a plan with what hides in the compiler's own schedule, instead of in the best there is."""

import dataclasses
from collections.abc import Sequence

from autoshard.compiler.candidates import has_room
from autoshard.compiler.latency_hiding import Program
from autoshard.cost.exposure import Exposure, Hideable
from autoshard.graph.graph import Graph
from autoshard.graph.layout import is_gather, shard_bytes
from autoshard.planner.solution_reader import SolutionReader
from autoshard.planner.timeline import Sending, Timeline

_ROUNDING = 1e-9
"""Of the time of a collective: a part of it that is shorter is none."""


def compiled_timeline(reader: SolutionReader, times: Timeline, needed_bytes: float) -> Timeline:
    """The timeline of a plan as the compiler schedules it; the same where that is not told apart from the best.

    Copies between a device and its host are on no link of collectives, and hide as they did. A gather that the
    compiler leaves out, since there is memory for the copy to stay, counts as hidden. With such, and with kernels in
    another order, a step can take less than in the best schedule of all that is asked for: then it is that which
    counts, as no plan is proven to take less.

    Args:
      reader: The solution. times: Its timeline, in which something can hide.
      needed_bytes: What must be there for it to run, if all is gathered again that is; what is alive at once where that
        alone leaves no room.
    """
    f, sent = reader.f, _Sent(times)
    capacity = f.problem.capacity
    stays = has_room(needed_bytes, capacity)
    if stays and capacity is not None:
        stays = needed_bytes + sum(_size_bytes(reader, times.sendings[n]) for n in sent.again_of) <= capacity
    program = Program(
        tuple(times.share * kernel_s for kernel_s in times.kernels_s),
        _needed_by(reader.graph, times.kernels_s),
        sent.collectives,
        sent.again,
    )
    found = f.compiler.scheduled(program, stays)
    if found is None:
        return times
    compiled = sent.hidden_as(found)
    return compiled if compiled.step_s > times.step_s else times


def _size_bytes(reader: SolutionReader, about: Sending) -> float:
    """What a device holds of a copy that is gathered."""
    size_bytes = float(reader.graph.values[about.value].size_bytes)
    return shard_bytes(size_bytes, about.after, reader.f.mesh.shape)


class _Sent:
    """The parts of what a timeline sends.

    Attributes:
      collectives: Those between devices: what can hide, and what kernels wait for at once.
      again: Of these, by number, the gathers of what is gathered before.
      again_of: What they are parts of, by number in `Timeline.communication`.
    """

    def __init__(self, times: Timeline) -> None:
        self._times = times
        self.collectives: list[Hideable] = []
        self.again: set[int] = set()
        self.again_of: list[int] = []
        self._owners: list[int] = []  # of each of `collectives`
        gathered: set[tuple] = set()
        for n in sorted(range(len(times.sendings)), key=lambda n: min(times.sendings[n].waiting, default=0)):
            item, about = times.communication[n], times.sendings[n]
            if not item.is_collective:
                continue
            parts = [times.hideable[part] for part in about.hideable]
            left_s = item.time_s - self._beside_s(n) - sum(c.time_s for c in parts)
            if left_s > _ROUNDING * item.time_s:
                at_once = [o for o in about.waiting if o not in {c.stop for c in parts}] or about.waiting
                parts += [Hideable(o, o, left_s / len(at_once)) for o in at_once]
            key = about.value, about.after, item.kind, item.axes
            if about.before is not None and is_gather(about.before, about.after):
                if key in gathered and about.hideable:
                    self.again.update(range(len(self.collectives), len(self.collectives) + len(parts)))
                    self.again_of.append(n)
                gathered.add(key)
            self.collectives += parts
            self._owners += [n] * len(parts)

    def hidden_as(self, found: Exposure) -> Timeline:
        """The timeline in which kernels wait for `collectives` as was found."""
        times = self._times
        hideable, sendings, items = list(self.collectives), list(times.sendings), list(times.communication)
        exposed_s, number_of = list(found.exposed_s), dict[int, int]()
        parts: dict[int, list[int]] = {}
        for part, n in enumerate(self._owners):
            parts.setdefault(n, []).append(part)
        for n, about in enumerate(times.sendings):
            if n in parts:
                exposed = sum(exposed_s[part] for part in parts[n])
                items[n] = dataclasses.replace(items[n], hidden_s=items[n].time_s - exposed)
                sendings[n] = dataclasses.replace(about, hideable=tuple(parts[n]))
                continue
            for part in about.hideable:
                number_of[part] = len(hideable)
                hideable.append(times.hideable[part])
                exposed_s.append(times.found.exposed_s[part])
            sendings[n] = dataclasses.replace(about, hideable=tuple(number_of[part] for part in about.hideable))
        before = times.found
        copied = [p._replace(collective=number_of[p.collective]) for p in before.pieces if p.collective in number_of]
        waits = [w._replace(collective=number_of[w.collective]) for w in before.waits if w.collective in number_of]
        return dataclasses.replace(
            times,
            communication=tuple(items),
            hideable=tuple(hideable),
            sendings=tuple(sendings),
            stretches=(),
            found=Exposure.of(exposed_s, (*found.pieces, *copied), (*found.waits, *waits)),
        )

    def _beside_s(self, n: int) -> float:
        """What hides of a collective beside the pieces of its own product."""
        found, parts = self._times.found, self._times.sendings[n].hideable
        hidden_s = sum(self._times.hideable[part].time_s - found.exposed_s[part] for part in parts)
        return self._times.communication[n].hidden_s - hidden_s


def _needed_by(graph: Graph, kernels_s: Sequence[float]) -> tuple[int, ...]:
    """For each operation, the first kernel that needs what it makes, as far as that is in the same loop."""
    operations, count = graph.operations, len(graph.operations)
    made_by = {r: o.index for o in operations for r in o.results if r is not None}
    found = [count] * count
    for loop in sorted(graph.loops, key=lambda loop: loop.start):  # inner ones last
        found[loop.start : loop.stop] = [loop.stop] * (loop.stop - loop.start)
    for operation in reversed(operations):
        own = operation.index if kernels_s[operation.index] else found[operation.index]
        for value in operation.operands:
            if value in made_by and (maker := made_by[value]) < operation.index:
                found[maker] = min(found[maker], own)
    return tuple(found)

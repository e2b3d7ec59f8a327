"""The timeline of a plan with what hides in the compiler's own schedule, instead of in the best there is."""

import dataclasses
from collections.abc import Sequence

from autoshard.compiler.candidates import has_room
from autoshard.compiler.latency_hiding import Program
from autoshard.cost.exposure import Exposure
from autoshard.graph.graph import Graph
from autoshard.graph.layout import shard_bytes
from autoshard.planner.sent import SentParts, sent_parts
from autoshard.planner.solution_reader import SolutionReader
from autoshard.planner.timeline import Sending, Timeline


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
    f, sent = reader.f, sent_parts(times)
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
    compiled = _hidden_as(times, sent, found)
    return compiled if compiled.step_s > times.step_s else times


def _size_bytes(reader: SolutionReader, about: Sending) -> float:
    """What a device holds of a copy that is gathered."""
    size_bytes = float(reader.graph.values[about.value].size_bytes)
    return shard_bytes(size_bytes, about.after, reader.f.mesh.shape)


def _hidden_as(times: Timeline, sent: SentParts, found: Exposure) -> Timeline:
    """The timeline in which kernels wait for what is sent as was found."""
    hideable, sendings, items = list(sent.collectives), list(times.sendings), list(times.communication)
    exposed_s, number_of = list(found.exposed_s), dict[int, int]()
    parts: dict[int, list[int]] = {}
    for part, n in enumerate(sent.owners):
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

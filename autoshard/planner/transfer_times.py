"""When what hides is sent in the schedule by which a plan's step is predicted.

The schedule that lets kernels wait least has two ends: begun as early as possible (`cost/exposure.py`), it tells when
the sum of a gradient can be there; the same backwards, from the last kernel on, tells when what comes back from the
memory of the host must begin at the latest. There collectives are interrupted, which none is that a device runs: a
gather begins when the link has time for all of it, between what kernels need at once (`cost/link_queue.py`).
"""

from collections.abc import Collection

from autoshard.compiler.host_residuals import CopyTimes
from autoshard.compiler.transfer_times import TransferTimes
from autoshard.cost.exposure import Hideable, exposure
from autoshard.cost.link_queue import Queued, Queueing, link_queue
from autoshard.graph.graph import Graph
from autoshard.planner.build import Formulation
from autoshard.planner.sent import sent_after, sent_parts
from autoshard.planner.timeline import Timeline


def transfer_times(f: Formulation, planned: Timeline) -> TransferTimes:
    """When a solution of `f` sends what hides; `planned` is its timeline."""
    operations, gradients = f.program.graph.operations, f.overlap.gradients
    made_by = {
        a.value: operations[f.overlap.analysis.kernel_of[g.index]].equation for g in f.program.groups for a in g.writes
    }
    begin, earliest = queued_begins(f.program.graph, planned), earliest_ends(planned)
    begins: dict[tuple[int, int], int] = {}
    ends: dict[int, int] = {}
    for about in planned.sendings:
        for part in about.hideable:
            stop = planned.hideable[part].stop
            if about.value in gradients:
                if (product := made_by.get(about.value)) is not None:
                    ends[product] = max(ends.get(product, 0), earliest[part])
            elif stop < len(operations) and about.value in operations[stop].operands:
                key = operations[stop].equation, operations[stop].operands.index(about.value)
                begins[key] = min(begins.get(key, stop), begin[part])
    return TransferTimes(begins, ends)


def queued_begins(graph: Graph, planned: Timeline) -> dict[int, int]:
    """For each part of what hides between devices, the operation before which it is put on the link; `planned`: the
    timeline of a plan of `graph`."""
    sent = sent_parts(planned)
    after, order = sent_after(graph, planned, sent), list[int]()
    place: dict[int, int] = {}

    def put(number: int) -> None:
        if number not in place:
            for earlier in after[number]:
                put(earlier)
            place[number] = len(order)
            order.append(number)

    for number in range(len(after)):
        put(number)
    collectives = [
        Queued(c.start, c.stop, c.time_s, tuple([place[earlier] for earlier in after[number]]))
        for number, c in ((number, sent.collectives[number]) for number in order)
    ]
    kernels_s = [planned.share * kernel_s for kernel_s in planned.kernels_s]
    queue = link_queue(kernels_s, collectives, Queueing.RESERVED)
    parts = ((sent.hides[number], begin) for number, begin in zip(order, queue.begins, strict=True))
    return {part: begin for part, begin in parts if part is not None}


def earliest_ends(planned: Timeline) -> list[int]:
    """For each part of what hides, the operation before which it is sent, begun as early as possible."""
    sent = {piece.collective: piece.kernel + 1 for piece in planned.found.pieces}  # of several, the last counts
    return [
        sent.get(part, c.stop) if not planned.found.exposed_s[part] else c.stop
        for part, c in enumerate(planned.hideable)
    ]


def copy_times(f: Formulation, planned: Timeline, in_host: Collection[int]) -> dict[int, CopyTimes | None]:
    """When a solution of `f` copies the residuals with numbers `in_host`; `planned` is its timeline."""
    found: dict[int, CopyTimes | None] = dict.fromkeys(in_host)
    number_of = {f.all_residuals[k].value: k for k in in_host}
    latest, earliest = latest_spans(planned), earliest_ends(planned)
    for about in planned.sendings:
        if about.value in number_of and len(about.hideable) == 2:
            out, back = about.hideable
            found[number_of[about.value]] = CopyTimes(earliest[out], *latest[back])
    return found


def latest_spans(planned: Timeline) -> list[tuple[int, int]]:
    """For each part of what hides, the operation beside which it begins, and the one before which it ends, begun as
    late as possible."""
    count = len(planned.kernels_s)
    mirrored = [Hideable(count - c.stop, count - c.start, c.time_s) for c in planned.hideable]
    found = exposure(planned.kernels_s[::-1], mirrored, planned.share)
    spans: dict[int, tuple[int, int]] = {}
    for piece in found.pieces:
        kernel = count - 1 - piece.kernel
        spans[piece.collective] = kernel, spans.get(piece.collective, (0, kernel + 1))[1]
    return [
        spans.get(part, (c.start, c.stop)) if not found.exposed_s[part] else (c.start, c.stop)
        for part, c in enumerate(planned.hideable)
    ]

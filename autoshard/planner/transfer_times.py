"""When what hides is sent in the schedule by which a plan's step is predicted.

The schedule that lets kernels wait least has two ends: begun as early as possible (`cost/exposure.py`), it tells when
the sum of a gradient can be there; the same backwards, from the last kernel on, tells when a gather must begin at the
latest.
"""

from collections.abc import Collection

from autoshard.compiler.host_residuals import CopyTimes
from autoshard.compiler.transfer_times import TransferTimes
from autoshard.cost.exposure import Hideable, exposure
from autoshard.planner.build import Formulation
from autoshard.planner.timeline import Timeline


def transfer_times(f: Formulation, planned: Timeline) -> TransferTimes:
    """When a solution of `f` sends what hides; `planned` is its timeline."""
    operations, gradients = f.program.graph.operations, f.overlap.gradients
    made_by = {
        a.value: operations[f.overlap.analysis.kernel_of[g.index]].equation for g in f.program.groups for a in g.writes
    }
    latest, earliest = latest_spans(planned), earliest_ends(planned)
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
                begins[key] = min(begins.get(key, stop), latest[part][0])
    return TransferTimes(begins, ends)


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

"""When what hides is sent in the schedule by which a plan's step is predicted.

The schedule that lets kernels wait least has two ends: begun as early as possible (`cost/exposure.py`), it tells when
the sum of a gradient can be there; the same backwards, from the last kernel on, tells when a gather must begin at the
latest.
"""

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
    latest, earliest = latest_begins(planned), earliest_ends(planned)
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
                begins[key] = min(begins.get(key, stop), latest[part])
    return TransferTimes(begins, ends)


def earliest_ends(planned: Timeline) -> list[int]:
    """For each part of what hides, the operation before which it is sent, begun as early as possible."""
    sent = {piece.collective: piece.kernel + 1 for piece in planned.found.pieces}  # of several, the last counts
    return [
        sent.get(part, c.stop) if not planned.found.exposed_s[part] else c.stop
        for part, c in enumerate(planned.hideable)
    ]


def latest_begins(planned: Timeline) -> list[int]:
    """For each part of what hides, the operation beside which it begins, begun as late as possible."""
    count = len(planned.kernels_s)
    mirrored = [Hideable(count - c.stop, count - c.start, c.time_s) for c in planned.hideable]
    found = exposure(planned.kernels_s[::-1], mirrored, planned.share)
    sent = {piece.collective: count - 1 - piece.kernel for piece in found.pieces}  # of several, the first kernel's
    return [
        sent.get(part, c.start) if not found.exposed_s[part] else c.start for part, c in enumerate(planned.hideable)
    ]

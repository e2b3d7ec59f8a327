"""Predicted beside compiled: what a verification found, and what a plan's own compile check said."""

from autoshard.plans.program_plan import ProgramPlan
from autoshard.printing import amount, seconds
from autoshard.report.colours import OTHERS, OWN
from autoshard.report.figures import byte_bars
from autoshard.report.parts import Figure, Paragraph, Part, Table
from autoshard.verify.figures import ScheduleFigures
from autoshard.verify.report import Failure, Report
from autoshard.verify.verification import Verification

_MOST_STRAYS = 40
_UNNAMED = "\N{ZERO WIDTH SPACE}"
"""So many of it are the name of a bar that shows none, as the bar above has it."""


def confirmation_parts(plan: ProgramPlan) -> tuple[Part, ...]:
    """What the plan's own compile check said; nothing where there was none."""
    if plan.confirmation is None:
        return ()
    return tuple(Paragraph(line) for line in str(plan.confirmation).splitlines())


def verification_parts(report: Report, name: str) -> tuple[Part, ...]:
    """All outcomes of a verification."""
    parts: list[Part] = []
    for n, outcome in enumerate(report.outcomes):
        if isinstance(outcome, Failure):
            parts.append(Paragraph(f"{outcome.target}: could not be verified: {outcome.reason}", is_warning=True))
        else:
            parts += _verification(outcome, f"{name}-{n}")
    return tuple(parts)


def _difference(predicted: float, compiled: float) -> str:
    if not predicted:
        return "not predicted" if compiled else "-"
    return f"{compiled / predicted - 1:+.1%}"


def _verification(v: Verification, name: str) -> list[Part]:
    verdict = "Confirmed" if v.is_confirmed else "Not confirmed"
    parts: list[Part] = [
        Paragraph(
            f"{verdict}: plan `{v.plan}` compiled for {v.target} by XLA of jax {v.jax_version}.", not v.is_confirmed
        )
    ]
    parts += [Paragraph(text, is_warning=True) for text in v.disagreements]
    if v.flows:
        labels = [f"{f.kind}, {'+'.join(f.axes) or 'no axis'}" for f in v.flows]
        pairs = [
            (name, {side: size})
            for n, (label, f) in enumerate(zip(labels, v.flows, strict=True))
            for name, side, size in (
                (label, "predicted", f.predicted_bytes),
                (_UNNAMED * (n + 1), "compiled", f.compiled_bytes),
            )
        ]
        model, legend = byte_bars(
            [label for label, _ in pairs], [part for _, part in pairs], {"predicted": OTHERS, "compiled": OWN}
        )
        caption = f"Bytes that each device sends in a step, predicted and compiled for {v.target}"
        parts.append(Figure(f"{name}-flows", caption, model, legend))
        rows = tuple(
            (
                label,
                amount(f.predicted_bytes),
                f"{f.predicted_count:g}",
                amount(f.compiled_bytes),
                f"{f.compiled_count:g}",
                _difference(f.predicted_bytes, f.compiled_bytes),
            )
            for label, f in zip(labels, v.flows, strict=True)
        )
        columns = ("collective", "predicted", "times", "compiled", "times", "difference")
        parts.append(Table(f"Collectives of a step, {v.target}", columns, rows, frozenset({1, 2, 3, 4, 5})))
    parts.append(_memory(v))
    parts += _schedule(v.schedule)
    strays = sorted(v.strays, key=lambda s: -s.wire_bytes)
    if strays:
        rows = tuple(
            (
                "predicted only" if s.predicted else "compiled only",
                s.kind,
                "+".join(s.axes),
                s.tensor,
                "x".join(map(str, s.shape)),
                amount(s.wire_bytes),
                s.source or "not told",
            )
            for s in strays[:_MOST_STRAYS]
        )
        columns = ("side", "collective", "axes", "tensor", "shape", "sent", "line")
        parts.append(Table("Collectives that only one side has", columns, rows, frozenset({5})))
    return parts


def _memory(v: Verification) -> Table:
    ours, theirs = v.predicted_memory, v.compiled_memory
    pairs = [
        ("arguments", ours.argument_bytes, theirs.argument_bytes),
        ("outputs", ours.output_bytes, theirs.output_bytes),
        ("of these in place of arguments", ours.alias_bytes, theirs.alias_bytes),
        ("temporaries", ours.temporary_bytes, theirs.temporary_bytes),
        ("most at once", ours.peak_bytes, theirs.peak_bytes),
    ]
    if v.predicted_reserved_bytes is not None:
        pairs.append(("reserved, with gaps", v.predicted_reserved_bytes, v.reserved_bytes))
    rows = [(what, amount(a), amount(b), _difference(a, b)) for what, a, b in pairs]
    work, done = v.predicted_flops, v.compiled_flops
    rows.append(("work of products", amount(work, "FLOP"), amount(done, "FLOP"), _difference(work, done)))
    columns = ("", "predicted", "compiled", "difference")
    return Table(f"Memory and work of one device, {v.target}", columns, tuple(rows), frozenset({1, 2, 3}))


def _schedule(schedule: ScheduleFigures) -> list[Part]:
    ours, theirs = schedule.predicted, schedule.compiled
    if theirs is None:
        return [Paragraph(f"The compiled schedule was not replayed: {schedule.not_replayed}")]
    pairs = [
        ("step", ours.step_s, theirs.step_s),
        ("kernels", ours.kernel_s, theirs.kernel_s),
        ("collectives", ours.collective_s, theirs.collective_s),
        ("of these exposed", ours.exposed_s, theirs.exposed_s),
    ]
    rows = tuple((what, seconds(a), seconds(b), _difference(a, b)) for what, a, b in pairs)
    columns = ("", "predicted", "compiled, replayed", "difference")
    return [Table("Schedule of a step, by the cost model", columns, rows, frozenset({1, 2, 3}))]

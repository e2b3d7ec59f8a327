"""A verification as text for a terminal: predicted beside compiled, and what stands alone."""

from rich.console import Console

from autoshard.plans.text import pattern
from autoshard.printing import PAGE_WIDTH, TextConsole, amount, table
from autoshard.verify.targets import CpuTarget
from autoshard.verify.verification import Flow, MemoryFigures, Stray, Verification

_MOST = 12
"""Rows of a table of strays."""


def verification_text(verification: Verification, width: int = PAGE_WIDTH) -> str:
    """The whole account."""
    console = TextConsole(width)
    v = verification
    mesh = ", ".join(f"{name}={size}" for name, size in v.axes)
    console.print(
        f"Plan `{v.plan}` for cluster `{v.cluster}` on {mesh}, compiled for {v.target} by XLA of jax {v.jax_version}"
    )
    console.print()
    _flows(console, v)
    _figures(console, v)
    _strays(console, "Predicted, and absent from the compiled program", [s for s in v.strays if s.predicted])
    _strays(console, "In the compiled program, and not predicted", [s for s in v.strays if not s.predicted])
    _rematerialised(console, v)
    if v.target == CpuTarget().name and any(f.compiled_bytes < f.predicted_bytes for f in _scatters(v)):
        console.print("XLA:CPU forms few reduce-scatters by itself, and leaves all-reduces in their place.")
    for text in v.disagreements:
        console.print(f"disagreement: {text}")
    console.print("Confirmed." if v.is_confirmed else "Not confirmed.")
    return console.text


def _scatters(v: Verification) -> list[Flow]:
    return [f for f in v.flows if f.kind == "reduce-scatter"]


def _ratio(predicted: float, compiled: float) -> str:
    if not predicted:
        return "" if not compiled else "new"
    return f"{compiled / predicted - 1:+.1%}"


def _flows(console: Console, v: Verification) -> None:
    rows = table(
        "Collectives of one step: bytes that each device sends",
        [
            ("collective", "left"),
            ("axes", "left"),
            ("predicted", "right"),
            ("times", "right"),
            ("compiled", "right"),
            ("times", "right"),
            ("difference", "right"),
        ],
    )
    total = [0.0] * 4
    for f in v.flows:
        figures = f.predicted_bytes, f.predicted_count, f.compiled_bytes, f.compiled_count
        total = [t + x for t, x in zip(total, figures, strict=True)]
        rows.add_row(f.kind, "+".join(f.axes), *_row(figures))
    rows.add_row("together", "", *_row(total))
    console.print(rows)
    console.print()


def _row(figures) -> tuple[str, ...]:
    ours, our_count, theirs, their_count = figures
    return amount(ours), f"{our_count:g}", amount(theirs), f"{their_count:g}", _ratio(ours, theirs)


_CLASSES = (
    ("arguments", "argument_bytes"),
    ("outputs", "output_bytes"),
    ("of these in place of arguments", "alias_bytes"),
    ("temporaries", "temporary_bytes"),
)


def _figures(console: Console, v: Verification) -> None:
    rows = table(
        "Memory and work of one device",
        [("", "left"), ("predicted", "right"), ("compiled", "right"), ("difference", "right")],
    )
    ours: MemoryFigures = v.predicted_memory
    for label, field in _CLASSES:
        pair = getattr(ours, field), getattr(v.compiled_memory, field)
        rows.add_row(label, *map(amount, pair), _ratio(*pair))
    reserved = v.predicted_reserved_bytes
    told = ("", "") if reserved is None else (amount(reserved), _ratio(reserved, v.reserved_bytes))
    rows.add_row("reserved, with gaps", told[0], amount(v.reserved_bytes), told[1])
    peaks = ours.peak_bytes, v.compiled_memory.peak_bytes
    told = (amount(peaks[1]), _ratio(*peaks)) if v.tells_peak else ("not told", "")
    rows.add_row("in use at the peak", amount(peaks[0]), *told)
    pair = v.predicted_flops, v.compiled_flops
    rows.add_row("products and convolutions", *(amount(x, "FLOP") for x in pair), _ratio(*pair))
    if v.estimated_cycles is not None:
        rows.add_row("kernels", "", f"{v.estimated_cycles:.4g} cycles", "")
    console.print(rows)
    console.print()


def _strays(console: Console, title: str, strays: list[Stray]) -> None:
    if not strays:
        return
    sums: dict[tuple, list] = {}
    for s in strays:
        key = s.kind, s.axes, pattern(s.tensor), s.shape, s.source, s.only_sliced
        row = sums.setdefault(key, [0.0, 0.0])
        row[0] += s.wire_bytes
        row[1] += s.count
    rows = table(
        title,
        [
            ("sent", "right"),
            ("times", "right"),
            ("collective", "left"),
            ("axes", "left"),
            ("tensor", "left"),
            ("line", "left"),
        ],
    )
    listed = sorted(sums.items(), key=lambda row: -row[1][0])
    for (kind, axes, tensor, shape, source, only_sliced), (size_bytes, count) in listed[:_MOST]:
        what = f"{tensor} {'x'.join(map(str, shape))}{' (only sliced afterwards)' if only_sliced else ''}"
        rows.add_row(amount(size_bytes), f"{count:g}", kind, "+".join(axes), what, source or "not told")
    console.print(rows)
    if listed[_MOST:]:
        rest = sum(size_bytes for _, (size_bytes, _) in listed[_MOST:])
        console.print(f"and {len(listed) - _MOST} more kinds, {amount(rest)} together")
    console.print()


def _rematerialised(console: Console, v: Verification) -> None:
    if not v.rematerialised:
        return
    console.print(
        "XLA's partitioner knew no way between two layouts, gathered these tensors whole on every device, and cut them "
        "again (full rematerialisation). Pin the tensor, or what makes it, to one of the two layouts:"
    )
    for r in v.rematerialised:
        where = f" at {r.source}" if r.source else ""
        console.print(f"  {r.operation} {r.shape}{where}: from {r.before or 'one sharding'} to {r.after or 'another'}")
    console.print()

"""What a verification found: predictions beside what the compiler made of the plan, as data and as text."""

import dataclasses

from rich.console import Console

from autoshard.plans.text import pattern
from autoshard.printing import PAGE_WIDTH, TextConsole, amount, seconds, table
from autoshard.verify.figures import Flow, MemoryFigures, Rematerialisation, ScheduleFigures, Stray
from autoshard.verify.targets import CpuTarget

_MOST = 12
"""Rows of a table of strays."""
BYTES_TOLERANCE = 0.05
"""Share of all bytes on the wire by which predicted and compiled traffic over the same mesh axes may differ."""
MEMORY_TOLERANCE = 0.03
"""Share of the predicted memory by which the compiled one may exceed it."""
NEGLIGIBLE = 0.001
"""Share of all bytes below which a collective over axes that were not predicted is told, but confirms nothing less."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """A plan beside the program that a compiler made of it for one kind of devices.

    Attributes:
      plan, cluster: Their names. target: The device type compiled for. axes: The mesh.
      flows: Collectives by kind and axes.
      strays: Those without a counterpart, those that send most first.
      rematerialised: XLA's fall-backs to gathering a whole tensor.
      predicted_memory, compiled_memory: Of one device.
      reserved_bytes: What must be there for the program to run, with the gaps that the compiler leaves.
      predicted_reserved_bytes: The same as the plan has it; None for a plan that does not tell.
      schedule: The compiled schedule beside the plan's.
      predicted_flops, compiled_flops: Of matrix products and convolutions, per device and step.
      estimated_cycles: What XLA:TPU expects the kernels to take; None elsewhere.
      compile_s: Seconds from the trace to the compiled program.
      jax_version: Which JAX, and XLA, it was.
    """

    plan: str
    cluster: str
    target: str
    axes: tuple[tuple[str, int], ...]
    flows: tuple[Flow, ...]
    strays: tuple[Stray, ...]
    rematerialised: tuple[Rematerialisation, ...]
    predicted_memory: MemoryFigures
    compiled_memory: MemoryFigures
    reserved_bytes: float
    predicted_flops: float
    compiled_flops: float
    estimated_cycles: float | None
    compile_s: float
    jax_version: str
    schedule: ScheduleFigures
    predicted_reserved_bytes: float | None = None

    @property
    def predicted_bytes(self) -> float:
        """Bytes that a device is predicted to send in a step."""
        return sum(f.predicted_bytes for f in self.flows)

    @property
    def compiled_bytes(self) -> float:
        """Bytes that a device sends in a step of the compiled program."""
        return sum(f.compiled_bytes for f in self.flows)

    @property
    def traffic_disagreements(self) -> tuple[tuple[tuple[str, ...], float, float], ...]:
        """(mesh axes, predicted bytes, compiled bytes) where the two differ beyond tolerance."""
        most = max(self.predicted_bytes, self.compiled_bytes)
        found = []
        for axes in dict.fromkeys(f.axes for f in self.flows):
            flows = [f for f in self.flows if f.axes == axes]
            ours, theirs = sum(f.predicted_bytes for f in flows), sum(f.compiled_bytes for f in flows)
            if abs(ours - theirs) > (BYTES_TOLERANCE if ours else NEGLIGIBLE) * most:
                found.append((axes, ours, theirs))
        return tuple(found)

    @property
    def disagreements(self) -> tuple[str, ...]:
        """Where the two differ beyond tolerance, in words; empty if the prediction is confirmed."""
        found = []
        for axes, ours, theirs in self.traffic_disagreements:
            if not ours:
                found.append(
                    f"no collective over {_named(axes)} was predicted, and the program sends {amount(theirs)} there"
                )
            else:
                found.append(
                    f"over {_named(axes)}, {amount(ours)} were predicted, and the program sends {amount(theirs)}"
                )
        ours, theirs = self.predicted_memory.peak_bytes, self.compiled_memory.peak_bytes
        reserved = self.predicted_reserved_bytes
        if (self.tells_peak or reserved is None) and theirs > (1 + MEMORY_TOLERANCE) * ours:
            found.append(f"{amount(ours)} of memory were predicted, and the program needs {amount(theirs)}")
        if reserved is not None and self.reserved_bytes > (1 + MEMORY_TOLERANCE) * reserved:
            found.append(
                f"{amount(reserved)} of memory were predicted with the gaps between buffers, and the program reserves "
                f"{amount(self.reserved_bytes)}"
            )
        return tuple(found)

    @property
    def tells_peak(self) -> bool:
        """Whether the compiler tells the most in use at once, and not only what it reserves."""
        return self.compiled_memory.peak_bytes != self.reserved_bytes

    @property
    def is_confirmed(self) -> bool:
        """Whether the compiled program does what was predicted, within tolerance."""
        return not self.disagreements

    def text(self, width: int = PAGE_WIDTH) -> str:
        """The whole account for a terminal."""
        return _text(self, width)

    def __str__(self) -> str:
        return self.text()


def _named(axes: tuple[str, ...]) -> str:
    return "+".join(axes) or "no axis"


def _text(v: Verification, width: int) -> str:
    console = TextConsole(width)
    mesh = ", ".join(f"{name}={size}" for name, size in v.axes)
    console.print(
        f"Plan `{v.plan}` for cluster `{v.cluster}` on {mesh}, compiled for {v.target} by XLA of jax {v.jax_version}"
    )
    console.print()
    _flows(console, v)
    _figures(console, v)
    _schedule(console, v.schedule)
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
    hosts = ours.host_bytes, v.compiled_memory.host_bytes
    if any(hosts):
        rows.add_row("in host memory", *map(amount, hosts), _ratio(*hosts))
    pair = v.predicted_flops, v.compiled_flops
    rows.add_row("products and convolutions", *(amount(x, "FLOP") for x in pair), _ratio(*pair))
    if v.estimated_cycles is not None:
        rows.add_row("kernels", "", f"{v.estimated_cycles:.4g} cycles", "")
    console.print(rows)
    console.print()


def _schedule(console: Console, s: ScheduleFigures) -> None:
    ours, theirs = s.predicted, s.compiled
    if theirs is None:
        console.print(f"The step of the compiled schedule is not told: {s.not_replayed}.")
    else:
        rows = table(
            "One step as scheduled",
            [("", "left"), ("predicted", "right"), ("compiled", "right"), ("difference", "right")],
        )
        for label, field in _TIMES:
            pair = getattr(ours, field), getattr(theirs, field)
            rows.add_row(label, *map(seconds, pair), _ratio(*pair))
        if ours.host_s or theirs.host_s:
            pair = ours.host_s, theirs.host_s
            rows.add_row("waiting for the host", *map(seconds, pair), _ratio(*pair))
        console.print(rows)
    if s.beside_products:
        counts = ", ".join(f"{b.beside} of {b.count} {b.kind}" for b in s.beside_products)
        console.print(f"Collectives with a product between begin and end: {counts}")
    if s.chosen is not None:
        console.print(f"Scheduled for {s.chosen}")
        for other in s.candidates:
            if other != s.chosen:
                console.print(f"  instead of {other}")
    console.print()
    _exposed(console, s)


_TIMES = (
    ("step", "step_s"),
    ("kernels", "kernel_s"),
    ("collectives", "collective_s"),
    ("of these exposed", "exposed_s"),
    ("of these hidden", "hidden_s"),
)


def _exposed(console: Console, s: ScheduleFigures) -> None:
    if s.flow_times:
        rows = table(
            "What kernels wait for, by kind and axes",
            [
                ("collective", "left"),
                ("axes", "left"),
                ("predicted", "right"),
                ("of", "right"),
                ("compiled", "right"),
                ("of", "right"),
                ("difference", "right"),
            ],
        )
        for f in s.flow_times:
            ours, theirs = f.predicted_exposed_s, f.compiled_exposed_s
            times = seconds(ours), seconds(f.predicted_s), seconds(theirs), seconds(f.compiled_s)
            rows.add_row(f.kind, "+".join(f.axes), *times, _ratio(ours, theirs))
        console.print(rows)
        console.print()
    listed = [f for f in s.flows if f.exposed_s]
    if not listed:
        return
    rows = table(
        "What kernels wait for in the compiled schedule, by line",
        [
            ("exposed", "right"),
            ("hidden", "right"),
            ("times", "right"),
            ("collective", "left"),
            ("axes", "left"),
            ("tensor", "left"),
            ("line", "left"),
        ],
    )
    for f in listed[:_MOST]:
        times = seconds(f.exposed_s), seconds(f.hidden_s), f"{f.count:g}"
        rows.add_row(*times, f.kind, "+".join(f.axes), f.tensor, f.source or "not told")
    console.print(rows)
    if listed[_MOST:]:
        rest_s = sum(f.exposed_s for f in listed[_MOST:])
        console.print(f"and {len(listed) - _MOST} more kinds, {seconds(rest_s)} exposed together")
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

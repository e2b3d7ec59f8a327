"""A calibration as a table: what was measured beside what the catalogue says."""

import io

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoshard.calibration.probes import Measures, Probe
from autoshard.calibration.run import Calibrated
from autoshard.cluster import MeasuredCollective

_WIDTH = 118


def report(calibrated: Calibrated) -> str:
    """The table, for a terminal."""
    before, after = (c.groups[0].device_type for c in (calibrated.before, calibrated.cluster))
    rates = after.measured
    assert rates is not None
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name, side in (("figure", "left"), ("of", "left"), ("measured", "right"), ("spread", "right")):
        table.add_column(name, justify=side)
    table.add_column("before", justify="right")

    def add(figure: str, of: str, measured: str, spread: float | None, stated: str) -> None:
        table.add_row(figure, of, measured, "" if spread is None else f"{spread:.0%}", stated)

    def spread(measures: Measures, last_dim: float | None = None, dtype: str = "float32") -> float | None:
        """Of the probe of an array or square product of that size."""
        for probe, _, share in calibrated.seconds:
            if probe.measures is measures and probe.dtype == dtype and len(set(probe.shape)) == 1:
                if last_dim is None or probe.shape[-1] == last_dim:
                    return share
        return None

    add("launch", "", _seconds(after.launch_overhead_s), spread(Measures.LAUNCH), _seconds(before.launch_overhead_s))
    for dtype, curve in rates.product_flops_per_s:
        stated = _rate(before.matmul_flops_per_s(dtype), "FLOP/s")
        for flops, rate in curve.points:
            n = round((flops / 2) ** (1 / 3))
            own = rate * rates.narrow_share.at(n)
            add(
                f"product {dtype}", f"{n} x {n} x {n}", _rate(own, "FLOP/s"), spread(Measures.PRODUCT, n, dtype), stated
            )
    for n, share in rates.narrow_share.points:
        add("narrow product", f"least dimension {n:.0f}", f"{share:.2f} of it", None, "")
    for size_bytes, rate in rates.memory_bytes_per_s.points:
        stated = _rate(before.memory_bandwidth_bytes_per_s, "B/s")
        add("memory", _amount(size_bytes), _rate(rate, "B/s"), spread(Measures.MEMORY, size_bytes / 8), stated)
    stated = _rate(before.flops_per_s("float32"), "/s")
    add("arithmetic", "elements", _rate(rates.elementwise_per_s, "/s"), spread(Measures.ELEMENTWISE), stated)
    add("functions", "elements", _rate(rates.function_per_s, "/s"), spread(Measures.FUNCTION), stated)
    add("hidden", "memory or functions", f"{rates.hidden_share:.0%}", spread(Measures.BOTH), "100%")
    for size_bytes, rate in () if rates.transposed_bytes_per_s is None else rates.transposed_bytes_per_s.points:
        dim = round((size_bytes / 4) ** 0.5)
        add("transposition", _amount(size_bytes), _rate(rate, "B/s"), spread(Measures.TRANSPOSED, dim), "no time")
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, highlight=False)
    console.print(Text(f"{after.name}, {calibrated.cluster.num_devices} devices, {rates.calibration.date}"))
    console.print(table)
    if links := _links(calibrated):
        console.print()
        console.print(links)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def _links(calibrated: Calibrated) -> Table | None:
    """The collectives of every level; None for a single device."""
    levels = calibrated.cluster.slices()[0].levels
    stated = calibrated.before.slices()[0].levels
    if not any(level.link.collectives for level in levels):
        return None
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("collective")
    for name in (
        "level",
        "devices",
        "hop",
        "bandwidth",
        "separate",
        "ordered at",
        "spread",
        "hop before",
        "bandwidth before",
    ):
        table.add_column(name, justify="right")
    for index, (level, old) in enumerate(zip(levels, stated, strict=True)):
        for own in level.link.collectives:
            table.add_row(
                own.kind.value,
                str(level.link.level),
                str(own.size),
                _seconds(own.latency_s),
                _rate(own.bandwidth_bytes_per_s, "B/s"),
                f"{own.separate_share:.0%}",
                "" if own.inner_bytes_per_s is None else _rate(own.inner_bytes_per_s, "B/s"),
                f"{_spread(calibrated.seconds, index, own):.0%}",
                _seconds(old.link.latency_s),
                _rate(old.link.bandwidth_bytes_per_s, "B/s"),
            )
    return table


def _spread(seconds: tuple[tuple[Probe, float, float], ...], level: int, own: MeasuredCollective) -> float:
    """The median spread over the sizes of one collective."""
    key = level, own.kind, own.size
    spreads = sorted(s for p, _, s in seconds if (p.level, p.collective, p.size) == key)
    return spreads[len(spreads) // 2]


def _seconds(value: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value * 1e9:.3g} ns"


def _rate(value: float, unit: str) -> str:
    for scale, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:.3g} {name}{unit}"
    return f"{value:.3g} {unit}"


def _amount(size_bytes: float) -> str:
    return _rate(size_bytes, "B") if size_bytes >= 1e6 else f"{size_bytes / 1e3:.3g} kB"

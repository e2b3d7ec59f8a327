"""A calibration as a table: what was measured beside what the catalogue says."""

from rich.table import Table

from autoshard.calibration.probes import Measures, Probe
from autoshard.calibration.run import Calibrated
from autoshard.cluster import MeasuredCollective
from autoshard.printing import TextConsole, amount, seconds, table


def report(calibrated: Calibrated) -> str:
    """The table, for a terminal."""
    before, after = (c.groups[0].device_type for c in (calibrated.before, calibrated.cluster))
    rates = after.measured
    assert rates is not None
    rows = table(
        "", [("figure", "left"), ("of", "left"), *((name, "right") for name in ("measured", "spread", "before"))]
    )

    def add(figure: str, of: str, measured: str, spread: float | None, stated: str) -> None:
        rows.add_row(figure, of, measured, "" if spread is None else f"{spread:.0%}", stated)

    def spread(measures: Measures, last_dim: float | None = None, dtype: str = "float32") -> float | None:
        """Of the probe of an array or square product of that size."""
        for probe, _, share in calibrated.seconds:
            if probe.measures is measures and probe.dtype == dtype and len(set(probe.shape)) == 1:
                if last_dim is None or probe.shape[-1] == last_dim:
                    return share
        return None

    add("launch", "", seconds(after.launch_overhead_s), spread(Measures.LAUNCH), seconds(before.launch_overhead_s))
    for dtype, curve in rates.product_flops_per_s:
        stated = amount(before.matmul_flops_per_s(dtype), "FLOP/s")
        for flops, rate in curve.points:
            n = round((flops / 2) ** (1 / 3))
            own = rate * rates.narrow_share.at(n)
            add(
                f"product {dtype}",
                f"{n} x {n} x {n}",
                amount(own, "FLOP/s"),
                spread(Measures.PRODUCT, n, dtype),
                stated,
            )
    for n, share in rates.narrow_share.points:
        add("narrow product", f"least dimension {n:.0f}", f"{share:.2f} of it", None, "")
    for size_bytes, rate in rates.memory_bytes_per_s.points:
        stated = amount(before.memory_bandwidth_bytes_per_s, "B/s")
        add("memory", amount(size_bytes), amount(rate, "B/s"), spread(Measures.MEMORY, size_bytes / 8), stated)
    stated = amount(before.flops_per_s("float32"), "/s")
    add("arithmetic", "elements", amount(rates.elementwise_per_s, "/s"), spread(Measures.ELEMENTWISE), stated)
    add("functions", "elements", amount(rates.function_per_s, "/s"), spread(Measures.FUNCTION), stated)
    add("hidden", "memory or functions", f"{rates.hidden_share:.0%}", spread(Measures.BOTH), "100%")
    for size_bytes, rate in () if rates.transposed_bytes_per_s is None else rates.transposed_bytes_per_s.points:
        dim = round((size_bytes / 4) ** 0.5)
        add("transposition", amount(size_bytes), amount(rate, "B/s"), spread(Measures.TRANSPOSED, dim), "no time")
    console = TextConsole()
    console.print(f"{after.name}, {calibrated.cluster.num_devices} devices, {rates.calibration.date}")
    console.print(rows)
    if links := _links(calibrated):
        console.print()
        console.print(links)
    return console.text


def _links(calibrated: Calibrated) -> Table | None:
    """The collectives of every level; None for a single device."""
    levels = calibrated.cluster.slices()[0].levels
    stated = calibrated.before.slices()[0].levels
    if not any(level.link.collectives for level in levels):
        return None
    figures = ("level", "devices", "hop", "bandwidth", "separate", "ordered at", "spread", "hop before")
    rows = table("", [("collective", "left"), *((name, "right") for name in (*figures, "bandwidth before"))])
    for index, (level, old) in enumerate(zip(levels, stated, strict=True)):
        for own in level.link.collectives:
            rows.add_row(
                own.kind.value,
                str(level.link.level),
                str(own.size),
                seconds(own.latency_s),
                amount(own.bandwidth_bytes_per_s, "B/s"),
                f"{own.separate_share:.0%}",
                "" if own.inner_bytes_per_s is None else amount(own.inner_bytes_per_s, "B/s"),
                f"{_spread(calibrated.seconds, index, own):.0%}",
                seconds(old.link.latency_s),
                amount(old.link.bandwidth_bytes_per_s, "B/s"),
            )
    return rows


def _spread(timed: tuple[tuple[Probe, float, float], ...], level: int, own: MeasuredCollective) -> float:
    """The median spread over the sizes of one collective."""
    key = level, own.kind, own.size
    spreads = sorted(s for p, _, s in timed if (p.level, p.collective, p.size) == key)
    return spreads[len(spreads) // 2]

"""From the times of all probes to a cluster with measured figures."""

import dataclasses
import math
from collections.abc import Sequence

from autoshard.calibration.fit import (
    collective_figures,
    hidden_share,
    inner_rate,
    narrow_curve,
    product_curve,
    rate_curve,
    separate_share,
    transposed_curve,
    work_s,
)
from autoshard.calibration.probes import ELEMENTWISE_CHAIN, FUNCTION_CHAIN, NUM_INDEPENDENT, Measures, Probe, wide_dim
from autoshard.cluster import (
    Calibration,
    Cluster,
    CollectiveKind,
    Curve,
    DeviceType,
    Link,
    MeasuredCollective,
    MeasuredRates,
)

Found = Sequence[tuple[Probe, float, float]]
"""Each probe with its typical time, in seconds, and their spread."""


def measured_cluster(before: Cluster, found: Found, calibration: Calibration) -> Cluster:
    """`before`, whose devices are all of one type, with what was measured in it.

    Levels of the hardware that were not measured, such as links to other nodes, keep their figures.
    """
    launch_s = next(seconds for probe, seconds, _ in found if probe.measures is Measures.LAUNCH)
    device_type = measured_device(before.groups[0].device_type, found, launch_s, calibration)
    collectives = measured_collectives(found, launch_s)
    hardware = before.slices()[0]
    by_link: dict[Link, Link] = {
        level.link: dataclasses.replace(
            level.link,
            collectives=collectives[index],
            source=f"{level.link.source} Collectives: measured on {calibration.date}.",
        )
        for index, level in enumerate(hardware.levels)
        if index in collectives
    }
    known = lambda link: by_link.get(link, link)
    groups = tuple(
        dataclasses.replace(
            group, device_type=device_type, intra_node=known(group.intra_node), inter_node=known(group.inter_node)
        )
        for group in before.groups
    )
    return Cluster("calibrated", groups, known(before.between_groups))


def measured_device(device_type: DeviceType, found: Found, launch_s: float, calibration: Calibration) -> DeviceType:
    """The device type with measured rates and launch overhead."""
    seconds = {probe: s for probe, s, _ in found}
    products = {probe: s for probe, s in seconds.items() if probe.measures is Measures.PRODUCT}
    wide = wide_dim(device_type)
    moved = {2.0 * 4 * p.shape[0]: s for p, s in seconds.items() if p.measures is Measures.MEMORY}
    memory = rate_curve(moved, launch_s)
    singles = {p.shape: s for p, s in products.items() if p.dtype == "float32"}
    if device_type.is_gpu:  # elsewhere caches hold such matrices
        narrow = narrow_curve(singles, wide, launch_s, lambda shape: _moving_s(shape, memory))
    else:
        narrow = narrow_curve(singles, wide, launch_s)
    curves = []
    for dtype in dict.fromkeys(p.dtype for p in products):
        square = {p.shape[0]: s for p, s in products.items() if p.dtype == dtype and len(set(p.shape)) == 1}
        curves.append((dtype, product_curve(square, narrow, launch_s)))
    per_s = {
        measures: chain * p.rounds * p.shape[0] / work_s(s, launch_s)
        for measures, chain in ((Measures.FUNCTION, FUNCTION_CHAIN), (Measures.ELEMENTWISE, 2 * ELEMENTWISE_CHAIN))
        for p, s in seconds.items()
        if p.measures is measures
    }
    hidden = 1.0
    for probe, both_s in seconds.items():
        if probe.measures is Measures.BOTH:
            elements, moved_bytes = probe.shape[0], 2.0 * 4 * probe.shape[0]
            functions_s = FUNCTION_CHAIN * elements / per_s[Measures.FUNCTION]
            hidden = hidden_share(functions_s, moved_bytes / memory.at(moved_bytes), work_s(both_s, launch_s))
    copied, transposed = (
        {4.0 * math.prod(p.shape): s for p, s in seconds.items() if p.measures is measures}
        for measures in (Measures.COPY, Measures.TRANSPOSED)
    )
    rates = MeasuredRates(
        calibration,
        tuple(curves),
        narrow,
        memory,
        per_s[Measures.ELEMENTWISE],
        per_s[Measures.FUNCTION],
        hidden,
        transposed_curve(copied, transposed),
    )
    return dataclasses.replace(
        device_type,
        launch_overhead_s=launch_s,
        measured=rates,
        source=f"{device_type.source} Launch, `measured`: measured on {calibration.date}.",
    )


def _moving_s(shape: tuple[int, ...], memory: Curve) -> float:
    """What memory takes for a float32 product of (rows, summed, columns)."""
    rows, summed, columns = shape
    moved_bytes = 4.0 * (rows * summed + summed * columns + rows * columns)
    return moved_bytes / memory.at(moved_bytes)


def measured_collectives(found: Found, launch_s: float) -> dict[int, tuple[MeasuredCollective, ...]]:
    """The figures of every kind and size, by hardware level."""
    beside_s = next((s for probe, s, _ in found if probe.measures is Measures.BESIDE), 0.0)
    seconds: dict[tuple[int, CollectiveKind, int], dict[float, float]] = {}
    many_s: dict[tuple[int, CollectiveKind, int], float] = {}
    inner: dict[tuple[int, CollectiveKind, int], dict[float, float]] = {}
    for probe, s, _ in found:
        if probe.collective is not None and probe.measures is Measures.INDEPENDENT:
            many_s[probe.level, probe.collective, probe.size] = max(s - beside_s, 0.0)
        elif probe.collective is not None and probe.measures is Measures.INNER:
            inner.setdefault((probe.level, probe.collective, probe.size), {})[4.0 * math.prod(probe.shape)] = s
        elif probe.collective is not None:
            seconds.setdefault((probe.level, probe.collective, probe.size), {})[float(probe.shape[0])] = s
    levels: dict[int, tuple[MeasuredCollective, ...]] = {}
    for (level, kind, size), by_bytes in seconds.items():
        one_s, many = by_bytes[min(by_bytes)], many_s.get((level, kind, size))
        separate = 0.0 if many is None else separate_share(one_s, many, NUM_INDEPENDENT)
        inner_s = inner.get((level, kind, size))
        rate = inner_rate(by_bytes, inner_s) if inner_s else None
        figures = collective_figures(kind, size, by_bytes, launch_s, separate, rate)
        levels[level] = (*levels.get(level, ()), figures)
    return levels

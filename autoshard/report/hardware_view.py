"""The mesh on the hardware: which devices have which coordinates, and how many bytes each link carries."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence

from autoshard.cluster import CollectiveKind, LogicalMesh
from autoshard.cost.collectives import sent_by_level
from autoshard.plans.program_plan import ProgramPlan
from autoshard.printing import amount, seconds
from autoshard.report.colours import COLLECTIVES
from autoshard.report.figures import byte_bars
from autoshard.report.parts import Devices, Figure, Paragraph, Part, Table

_MOST_NODES, _MOST_DEVICES = 4, 64


@dataclasses.dataclass(frozen=True, slots=True)
class LinkTraffic:
    """What a device sends in a step over links of one level, for the collectives over some mesh axes.

    Attributes:
      axes: Of the mesh. level: Of the hardware; 0 inside a node. size: Devices that these links join.
      bandwidth_bytes_per_s: One-way, of one device. sent_bytes: By kind of collective.
    """

    axes: tuple[str, ...]
    level: int
    size: int
    bandwidth_bytes_per_s: float
    sent_bytes: tuple[tuple[str, float], ...]

    @property
    def total_bytes(self) -> float:
        """Of all kinds."""
        return sum(size for _, size in self.sent_bytes)


def link_traffic(plan: ProgramPlan) -> tuple[LinkTraffic, ...]:
    """The traffic of a program by mesh axes and hardware level, most first; its sum is `estimate.comm_bytes`."""
    sums: dict[tuple, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    for item in plan.estimate.communication:
        axes = [plan.logical_mesh.axis(name) for name in item.axes]
        for level, share in sent_by_level(CollectiveKind(item.kind), axes):
            sums[item.axes, level.link.level, level.link.bandwidth_bytes_per_s][item.kind] += share * item.wire_bytes
    found = [
        LinkTraffic(axes, level, _joined(plan.logical_mesh, axes, level), bandwidth, tuple(kinds.items()))
        for (axes, level, bandwidth), kinds in sums.items()
    ]
    return tuple(sorted(found, key=lambda t: -t.total_bytes))


def _joined(mesh: LogicalMesh, axes: Sequence[str], level: int) -> int:
    """How many devices along `axes` the links of a level join."""
    levels = [l for name in axes for l in mesh.axis(name).levels]
    return math.prod(l.size for l in levels if l.link.level == level)


def level_name(level: int) -> str:
    """A level of the hardware in words."""
    return {0: "inside a node", 1: "between nodes"}.get(level, f"level {level}")


def hardware_parts(plan: ProgramPlan, name: str) -> tuple[Part, ...]:
    """The drawing of the mesh, and the traffic; `name` is put before the names of figures."""
    traffic = link_traffic(plan)
    parts: list[Part] = [_devices(plan.logical_mesh, plan.devices_per_node)]
    if not traffic:
        return *parts, Paragraph("Nothing is sent: every device works by itself.")
    labels = [f"{'+'.join(t.axes)} {level_name(t.level)}" for t in traffic]
    model, legend = byte_bars(labels, [dict(t.sent_bytes) for t in traffic], COLLECTIVES)
    parts.append(
        Figure(f"{name}-links", "Bytes that each device sends in a step, by mesh axes and link", model, legend)
    )
    step_s = plan.estimate.step_s
    rows = tuple(
        (
            "+".join(t.axes),
            level_name(t.level),
            str(t.size),
            f"{amount(t.bandwidth_bytes_per_s)}/s",
            amount(t.total_bytes),
            seconds(t.total_bytes / t.bandwidth_bytes_per_s),
            f"{t.total_bytes / t.bandwidth_bytes_per_s / step_s:.1%}" if step_s else "-",
            ", ".join(f"{kind} {amount(size)}" for kind, size in sorted(t.sent_bytes, key=lambda s: -s[1])),
        )
        for t in traffic
    )
    columns = ("mesh axes", "link", "devices joined", "bandwidth", "sent", "at least", "of step", "by collective")
    note = "`at least` is the time that the bytes take at the link's stated bandwidth, without latencies."
    parts.append(
        Table("What each link carries in a step, for one device", columns, rows, frozenset({2, 3, 4, 5, 6}), note=note)
    )
    return tuple(parts)


def _devices(mesh: LogicalMesh, per_node: int) -> Devices:
    """The first nodes, with the coordinates of their devices."""
    coordinates = itertools.product(*(range(axis.size) for axis in mesh.axes))
    shown = min(mesh.num_devices, max(per_node, 1) * _MOST_NODES, _MOST_DEVICES)
    texts = [
        ", ".join(f"{axis.name} {at}" for axis, at in zip(mesh.axes, place, strict=True) if axis.size > 1) or "alone"
        for place in itertools.islice(coordinates, shown)
    ]
    size = max(per_node, 1)
    nodes = tuple((f"node {start // size}", tuple(texts[start : start + size])) for start in range(0, shown, size))
    left = mesh.num_devices - shown
    note = f"and {left} more devices, in the same order" if left else ""
    return Devices(f"{mesh}", nodes, note)

"""The mesh on the hardware: which devices have which coordinates, and how many bytes each link carries."""

import collections
import dataclasses
import itertools

from autoshard.cluster import LogicalMesh
from autoshard.placement.level_bytes import level_bytes
from autoshard.plans.placement_text import placement_line
from autoshard.plans.placing import flows_of
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
      axes: Of the mesh. level: Of the hardware; 0 inside a node.
      bandwidth_bytes_per_s: One-way, of one device. sent_bytes: By kind of collective.
    """

    axes: tuple[str, ...]
    level: int
    bandwidth_bytes_per_s: float
    sent_bytes: tuple[tuple[str, float], ...]

    @property
    def total_bytes(self) -> float:
        """Of all kinds."""
        return sum(size for _, size in self.sent_bytes)


def link_traffic(plan: ProgramPlan) -> tuple[LinkTraffic, ...]:
    """The traffic of a program by mesh axes and hardware level, most first; its sum is `estimate.comm_bytes`."""
    mesh, items = plan.logical_mesh, plan.estimate.collectives
    sums: dict[tuple[tuple[str, ...], int, float], dict[str, float]] = collections.defaultdict(dict)
    for axes, kind in dict.fromkeys((item.axes, item.kind) for item in items):
        flows = flows_of([item for item in items if (item.axes, item.kind) == (axes, kind)], mesh)
        for level in level_bytes(flows, mesh.axes):
            sums[axes, level.level, level.bandwidth_bytes_per_s][kind] = level.sent_bytes
    found = [LinkTraffic(*key, tuple(kinds.items())) for key, kinds in sums.items()]
    return tuple(sorted(found, key=lambda t: -t.total_bytes))


def level_name(level: int) -> str:
    """A level of the hardware in words."""
    return {0: "inside a node", 1: "between nodes"}.get(level, f"level {level}")


def hardware_parts(plan: ProgramPlan, name: str) -> tuple[Part, ...]:
    """The drawing of the mesh, and the traffic; `name` is put before the names of figures."""
    traffic = link_traffic(plan)
    parts: list[Part] = [_devices(plan.logical_mesh, plan.devices_per_node)]
    if line := placement_line(plan):
        parts.append(Paragraph(line[:1].upper() + line[1:] + "."))
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
            f"{amount(t.bandwidth_bytes_per_s)}/s",
            amount(t.total_bytes),
            seconds(t.total_bytes / t.bandwidth_bytes_per_s),
            f"{t.total_bytes / t.bandwidth_bytes_per_s / step_s:.1%}" if step_s else "-",
            ", ".join(f"{kind} {amount(size)}" for kind, size in sorted(t.sent_bytes, key=lambda s: -s[1])),
        )
        for t in traffic
    )
    columns = ("mesh axes", "link", "bandwidth", "sent", "at least", "of step", "by collective")
    note = "`at least` is the time that the bytes take at the link's stated bandwidth, without latencies."
    parts.append(
        Table("What each link carries in a step, for one device", columns, rows, frozenset({2, 3, 4, 5}), note=note)
    )
    return tuple(parts)


def _devices(mesh: LogicalMesh, per_node: int) -> Devices:
    """The first nodes, with the coordinates of their devices."""
    coordinates = list(itertools.product(*(range(axis.size) for axis in mesh.axes)))
    at = {device: place for place, device in zip(coordinates, mesh.order or range(mesh.num_devices), strict=True)}
    size = max(per_node, 1)
    shown = min(mesh.num_devices, size * _MOST_NODES, _MOST_DEVICES)
    texts = [
        ", ".join(f"{axis.name} {k}" for axis, k in zip(mesh.axes, at[device], strict=True) if axis.size > 1) or "alone"
        for device in range(shown)
    ]
    nodes = tuple((f"node {start // size}", tuple(texts[start : start + size])) for start in range(0, shown, size))
    left = mesh.num_devices - shown
    return Devices(f"{mesh}", nodes, f"and {left} more devices" if left else "")

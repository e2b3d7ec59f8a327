"""Draws which device is where, as listed and in the order that autoshard finds: docs/images/placement.png.

    python benchmarks/placement_picture.py

Above, 16 nodes under two spines, coloured by the group of the mesh axis that spans four nodes. Below, the 128 chips of
a torus, one group of 16 coloured. Orders are those for traffic along that axis alone; a plan's own may differ.
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from autoshard.cluster import Cluster, CollectiveKind, LogicalMesh
from autoshard.placement.flows import Flow
from autoshard.placement.place import listed_mesh, place

matplotlib.use("Agg")
ROOT = pathlib.Path(__file__).parents[1]
COLOURS = ("#4477aa", "#ee7733", "#228833", "#aa3377", "#cccccc")


def main() -> int:
    figure = plt.figure(figsize=(11, 4.9), constrained_layout=True)
    above, below = figure.subfigures(2, 1, height_ratios=(1.05, 1))
    spines, torus = (
        Cluster.from_file(ROOT / "configs" / "clusters" / f"{name}.yaml")
        for name in ("h100x128-two-spines", "tpu-v4-4x4x8")
    )
    part_of_node = spines.groups[0].tiers[0].part_of_node
    for axes, (title, mesh) in zip(above.subplots(1, 2), meshes(spines, {"data": 4, "tensor": 32}), strict=True):
        draw_spines(axes, title, np.array(mesh.device_numbers).reshape(4, 32), part_of_node)
    for axes, (title, mesh) in zip(below.subplots(1, 2), meshes(torus, {"data": 8, "tensor": 16}), strict=True):
        draw_torus(axes, title, np.array(mesh.device_numbers).reshape(8, 16)[0])
    figure.savefig(ROOT / "docs" / "images" / "placement.png", dpi=110)
    return 0


def meshes(cluster: Cluster, axes: dict[str, int]) -> list[tuple[str, LogicalMesh]]:
    """The mesh as listed and in order, each with what gathering 1 GB along its last axis takes."""
    (hardware,) = cluster.slices()
    flow = Flow(CollectiveKind.ALL_GATHER, ("tensor",), 1e9, 1.0)
    listed = listed_mesh(hardware, tuple(axes), tuple(axes.values()))
    assert listed is not None
    found = place(hardware, listed, [flow])
    shape = " x ".join(f"{a}={n}" for a, n in axes.items())
    told = lambda what, mesh: f"{what}: {shape}, 1 GB along tensor in {flow.seconds(mesh.axes) * 1e3:.1f} ms"
    return [(told("as listed", listed), listed), (told("in order", found.mesh), found.mesh)]


def draw_spines(axes: Any, title: str, groups: np.ndarray, part_of_node: Sequence[int]) -> None:
    """Nodes below their spine, coloured by group."""
    group_of = {int(device) // 8: g for g, group in enumerate(groups) for device in group}
    axes.set_title(title, fontsize=10)
    for spine in (0, 1):
        nodes = [n for n, part in enumerate(part_of_node) if part == spine]
        left = spine * 9.0
        axes.add_patch(plt.Rectangle((left, 2.1), 7.9, 0.6, facecolor="#eeeeee", edgecolor="#888888"))
        axes.text(left + 3.95, 2.4, f"spine {spine}", ha="center", va="center", fontsize=9)
        for k, node in enumerate(nodes):
            axes.plot([left + k + 0.45, left + k + 0.45], [1.0, 2.1], color="#bbbbbb", linewidth=1)
            axes.add_patch(plt.Rectangle((left + k, 0), 0.9, 1, facecolor=COLOURS[group_of[node]]))
            axes.text(left + k + 0.45, 0.5, str(node), ha="center", va="center", color="white", fontsize=9)
    axes.plot([7.9, 9.0], [2.4, 2.4], color="#cc3311", linewidth=2)
    axes.text(8.45, 2.95, "1/4", ha="center", color="#cc3311", fontsize=9)
    axes.set_xlim(-0.3, 17.3)
    axes.set_ylim(-0.5, 3.5)
    axes.set_aspect("equal")
    axes.axis("off")


def draw_torus(axes: Any, title: str, group: np.ndarray) -> None:
    """The four planes of 4 x 8 chips side by side, one group coloured."""
    axes.set_title(title, fontsize=10)
    chosen = set(group.tolist())
    for x in range(4):
        for y in range(4):
            for z in range(8):
                is_in = (x * 4 + y) * 8 + z in chosen
                axes.add_patch(plt.Circle((x * 5.2 + y, z * 0.8), 0.34, color=COLOURS[0] if is_in else "#d5d5d5"))
        axes.text(x * 5.2 + 1.5, -1.3, f"x = {x}", ha="center", fontsize=9)
    axes.set_xlim(-0.8, 19.4)
    axes.set_ylim(-1.8, 6.3)
    axes.set_aspect("equal")
    axes.axis("off")


if __name__ == "__main__":
    sys.exit(main())

"""The cluster room: devices, links, nodes, and the logical meshes that can be laid over them.

This room knows nothing of JAX, except for `Cluster.detect`, which asks it for the live devices.
"""

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import DeviceType, Link, Wires
from autoshard.cluster.host import Host
from autoshard.cluster.kernel_forms import KernelForms
from autoshard.cluster.measured import Calibration, CollectiveKind, Curve, MeasuredCollective, MeasuredRates
from autoshard.cluster.mesh import AxisLevel, LogicalMesh, MeshAxis
from autoshard.cluster.node_group import NodeGroup
from autoshard.cluster.pair_speeds import PairSpeeds
from autoshard.cluster.slices import Slice
from autoshard.cluster.tiers import Tier
from autoshard.cluster.uneven import Uneven
from autoshard.cluster.wiring import Torus

__all__ = [
    "AxisLevel",
    "Calibration",
    "Cluster",
    "CollectiveKind",
    "Curve",
    "DeviceType",
    "Host",
    "KernelForms",
    "Link",
    "LogicalMesh",
    "MeasuredCollective",
    "MeasuredRates",
    "MeshAxis",
    "NodeGroup",
    "PairSpeeds",
    "Slice",
    "Tier",
    "Torus",
    "Uneven",
    "Wires",
]

"""Small models and clusters for the tests of the stage search."""

from autoshard.cluster import AxisLevel, Cluster, DeviceType, Link, NodeGroup, Slice
from autoshard.pipelines.cost.interval_costs import IntervalCostTable
from autoshard.pipelines.cost.layers import Activation, Layers, SharedWeight
from autoshard.pipelines.cost.table import CostKey, CostTable, LayerCost, MeshOption
from autoshard.pipelines.search.replica_group import SearchContext
from autoshard.pipelines.search.topology import Topology

INSIDE = Link(1e-6, 1e11, 0, "made up")
BETWEEN = Link(5e-6, 1e10, 1, "made up")


def cluster(*sizes, memory=16e9, speeds=(2e12, 1e12), between=BETWEEN):
    """One node for each size; each of another type, with the given speeds."""
    groups = tuple(
        NodeGroup(
            f"node{i}", DeviceType(f"type{i}", {"float32": speed}, int(memory), 1e12, 0.0, "made up"), 1, n, INSIDE
        )
        for i, (n, speed) in enumerate(zip(sizes, speeds, strict=False))
    )
    return Cluster("small", groups, between if len(groups) > 1 else None)


def options(cluster, counts):
    """Meshes of so many devices on every slice that has them."""
    found = []
    for index, part in enumerate(cluster.slices()):
        for count in counts:
            if count <= part.num_devices:
                levels = (AxisLevel(count, part.levels[0].link),) if count > 1 else ()
                mesh = Slice(part.name, part.device_type, levels).logical_mesh({"data": count})
                found.append(MeshOption(index, mesh))
    return tuple(found)


def plain_cost(seconds, *, weight=0.0, residual=0.0, inputs=0.0):
    """A layer that takes `seconds` for one micro-batch: a third forward, a third backward, a third for weights."""
    third = seconds / 3
    return LayerCost(third, third, third, 0.0, weight, weight, 2 * weight, weight, residual, residual / 2, inputs, 0.0)


def plain_table(cluster, kinds, sizes, counts=(1,), **bytes_of_layer):
    """Layers of kind k take (k + 1) 3 ms for an example at 1 TFLOP/s; time in proportion to examples and 1 / speed."""
    found, costs = options(cluster, counts), {}
    for o, option in enumerate(found):
        speed = option.num_devices * option.mesh.device_type.flops_per_s("float32") / 1e12
        for kind in range(kinds):
            for size in sizes:
                costs[CostKey(kind, o, size)] = plain_cost(3e-3 * (kind + 1) * size / speed, **bytes_of_layer)
    return CostTable(found, costs)


def chain(kinds, example_bytes=0.0):
    """Layers each of which reads what the one before makes."""
    activations = tuple(Activation(i, (i + 1,), example_bytes) for i in range(len(kinds) - 1))
    return Layers(tuple(kinds), tuple(f"layer {i}" for i in range(len(kinds))), activations if example_bytes else ())


def random_layers(rng, num_layers, num_kinds=2):
    """A chain with a value that skips layers, and perhaps a weight read at both ends."""
    activations = [Activation(i, (i + 1,), 1e6) for i in range(num_layers - 1)]
    if num_layers > 3:
        activations.append(Activation(0, (2, num_layers - 1), 5e5, is_shared=bool(rng.integers(2))))
    shared = (SharedWeight((0, num_layers - 1), 3e7),) if rng.integers(2) else ()
    kinds = tuple(int(k) for k in rng.integers(0, num_kinds, num_layers))
    return Layers(kinds, tuple(f"layer {i}" for i in range(num_layers)), tuple(activations), shared)


def random_table(rng, cluster, sizes=(1, 2), counts=(1, 2), num_kinds=2):
    """Costs without any rule but that more devices are faster."""
    found, costs = options(cluster, counts), {}
    for kind in range(num_kinds):
        seconds, weight, residual = rng.uniform(1e-3, 4e-3), rng.uniform(5e7, 2e8), rng.uniform(2e8, 8e8)
        split = rng.dirichlet((3, 3, 2))
        for o, option in enumerate(found):
            n, speed = option.num_devices, option.mesh.device_type.flops_per_s("float32") / 1e12
            for m in sizes:
                f, b, w = split * seconds * m / n / speed * rng.uniform(0.9, 1.1)
                held = residual * m / n
                costs[CostKey(kind, o, m)] = LayerCost(
                    *(f, b, w, 1e-4 / n, weight / n, weight / n, 2 * weight / n, weight),
                    *(held, 0.4 * held, 0.1 * held, 0.3 * held),
                )
    return CostTable(found, costs)


def context(layers, table, cluster, *limits_bytes):
    """What the search of cuts needs."""
    limits = limits_bytes or tuple(s.device_type.memory_bytes for s in cluster.slices())
    return SearchContext(IntervalCostTable(layers, table), Topology(cluster, table), limits)

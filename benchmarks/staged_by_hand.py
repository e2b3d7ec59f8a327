"""GPT-3 175B in stages on 512 A100, on 512 H100 and on half of each: the searched plan, how good it is proven to be,
and on one kind of device settings as people write them.

    python benchmarks/staged_by_hand.py        # writes benchmarks/results/staged-by-hand.md

Megatron-LM's published settings for models of this size have 8 devices to a stage (tensor parallelism within a node),
8 or 16 pipeline stages and replicas over the rest, with interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473,
table 1).
Here each mesh of 4 or 8 devices, with 8 or 16 submeshes, every micro-batch size and every number of stages on a submesh
is cut as the search would, by the same cost model, memory being a hard limit; how a stage is sharded within its mesh is
planned for each layer. The best of each mesh size is told. Nothing ran on a GPU.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import weak_scaling

import autoshard
from autoshard.cluster import Cluster
from autoshard.pipelines.cost.interval_costs import IntervalCostTable
from autoshard.pipelines.cost.layers import Layers
from autoshard.pipelines.cost.pricing import price_layers
from autoshard.pipelines.cost.table import CostTable
from autoshard.pipelines.plan.arrange import default_sizes
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.candidate import Candidate
from autoshard.pipelines.search.options import PartitionEffort, StageOptions
from autoshard.pipelines.search.partition import best_partition
from autoshard.pipelines.search.replica_group import SearchContext
from autoshard.pipelines.search.search import search
from autoshard.pipelines.search.stage_memory import limits_bytes
from autoshard.pipelines.search.topology import Topology
from autoshard.pipelines.search.whale import even_cut
from autoshard.plans.options import PlanOptions

DEVICES, BATCH = 512, 768
EFFORT = PartitionEffort(most_enumerated=300, most_simulated=3)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting by hand: devices of a stage, stages, replicas, micro-batches, and its time."""

    devices: int
    submeshes: int
    chunks: int
    replicas: int
    micro_batch_size: int
    step_s: float

    def __str__(self) -> str:
        return (
            f"{self.devices} devices a stage, {self.submeshes} submeshes, stages on each: {self.chunks}, "
            f"{self.replicas} replicas, micro-batches of {self.micro_batch_size}"
        )


def by_hand(layers: Layers, table: CostTable, cluster: Cluster) -> Iterator[Setting]:
    """All settings that fit."""
    limits = limits_bytes(cluster, PlanOptions().memory_reserve)
    context = SearchContext(IntervalCostTable(layers, table), Topology(cluster, table), limits)
    sizes = sorted({key.micro_batch_size for key in table.costs})
    options = [o for o, x in enumerate(table.options) if x.num_devices in (4, 8) and len(x.mesh.axes) == 1]
    for option, submeshes, size, chunks in itertools.product(options, (8, 16), sizes, (1, 2, 3, 6, 12)):
        width = table.options[option].num_devices
        replicas = DEVICES // width // submeshes
        if submeshes * chunks > 96 or BATCH % (replicas * size):
            continue
        kind = ScheduleKind.INTERLEAVED if chunks > 1 else ScheduleKind.ONE_F_ONE_B
        number = BATCH // replicas // size
        one = Candidate((option,), (submeshes,), size, number, replicas, kind, chunks, 0.0, 0.0, 0.0)
        group = one.group(context, [number] * replicas)
        cut, _ = best_partition(context, group, EFFORT, [even_cut(layers.num_layers, group.num_stages)])
        if cut is not None:
            yield Setting(width, submeshes, chunks, replicas, size, cut.step_s)


def main() -> None:
    """Prices the layers, and writes the table."""
    priced_on = weak_scaling.cluster_of("mixed", weak_scaling.PRICED_DEVICES)
    examples = BATCH * weak_scaling.PRICED_DEVICES // DEVICES
    step, state, shapes = weak_scaling.program("175b", examples)
    sizes = default_sizes(examples, priced_on, StageOptions())
    priced = price_layers(step, state, shapes, priced_on, sizes, autoshard.PlanOptions(cache=False))
    lines = [
        "# GPT-3 175B in stages, by hand and searched",
        "",
        "`python benchmarks/staged_by_hand.py`, which says what is computed.",
        "",
    ]
    lines += ["| devices | how | step | of the plan | no plan below | gap |", "| --- " * 6 + "|"]
    for kind, name in weak_scaling.KINDS.items():
        cluster = weak_scaling.cluster_of(kind, DEVICES)
        table = weak_scaling.table_for(priced.table, priced_on, cluster)
        found = search(priced.layers, table, cluster, BATCH)
        shape = weak_scaling.shape_of(cluster, table, found.arrangement.pipelines)
        gap = 1 - found.bound_s / found.step_s
        proof = f"{found.bound_s:.2f} s | {gap:.1%}"
        lines.append(f"| {DEVICES} {name} | plan: {shape} | {found.step_s:.2f} s | 1.00 | {proof} |")
        if len(cluster.slices()) > 1:
            continue
        settings = sorted(by_hand(priced.layers, table, cluster), key=lambda s: s.step_s)
        for devices in (4, 8):
            of_size = [s for s in settings if s.devices == devices]
            for setting in (*of_size[:1], *[s for s in of_size if s.chunks == 1][:1]):
                ratio = setting.step_s / found.step_s
                lines.append(f"| {DEVICES} {name} | {setting} | {setting.step_s:.2f} s | {ratio:.2f} |  |  |")
    (weak_scaling.RESULTS / "staged-by-hand.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""A recommender on GPUs alone, on CPUs alone, and on both: the setting of Paddle's heterogeneous pipeline, predicted.

    python benchmarks/mixed_modes.py                # a table in Markdown, with all that it assumes

Paddle reports up to 2.1 times the throughput of GPUs alone and 3.3 times that of CPUs alone (Ao et al. 2021,
arXiv:2112.02752, abstract), without sizes of model and machines. Here are a click model as in its examples and machines
of that time; nothing is run, and the answer hangs on what is assumed, which is printed.

- GPUs alone: one node of eight V100 and its own two processors, which read data, hold the tables and look rows up, one
  batch after another (and, beside it, pipelined by this planner).
- CPUs alone: the CPU nodes; they look rows up and compute the dense part.
- Mixed: both; rows and gradients cross the network of the GPU node; placed and pipelined by this planner.
"""

import argparse
import dataclasses

from autoshard.cluster import Cluster, Host, NodeGroup
from autoshard.cluster.catalogue import catalogue
from autoshard.cost.id_distribution import IdDistribution
from autoshard.offloading.compare import compared
from autoshard.offloading.placement import placement_of
from autoshard.offloading.search import SearchOptions, search
from autoshard.offloading.situation import DenseWork, HostRates, Situation, TableUse, situation

BATCH_SIZE = 65_536
NUM_TABLES, PARAMETERS = 26, 33e9
HIDDEN = (1024, 512, 256, 1)
GPU_SHARE = 0.5
NODE = Host(
    num_cpus=40,
    memory_bytes=512 * 10**9,
    source=(
        "NVIDIA, DGX-1 data sheet: two Xeon E5-2698 v4 of 20 cores, 512 GB; Intel, E5-2698 v4: 4 channels of DDR4 at "
        "2,400 MT/s for each; 40 cores at 2.2 GHz x 2 units of AVX2 x 8 float32 x 2"
    ),
    memory_bandwidth_bytes_per_s=2 * 4 * 2400e6 * 8,
    flops_per_s=40 * 2.2e9 * 32,
    to_device=catalogue().link("PCIe3-x16", 0),
)


def flops_of_an_example(dim: int) -> float:
    """Forward and backward pass of the MLP over all vectors and 13 numbers: 6 for each weight."""
    widths = (NUM_TABLES * dim + 13, *HIDDEN)
    return 6.0 * sum(m * n for m, n in zip(widths[:-1], widths[1:], strict=True))


def setting(num_cpu_nodes: int, rates: HostRates, zipf: float, dim: int) -> Situation:
    """Eight V100, and the CPUs of their node and of others, whose rows cross the network."""
    nodes = 1 + num_cpu_nodes
    link = NODE.to_device if num_cpu_nodes == 0 else catalogue().link("InfiniBand-EDR-shared", 0)
    host = dataclasses.replace(
        NODE,
        num_cpus=nodes * NODE.num_cpus,
        memory_bytes=nodes * NODE.memory_bytes,
        memory_bandwidth_bytes_per_s=nodes * NODE.memory_bandwidth_bytes_per_s,
        flops_per_s=nodes * NODE.flops_per_s,
        to_device=link,
    )
    device = catalogue().device_type("V100-SXM2-32GB")
    group = NodeGroup("v100", device, 1, 8, catalogue().link("NVLink2", 0), host=host)
    flops = flops_of_an_example(dim) * BATCH_SIZE
    dense_s = flops / 8 / (GPU_SHARE * device.flops_per_s("float32"))
    dense = DenseWork(dense_s, memory_bytes=4e9, flops=flops)
    ids = IdDistribution(zipf)
    rows = round(PARAMETERS / NUM_TABLES / dim)
    tables = tuple(TableUse(f"table {n}", rows, 4 * dim, 8 * dim, BATCH_SIZE, ids) for n in range(NUM_TABLES))
    return situation(Cluster(f"v100x8 + {num_cpu_nodes} CPU nodes", (group,)), tables, dense, BATCH_SIZE, rates=rates)


def cpus_alone(num_cpu_nodes: int, rates: HostRates, zipf: float, dim: int) -> float:
    """Seconds of a step on CPU nodes without any GPU."""
    s = setting(num_cpu_nodes - 1, rates, zipf, dim)
    return next(row.step_s for row in compared(s, search(s)) if row.name == "CPUs alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zipf", type=float, default=1.05, help="exponent of how often rows are read")
    parser.add_argument(
        "--read-us", type=float, default=10.0, help="microseconds of a CPU to read and parse an example"
    )
    parser.add_argument("--dim", type=int, default=16, help="numbers of a row")
    arguments = parser.parse_args()
    rates, dim = HostRates(read_s=arguments.read_us * 1e-6, batch_s=0.0, table_s=0.0, worker_s=0.0), arguments.dim
    alone = placement_of(setting(0, rates, arguments.zipf, dim))
    sync_s = next(row.step_s for row in alone.compared if row.name == "tables on hosts, sync")
    tables = f"{NUM_TABLES} tables of {PARAMETERS / NUM_TABLES / dim:,.0f} x {dim} with Adagrad"
    mlp = f"MLP {'-'.join(map(str, HIDDEN))} ({flops_of_an_example(dim) / 1e6:.1f} MFLOP an example)"
    shares = f"GPUs reach {GPU_SHARE:.0%} and CPUs {rates.flops_share:.0%} of their float32 peak"
    reads = f"a CPU reads an example in {arguments.read_us:g} µs, finds an id in {rates.id_s * 1e9:g} ns"
    print(
        f"{tables} ({PARAMETERS * 8 / 1e9:,.0f} GB), {mlp}, {BATCH_SIZE:,} examples a step, Zipf {arguments.zipf}; "
        f"{shares}; {reads}, and moves a line in {rates.line_s * 1e9:g} ns; handing batches to CPUs is free. GPU node "
        f"and CPU nodes: {NODE.source}.\n"
    )
    print(
        f"GPUs alone: {sync_s * 1e3:.1f} ms a step one batch after another; {alone.step_s * 1e3:.1f} ms as planned.\n"
    )
    print("| CPU nodes | CPUs alone | mixed | mode | by GPUs alone | (as planned) | by CPUs alone |")
    print("|---:|---:|---:|---|---:|---:|---:|")
    for count in (1, 2, 3, 4, 8):
        mixed = placement_of(setting(count, rates, arguments.zipf, dim), SearchOptions(max_staleness=4))
        cpus_s = cpus_alone(count, rates, arguments.zipf, dim)
        print(
            f"| {count} | {cpus_s * 1e3:.1f} ms | {mixed.step_s * 1e3:.1f} ms | {mixed.best.execution.outline} | "
            f"{sync_s / mixed.step_s:.2f}x | {alone.step_s / mixed.step_s:.2f}x | "
            f"{cpus_s / mixed.step_s:.2f}x |"
        )


if __name__ == "__main__":
    main()

"""What dense layers at the host would do, predicted: by how much they lose, and where they win; and a layer in between.

    python benchmarks/host_layers.py                # tables in Markdown

Nothing is run. Two models, of 65,536 examples a step, on a DGX H100 with links of several speeds between its host and
each of its eight accelerators:

- DLRM with 1 TB of tables (`configs/dlrm_criteo_1tb.yaml`), one id of each table for an example;
- one table of 50 million rows of 1,024 numbers, of which an example reads one, projected to 32 numbers, with 10 ms of
  dense work behind it.

For each the best step without layers at the host is told (bags summed there where that is best), and the best one with
them, in modes with exact results and with a staleness of 2. Prices are those of `autoshard tables`: rows that layers or
sums at the host read are read by one thread, at 10 ns a line (an estimate).

The last table is of one more cut: a layer of the DLRM at the host between two parts on devices. Its input and output
cross the link forward, their gradients backward, in turn with the devices; each of both trips is handed over by the
host's thread once more (`HostRates.batch_s`).
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator

import jax

from autoshard.cluster import Cluster
from autoshard.cost.id_distribution import IdDistribution
from autoshard.offloading.of_step import place_tables
from autoshard.offloading.search import SearchOptions, search
from autoshard.offloading.situation import DenseWork, HostCut, Situation, TableUse, situation
from autoshard.train.config import load_config
from autoshard.train.planning import arguments
from autoshard.train.registry import staged_functions

CONFIG, CLUSTER = "configs/dlrm_criteo_1tb.yaml", "configs/clusters/h100x8_cpu.yaml"
BATCH_SIZE = 65_536
LINKS = {
    "PCIe 5 x16 each (64 GB/s)": 64e9,
    "PCIe 3 x8 each (7.9 GB/s)": 7.877e9,
    "PCIe 3 x8 for all eight (1 GB/s each)": 7.877e9 / 8,
    "10 Gb/s for all eight (156 MB/s each)": 1.25e9 / 8,
    "1 Gb/s for all eight (15.6 MB/s each)": 1.25e8 / 8,
}
"""Bytes a second to each accelerator. PCI-SIG: 8 GT/s a lane with 128b/130b, 32 GT/s for PCIe 5; the latter as in
autoshard/cluster/catalogue.yaml."""
EXACT, STALE = {"modes": ("sync", "pipelined")}, {"modes": ("sync", "pipelined", "async"), "max_staleness": 2}
BOTTOM, TOP = (13, 512, 256, 128), (479, 1024, 1024, 512, 256, 1)
"""Widths of the MLPs of the preset `criteo_1tb`."""


def dlrm() -> Situation:
    """Tables, cuts, and the dense part as it is planned for eight H100."""
    settings = load_config(CONFIG)
    functions = staged_functions(settings)
    state, batch = arguments(settings, functions)
    options = SearchOptions(pooling=True, host_layers=True)
    placed = place_tables(functions.step, state, batch, cluster=CLUSTER, ids=IdDistribution(1.05), search=options)
    return placed.situation


def wide() -> Situation:
    """A wide table in front of a projection."""
    width, narrow = 1024, 32
    own = TableUse("wide", 50_000_000, 4 * width, 8 * width, BATCH_SIZE, IdDistribution(1.05))
    flops = 2.0 * BATCH_SIZE * width * narrow
    cut = HostCut(("wide",), ("project",), BATCH_SIZE * 4 * narrow, flops, "float32", 8 * width * narrow)
    dense = DenseWork(10e-3, 4e9, 1e13)
    return situation(Cluster.from_file(CLUSTER), (own,), dense, BATCH_SIZE, updates_all_rows=True, cuts=(cut,))


def with_link(s: Situation, bytes_per_s: float) -> Situation:
    """The same with another link."""
    link = dataclasses.replace(s.to_device, bandwidth_bytes_per_s=bytes_per_s)
    return dataclasses.replace(s, host=dataclasses.replace(s.host, to_device=link))


def steps(s: Situation) -> Iterator[tuple[float, float, str, int]]:
    """For exact modes and for all: the step in ms without layers at the host and with them, and the best of the latter:
    its mode and how many parameters are at the host.
    """
    fixed = [tuple(cut.params) for cut in s.cuts if cut.params]
    for modes in (EXACT, STALE):
        without = search(s, SearchOptions(pooling=True, **modes)).best
        of = [search(s, SearchOptions(pooling=True, host_layers=one, **modes)).best for one in fixed]
        best, layers = min(zip(of, fixed, strict=True), key=lambda pair: pair[0].step_s)
        yield without.step_s * 1e3, best.step_s * 1e3, best.execution.mode, len(layers)


def round_trips(s: Situation) -> Iterator[tuple[str, float, float]]:
    """For each layer of the DLRM: what it costs at the host between two parts on devices, and spares these, in ms."""
    peak = s.mesh.device_type.matmul_flops_per_s("float32")
    for name, dims in (("bottom", BOTTOM), ("top", TOP)):
        for m, n in itertools.pairwise(dims):
            flops = 2.0 * BATCH_SIZE * m * n
            # down what the host has made, up what it reads, and their gradients the other way: m + n each way
            sent_s = 2 * (BATCH_SIZE / s.num_devices * 4 * (m + n) / s.to_device.bandwidth_bytes_per_s)
            fixed_s = 2 * s.rates.batch_s + 4 * s.to_device.latency_s
            cost_s = sent_s + fixed_s + 3 * flops / s.host_flops_per_s
            yield f"{name} {m} x {n}", cost_s * 1e3, 3 * flops / s.num_devices / peak * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    models = {"DLRM, 1 TB": dlrm(), "wide table": wide()}
    print("| model | link | exact: without | with | async: without | with | best with |")
    print("|---|---|---:|---:|---:|---:|---|")
    for (name, s), (link, rate) in itertools.product(models.items(), LINKS.items()):
        (a, b, *_), (c, d, mode, count) = steps(with_link(s, rate))
        times = " | ".join(f"{x:,.1f} ms" for x in (a, b, c, d))
        print(f"| {name} | {link} | {times} | {mode}, {count} parameters |", flush=True)
    s = models["DLRM, 1 TB"]
    print(f"\nDense part on the devices: {s.dense.step_s * 1e3:.2f} ms\n")
    print("| layer of the DLRM | at the host, between two cuts | spared on eight H100 |\n|---|---:|---:|")
    for name, cost_ms, spared_ms in round_trips(s):
        print(f"| {name} | {cost_ms:.2f} ms | {spared_ms:.4f} ms |")


if __name__ == "__main__":
    main()

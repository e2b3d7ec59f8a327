"""Whale's figures for V100 and P100 GPUs side by side, by simulation: planner, Algorithm 1, and even splitting.

    python benchmarks/whale_figures.py                      # all cases: benchmarks/results/whale-figures.md
    python benchmarks/whale_figures.py --only resnet50      # some of them, without writing the file

Source of the published gains: Jia et al., "Whale: Efficient Giant Model Training over Heterogeneous GPUs", USENIX ATC
2022, figures 17 (data parallelism, 8 V100 + 8 P100) and 18 (four stages, nested data parallelism, 4 V100 + 4 P100).
Nothing here ran on a GPU: layers are priced by autoshard's cost model, steps are replayed by its schedule simulator,
and every contender of a case uses the same prices.
"""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from autoshard_models import encoder, encoder_decoder, optimizers, recurrent, wide_resnet
from autoshard_models.zoo import FAMILIES

from autoshard import PlanOptions
from autoshard.cluster import Cluster, Link
from autoshard.pipelines.cost.interval_costs import IntervalCostTable
from autoshard.pipelines.cost.pricing import price_layers
from autoshard.pipelines.cost.table import CostTable
from autoshard.pipelines.schedule.peak_memory import peak_bytes
from autoshard.pipelines.schedule.simulate import step_time
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.arrangement import Arrangement, Pipeline, Stage, Submesh
from autoshard.pipelines.search.options import StageOptions
from autoshard.pipelines.search.replica_group import SearchContext, arrangement_step_s
from autoshard.pipelines.search.search import search
from autoshard.pipelines.search.stage_memory import limits_bytes
from autoshard.pipelines.search.step_durations import step_durations
from autoshard.pipelines.search.topology import Topology
from autoshard.pipelines.search.whale import cut_by_shares, even_cut, whale_order, whale_shares
from autoshard.train_step import TrainStep

ROOT = pathlib.Path(__file__).parents[1]
CLUSTER = ROOT / "configs" / "clusters" / "v100x8_p100x8.yaml"
RESULTS = ROOT / "benchmarks" / "results"
RESERVE = 0.1
NUM_STAGES, NUM_REPLICAS = 4, 2
ONE_F_ONE_B = ScheduleKind.ONE_F_ONE_B
EVEN, EVEN_WORK = "even splitting", "even work"
WHALE, WHALE_FITTED = "Algorithm 1", "Algorithm 1, moved on until the P100s fit"
SAME, PLANNER = "planner, same structure", "planner"
"""Contenders. Even splitting gives stages equally many layers; even work, equal times on one kind of device."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its batch, and what was published of it.

    Attributes:
      name: Unique. family, config, optimizer: The model, in float32, and how it is trained.
      batch: Examples of a step. micro_batch: Of a pipeline that is given; None: data parallelism.
      devices: GPUs of each type.
      gain: Published, uneven over even splitting; None: a case of our own.
    """

    name: str
    family: str
    config: Any
    optimizer: Any
    batch: int
    devices: int = 8
    micro_batch: int | None = None
    gain: float | None = None

    @property
    def ratio(self) -> float:
        """The V100's speed, of the P100's, that explains the published gain: from (V + P) / (2 P)."""
        return 2 * self.gain - 1 if self.gain else math.nan


RESNET50 = wide_resnet.WideResNetConfig(
    image_size=224, num_classes=1000, blocks_per_stage=(3, 4, 6, 3), base_channels=64
)
GNMT = recurrent.RecurrentConfig(
    vocab_size=32_000, context_length=50, num_layers=16, embed_dim=1024, state_dim=1024, hidden_dim=1024
)
BERT_LARGE = encoder.EncoderConfig(vocab_size=30_522, context_length=128, num_layers=24, num_heads=16, embed_dim=1024)
T5_LARGE = encoder_decoder.EncoderDecoderConfig(
    vocab_size=32_128,
    input_length=128,
    target_length=128,
    num_layers=24,
    num_heads=16,
    head_dim=64,
    embed_dim=1024,
    hidden_dim=2816,
)
CASES = (
    Case("resnet50-dp", "wide_resnet", RESNET50, optimizers.sgd(), 1024, gain=1.30),
    Case("gnmt-dp", "recurrent", GNMT, optimizers.adamw(), 2048, gain=1.27),
    Case("bert-large-dp", "encoder", BERT_LARGE, optimizers.adamw(), 1024, gain=1.45),
    Case("bert-large-pipeline", "encoder", BERT_LARGE, optimizers.adamw(), 256, 4, 8, gain=1.23),
    Case("bert-large-dp-memory", "encoder", BERT_LARGE, optimizers.adamw(), 1792),
    Case("t5-large-pipeline", "encoder_decoder", T5_LARGE, optimizers.adamw(), 256, 4, 8, gain=1.24),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A contender: its step, the greatest memory of a device of each slice, and what it is.

    `bound_s`: of a search, what no arrangement of its space goes below; `seconds`: what it took.
    """

    name: str
    step_s: float
    peaks_bytes: tuple[float, ...]
    description: str
    bound_s: float | None = None
    seconds: float = 0.0

    def fits(self, limits: Sequence[float]) -> bool:
        """Whether every device can hold it."""
        return all(p <= limit for p, limit in zip(self.peaks_bytes, limits, strict=True))


@dataclasses.dataclass(frozen=True)
class Record:
    """A case on one cluster: contenders, the speed of one V100 in P100s, and what devices may hold.

    Of data parallelism, a step of n examples on a slice takes `fixed_s + n each_s`, one entry a slice. What is fixed is
    reducing gradients inside the slice, exchanging them and the weights with the other one, and the update.
    """

    case: str
    emulated: float | None
    speed_ratio: float
    limits_bytes: tuple[float, ...]
    outcomes: tuple[Outcome, ...]
    fixed_s: tuple[float, float] | None = None
    each_s: tuple[float, float] | None = None

    @property
    def ideal(self) -> float:
        """The gain over even splitting if nothing but computation took time."""
        return (1 + self.speed_ratio) / 2

    def possible(self, speed_ratio: float) -> float:
        """The gain over even splitting of the best shares in whole examples a device, what is fixed counted.

        Args:
          speed_ratio: Of a V100 to a P100, in place of the record's.
        """
        if self.fixed_s is None or self.each_s is None:
            return (1 + speed_ratio) / 2
        case = next(c for c in CASES if c.name == self.case)
        (v100_s, p100_s), each_s = self.fixed_s, self.each_s[0]

        def step_s(share: int) -> float:
            return max(v100_s + share * each_s, p100_s + (case.batch - share) * speed_ratio * each_s)

        return step_s(case.batch // 2) / min(step_s(n) for n in range(0, case.batch + 1, case.devices))

    def outcome(self, name: str) -> Outcome:
        """A contender by its name."""
        return next(o for o in self.outcomes if o.name == name)


def mixed_cluster(devices: int, emulated: float | None) -> Cluster:
    """The mixed cluster of the paper, with so many GPUs of each type.

    Args:
      devices: Of each type; they share the node's 50 Gb/s.
      emulated: Where given, P100s are V100s slowed down in everything, peak rates, memory's bandwidth and launches, by
        this ratio; their memory and links stay.
    """
    whole = Cluster.from_file(CLUSTER)
    v100, p100 = whole.groups
    between = whole.between_groups
    shared = v100.devices_per_node / devices
    link = Link(between.latency_s, between.bandwidth_bytes_per_s * shared, between.level, between.source)
    if emulated:
        fast = v100.device_type
        slow = dataclasses.replace(
            p100.device_type,
            name=f"P100 at 1/{emulated:.3g} V100",
            peak_flops_per_s=tuple((kind, rate / emulated) for kind, rate in fast.peak_flops_per_s),
            memory_bandwidth_bytes_per_s=fast.memory_bandwidth_bytes_per_s / emulated,
            launch_overhead_s=fast.launch_overhead_s * emulated,
        )
        p100 = dataclasses.replace(p100, device_type=slow)
    groups = tuple(dataclasses.replace(g, devices_per_node=devices) for g in (v100, p100))
    return Cluster(f"v100x{devices}_p100x{devices}", groups, link)


def program(case: Case) -> tuple[TrainStep, Any, Any]:
    """The training step, and the shapes of its state and its batch."""
    family = FAMILIES[case.family]
    objective = family.objective(case.config)

    def loss(params: Any, mutable: Any, batch: Any, rng: Any) -> Any:
        return objective.loss(params, mutable, batch, rng if objective.is_random else None)

    step = TrainStep(loss, case.optimizer, has_mutable=True)

    def make() -> Any:
        params, mutable = objective.init(jax.random.key(0))
        return step.init(params, jax.random.key(1), mutable)

    return step, jax.eval_shape(make), family.batch_shapes(case.config, case.batch)


@dataclasses.dataclass(frozen=True)
class Bench:
    """A case with its layers priced on one cluster."""

    case: Case
    cluster: Cluster
    context: SearchContext

    def option(self, index: int, num_devices: int) -> int:
        """The mesh of one axis with so many devices of a slice."""
        options = self.context.topology.table.options
        return next(
            n
            for n, o in enumerate(options)
            if o.slice == index and o.num_devices == num_devices and len(o.mesh.axes) == 1 and not o.shards_weights
        )

    def layer_times_s(self, index: int, size: int, num_devices: int = 1) -> list[float]:
        """Of each layer, the time of a micro-batch on devices of a slice."""
        costs = self.context.intervals.layer_costs(self.option(index, num_devices), size)
        return [c.forward_s + c.backward_s + c.weight_s for c in costs]

    def outcome(
        self, name: str, arrangement: Arrangement, bound_s: float | None = None, seconds: float = 0.0
    ) -> Outcome:
        """A contender with its time and memory."""
        step_s, peaks = arrangement_step_s(self.context, arrangement), peaks_of(self.context, arrangement)
        return Outcome(name, step_s, peaks, describe(self.context, arrangement), bound_s, seconds)


def prepare(case: Case, cluster: Cluster, sizes: Sequence[int]) -> Bench:
    """Prices the layers of a case."""
    step, state, batch = program(case)
    options = PlanOptions(cache=False, mesh_limit_s=10)
    priced = price_layers(step, state, batch, cluster, sizes, options)
    context = SearchContext(
        IntervalCostTable(priced.layers, priced.table), Topology(cluster, priced.table), limits_bytes(cluster, RESERVE)
    )
    return Bench(case, cluster, context)


def peaks_of(context: SearchContext, arrangement: Arrangement) -> tuple[float, ...]:
    """For each slice, the greatest memory that a device of it needs; zero where it is left out."""
    most = [0.0] * len(context.topology.slices)
    step = step_durations(context.intervals, context.topology, arrangement)
    for pipeline, durations in zip(arrangement.pipelines, step.pipelines, strict=True):
        for submesh, peak in zip(pipeline.submeshes, peak_bytes(durations), strict=True):
            most[submesh.slice] = max(most[submesh.slice], float(peak))
    return tuple(most)


def describe(context: SearchContext, arrangement: Arrangement) -> str:
    """Shares of the batch, stages and meshes: pipelines that are alike are told once."""
    alike: dict[str, int] = {}
    for p in arrangement.pipelines:
        names = [
            f"{context.topology.slices[submesh.slice].name}{'' if n == 1 else f' x {n}'}"
            for submesh in p.submeshes
            for n in [context.topology.num_devices(submesh)]
        ]
        layers = [f"{s.stop - s.start}{'r' if s.rematerialise else ''}" for s in p.stages]
        text = f"{p.num_micro_batches} x {p.micro_batch_size} on {', '.join(names)}"
        alike[f"{text} ({', '.join(layers)} layers)"] = alike.get(f"{text} ({', '.join(layers)} layers)", 0) + 1
    return "; ".join(f"{n} x [{text}]" if n > 1 else text for text, n in alike.items())


def data_parallel(bench: Bench, shares: Sequence[int], *, again: Sequence[bool] = (False, False)) -> Arrangement:
    """Each slice one data-parallel replica of the whole model, with its share of the batch in one micro-batch."""
    stop = bench.context.intervals.layers.num_layers
    pipelines = []
    for index, share in enumerate(shares):
        submesh = bench.context.topology.submesh(bench.option(index, bench.case.devices), 0)
        pipelines.append(Pipeline((submesh,), (Stage(0, stop, again[index]),), share, 1, ONE_F_ONE_B))
    return Arrangement(tuple(pipelines))


def nested(bench: Bench, cut: Sequence[int]) -> Arrangement:
    """Replicas of four stages, each stage on one GPU, those with more memory first."""
    case, topology = bench.case, bench.context.topology
    own = [index for index in range(2) for _ in range(NUM_STAGES // 2)]
    memory = [bench.context.limits_bytes[index] for index in own]
    order = [own[k] for k in whale_order(memory)]
    stages = tuple(Stage(i, j) for i, j in zip(cut, cut[1:], strict=False))
    number = case.batch // NUM_REPLICAS // case.micro_batch
    pipelines, taken = [], [0, 0]
    for _ in range(NUM_REPLICAS):
        submeshes: list[Submesh] = []
        for index in order:
            submeshes.append(topology.submesh(bench.option(index, 1), taken[index]))
            taken[index] += 1
        pipelines.append(Pipeline(tuple(submeshes), stages, case.micro_batch, number, ONE_F_ONE_B))
    return Arrangement(tuple(pipelines))


def whale_split(bench: Bench, replica_bytes: float) -> tuple[int, int]:
    """Algorithm 1's shares of the batch, equal for the devices of a slice.

    Args:
      bench: The case.
      replica_bytes: Memory of a device with an equal share, as a profiler tells; it is taken to grow with the share.
    """
    devices = [index for index in range(2) for _ in range(bench.case.devices)]
    flops = [bench.cluster.slices()[index].device_type.flops_per_s("float32") for index in devices]
    memory = [bench.context.limits_bytes[index] for index in devices]
    shares = whale_shares(flops, memory, 1.0, replica_bytes * len(devices))
    first = round(sum(shares[: bench.case.devices]) * bench.case.batch / bench.case.devices) * bench.case.devices
    return first, bench.case.batch - first


def whale_cut(bench: Bench) -> tuple[int, ...]:
    """Algorithm 1's stages: by peak rates, in the order of memory."""
    order = [0] * (NUM_STAGES // 2) + [1] * (NUM_STAGES // 2)
    flops = [bench.cluster.slices()[index].device_type.flops_per_s("float32") for index in order]
    rooms = [bench.context.limits_bytes[index] for index in order]
    costs = bench.context.intervals.layer_costs(bench.option(0, 1), bench.case.micro_batch)
    held = sum(
        c.weight_bytes + c.gradient_bytes + c.optimizer_bytes / NUM_REPLICAS + NUM_STAGES * c.residual_bytes
        for c in costs
    )
    return cut_by_shares(bench.layer_times_s(0, bench.case.micro_batch), whale_shares(flops, rooms, 1.0, held))


def searched(bench: Bench, name: str, options: StageOptions) -> Outcome:
    """What the planner finds."""
    began = time.process_time()
    options = dataclasses.replace(options, limits_bytes=bench.context.limits_bytes)
    table = bench.context.topology.table
    found = search(bench.context.intervals.layers, table, bench.cluster, bench.case.batch, options)
    return bench.outcome(name, found.arrangement, found.bound_s, time.process_time() - began)


def share_sizes(bench: Bench) -> set[int]:
    """Whole shares to price, one micro-batch a slice, in multiples of the devices: about where both slices take equally
    long, and those of Algorithm 1.
    """
    case, (fixed_s, each_s) = bench.case, pace(bench)
    balanced = (fixed_s[1] - fixed_s[0] + case.batch * each_s[1]) / sum(each_s)
    first = math.floor(balanced / case.devices) * case.devices
    found = {first, first + case.devices, *whale_split(bench, max(even_outcome(bench).peaks_bytes))}
    return found | {case.batch - n for n in found}


def even_outcome(bench: Bench) -> Outcome:
    """Data parallelism with half of the batch on each slice."""
    return bench.outcome(EVEN, data_parallel(bench, (bench.case.batch // 2, bench.case.batch // 2)))


def with_sizes(bench: Bench, sizes: Iterable[int]) -> Bench:
    """The same with further sizes of micro-batches priced."""
    table = bench.context.topology.table
    known = {key.micro_batch_size for key in table.costs}
    more = prepare(bench.case, bench.cluster, sorted(set(sizes) - known))
    both = CostTable(table.options, {**table.costs, **more.context.topology.table.costs})
    context = SearchContext(
        IntervalCostTable(bench.context.intervals.layers, both),
        Topology(bench.cluster, both),
        bench.context.limits_bytes,
    )
    return dataclasses.replace(bench, context=context)


def speed_ratio_of(case: Case, cluster: Cluster) -> float:
    """How much faster one V100 runs the model than one P100, on a micro-batch or an equal share, each by itself."""
    size = case.micro_batch or case.batch // cluster.num_devices
    single = tuple(dataclasses.replace(g, devices_per_node=1) for g in cluster.groups)
    alone = prepare(case, dataclasses.replace(cluster, groups=single), (size,))
    v100_s, p100_s = (sum(alone.layer_times_s(index, size)) for index in range(2))
    return p100_s / v100_s


def pace(bench: Bench) -> tuple[tuple[float, float], tuple[float, float]]:
    """What is fixed of a data-parallel step on each slice, and the time of one more example: from two shares."""
    half = bench.case.batch // 2
    fixed, each = [], []
    for index in range(2):
        steps = []
        for size in (half // 2, half):
            arrangement = data_parallel(bench, (size, size))
            step = step_durations(bench.context.intervals, bench.context.topology, arrangement, [index])
            steps.append(step_time(step))
        each.append((steps[1] - steps[0]) / (half - half // 2))
        fixed.append(steps[1] - half * each[-1])
    return (fixed[0], fixed[1]), (each[0], each[1])


def measure(case: Case, emulated: float | None) -> Record:
    """All contenders of a case on one cluster."""
    cluster = mixed_cluster(case.devices, emulated)
    speed_ratio = speed_ratio_of(case, cluster)
    if case.micro_batch is not None:
        return measure_pipelines(case, cluster, emulated, speed_ratio)
    equal = case.batch // cluster.num_devices
    first = prepare(case, cluster, (equal, case.batch // 4, case.batch // 2))
    if case.gain is None:
        return measure_memory(first, speed_ratio)
    bench = with_sizes(first, share_sizes(first))
    even = even_outcome(bench)
    outcomes = (
        even,
        bench.outcome(WHALE, data_parallel(bench, whale_split(bench, max(even.peaks_bytes)))),
        searched(bench, SAME, StageOptions(num_stages=1)),
        searched(bench, PLANNER, StageOptions()),
    )
    return Record(case.name, emulated, speed_ratio, bench.context.limits_bytes, outcomes, *pace(bench))


def measure_pipelines(case: Case, cluster: Cluster, emulated: float | None, speed_ratio: float) -> Record:
    """Contenders of a case of pipelines."""
    size = case.micro_batch
    bench = prepare(case, cluster, (size // 2, size, 2 * size, 4 * size))
    work = bench.layer_times_s(0, size)
    restricted = StageOptions(
        num_stages=NUM_STAGES, micro_batch_sizes=(size,), schedules=(ONE_F_ONE_B,), most_devices_per_stage=1
    )
    outcomes = (
        bench.outcome(EVEN, nested(bench, even_cut(len(work), NUM_STAGES))),
        bench.outcome(EVEN_WORK, nested(bench, cut_by_shares(work, [1 / NUM_STAGES] * NUM_STAGES))),
        bench.outcome(WHALE, nested(bench, whale_cut(bench))),
        searched(bench, SAME, restricted),
        searched(bench, PLANNER, StageOptions()),
    )
    return Record(case.name, emulated, speed_ratio, bench.context.limits_bytes, outcomes)


def measure_memory(first: Bench, speed_ratio: float) -> Record:
    """Contenders of a case of data parallelism whose shares by speed do not fit."""
    case, half, few = first.case, first.case.batch // 2, first.case.batch // 4
    peaks = [peaks_of(first.context, data_parallel(first, (size, size)))[1] for size in (few, half)]
    each = (peaks[1] - peaks[0]) / (half - few)
    room = first.context.limits_bytes[1] - peaks[0]
    most = few + int(room / each) // case.devices * case.devices
    sizes = share_sizes(first)
    halves = {n // 2 // case.devices * case.devices for n in sizes}
    bench = with_sizes(first, sizes | {most, case.batch - most} | halves | {n + case.devices for n in halves})
    by_rule = whale_split(bench, peaks[1])
    outcomes = (
        bench.outcome(EVEN, data_parallel(bench, (half, half))),
        bench.outcome(WHALE, data_parallel(bench, by_rule)),
        bench.outcome(WHALE_FITTED, data_parallel(bench, (case.batch - most, most))),
        searched(bench, SAME, StageOptions(num_stages=1)),
        searched(bench, PLANNER, StageOptions()),
    )
    return Record(case.name, None, speed_ratio, bench.context.limits_bytes, outcomes)


def ratios(case: Case, known: Mapping[tuple[str, float | None], Record]) -> Iterator[float | None]:
    """The speed ratios of a case: the catalogue's (None); what the published gain implies if only computation took
    time; and for data parallelism, where other things do, the least in hundredths with which that gain is possible.
    """
    yield None
    if case.gain is None:
        return
    yield case.ratio
    record = known.get((case.name, case.ratio))
    if record is not None and record.fixed_s is not None:
        yield next(r / 100 for r in itertools.count(100) if record.possible(r / 100) >= case.gain)


def gains_table(records: Sequence[Record]) -> str:
    """Gains over even splitting, as Markdown."""
    lines = [
        "| case | P100 | V100 : P100 | published | ideal | possible | Algorithm 1 | planner, same structure | planner "
        "| even step |",
        "| --- " * 10 + "|",
    ]
    known = {c.name: c for c in CASES}
    for r in records:
        case = known[r.case]
        if case.gain is None:
            continue
        baselines = [o for o in r.outcomes if o.name in (EVEN, EVEN_WORK)]
        for even in baselines:
            gains = [f"{even.step_s / r.outcome(name).step_s:.3f}" for name in (WHALE, SAME, PLANNER)]
            label = r.case if len(baselines) == 1 else f"{r.case}, over {even.name}"
            device = "catalogue" if r.emulated is None else f"emulated, V100 / {r.emulated:.2f}"
            cells = [label, device, f"{r.speed_ratio:.2f}", f"{case.gain:.2f}", f"{r.ideal:.3f}"]
            cells += ["" if r.fixed_s is None else f"{r.possible(r.speed_ratio):.3f}"]
            cells += [gains[0], f"**{gains[1]}**", gains[2], f"{even.step_s:.3f} s"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def memory_table(records: Sequence[Record]) -> str:
    """Steps and memory of the cases that memory binds, as Markdown."""
    lines = [
        "| contender | V100, of {:.3g} GB | P100, of {:.3g} GB | fits | step | shares |",
        "| --- " * 6 + "|",
    ]
    known = {c.name: c for c in CASES}
    for r in records:
        if known[r.case].gain is None:
            lines[0] = lines[0].format(*(limit / 1e9 for limit in r.limits_bytes))
            for o in r.outcomes:
                memory = [f"{p / 1e9:.2f} GB" for p in o.peaks_bytes]
                step = f"{o.step_s:.3f} s" if o.fits(r.limits_bytes) else f"({o.step_s:.3f} s)"
                cells = [o.name, *memory, "yes" if o.fits(r.limits_bytes) else "**no**", step, o.description]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def contenders_table(records: Sequence[Record]) -> str:
    """What every contender is, as Markdown."""
    lines = ["| case | contender | step | V100 | P100 | arrangement |", "| --- " * 6 + "|"]
    for r in records:
        device = "" if r.emulated is None else f", P100 = V100 / {r.emulated:.2f}"
        for o in r.outcomes:
            memory = [f"{p / 1e9:.2f} GB" for p in o.peaks_bytes]
            cells = [r.case + device, o.name, f"{o.step_s:.4f} s", *memory, o.description]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def read(path: pathlib.Path) -> dict[tuple[str, float | None], Record]:
    """The records on file, the newest of each case."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        data = json.loads(line)
        outcomes = tuple(Outcome(**{**o, "peaks_bytes": tuple(o["peaks_bytes"])}) for o in data["outcomes"])
        paces = {name: data[name] and tuple(data[name]) for name in ("fixed_s", "each_s")}
        record = Record(**{**data, **paces, "limits_bytes": tuple(data["limits_bytes"]), "outcomes": outcomes})
        found[record.case, record.emulated] = record
    return found


def main() -> None:
    """Measures what is asked and is not on file, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names hold one of these")
    parser.add_argument("--again", action="store_true", help="measure also what is on file")
    parser.add_argument("--table", action="store_true", help="write the tables of what is on file and stop")
    arguments = parser.parse_args()
    file = RESULTS / "whale-figures.jsonl"
    chosen = [c for c in CASES if not arguments.only or any(part in c.name for part in arguments.only)]
    known = read(file)
    for case in [] if arguments.table else chosen:
        for emulated in ratios(case, known):
            if (case.name, emulated) in known and not arguments.again:
                continue
            began = time.process_time()
            known[case.name, emulated] = record = measure(case, emulated)
            with file.open("a") as out:
                out.write(json.dumps(dataclasses.asdict(record)) + "\n")
            print(f"{case.name}: {time.process_time() - began:.0f} s of the processor", file=sys.stderr)
    known = read(file)
    records = [known[case.name, r] for case in CASES for r in ratios(case, known) if (case.name, r) in known]
    parts = [
        "# Whale's figures, simulated",
        "`python benchmarks/whale_figures.py`, which says what is computed. Gains are over even splitting.",
        gains_table(records),
        "Where memory binds: BERT-large, 1,792 sequences of 128, data parallelism on 8 V100 + 8 P100; a step in "
        "brackets would not fit.",
        memory_table(records),
        "What every contender is (`3 x 8 on v100, p100 x 4 (30, 21r layers)`: three micro-batches of eight through two "
        "stages, the second on four P100, computed again in the backward pass):",
        contenders_table(records),
    ]
    (RESULTS / "whale-figures.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()

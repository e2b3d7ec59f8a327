"""Whale's large classification (figures 13 to 16) with its annotations, by simulation.

    python benchmarks/whale_annotations.py                  # benchmarks/results/whale-annotations.md
    python benchmarks/whale_annotations.py --devices 8      # some of it, without writing the file

Source of the published figures: Jia et al., "Whale: Efficient Giant Model Training over Heterogeneous GPUs", USENIX ATC
2022: ResNet-50 with 100,000 and with 1,000,000 classes on 8, 16 and 32 V100. Nothing here ran on a GPU: every contender
is priced by autoshard's cost model on one cluster. What is assumed is in `ASSUMPTIONS`, and in the file of results.
"""

import argparse
import dataclasses
import math
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from autoshard_models.losses import cross_entropy
from autoshard_models.objective import nnx_objective
from autoshard_models.wide_resnet import WideResNet, WideResNetConfig, batch_shapes

import autoshard
from autoshard import PlanOptions, Schedule
from autoshard.cluster import Cluster, Link

ROOT = pathlib.Path(__file__).parents[1]
CLUSTER = ROOT / "configs" / "clusters" / "v100x8.yaml"
RESULTS = ROOT / "benchmarks" / "results" / "whale-annotations.md"
COUNTS = (8, 16, 32)
PER_DEVICE = 64
PUBLISHED_1 = 330.0
"""Samples a second of one V100 (figure 13)."""
ETHERNET = Link(30e-6, 50e9 / 8 / 8, 1, "50 Gb/s a node (Whale, section 5), shared by 8 GPUs; latency estimated")
ASSUMPTIONS = """\
- V100-SXM2-32GB, eight a node, NVLink 2 inside, 50 Gb/s Ethernet between nodes, shared by the eight (0.78 GB/s each).
- 64 images of 224 x 224 a GPU, float32, momentum SGD. The batch is not published; with 32, the published throughput of
  data parallelism on 32 GPUs would need more than the line rate.
- The device's speed is scaled (products and memory alike) such that one GPU makes the published 330 samples a second
  with 100,000 classes, so that communication weighs what it weighed there.
- All times add up (`Schedule.LEAST_MEMORY`): nothing hides behind kernels, as in Whale's shares of communication.
- One mesh axis over all GPUs, so that every contender has the same choice.
- Data parallelism is `autoshard.baselines.data_parallel`: weights on each GPU, gradients all-reduced.
- Hybrid is annotated as in the paper: `replicate` around the features, `split` around classifier and loss.
- SP2 splits the features that the classifier sums over; what follows is the planner's choice, while Whale all-reduces
  the logits, so that its SP2 costs more.
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A contender: what it does, with how many classes, and its published samples a second on `COUNTS` devices."""

    name: str
    num_classes: int
    form: str
    published: tuple[float | None, ...]


CASES = (
    Case("data parallelism", 100_000, "dp", (2270, 2850, 3620)),
    Case("hybrid", 100_000, "hybrid", (2570, 4730, 8800)),
    Case("free plan", 100_000, "free", (None, None, None)),
    Case("hybrid, SP1", 1_000_000, "hybrid", (1740, 3400, 6600)),
    Case("hybrid, SP2", 1_000_000, "sp2", (1080, 1670, 1760)),
    Case("free plan", 1_000_000, "free", (None, None, None)),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a contender on some devices.

    Attributes:
      step_s: Predicted. share: Of communication. synchronised_bytes: Of weights that all devices hold.
      why_not: Why there is no plan.
    """

    case: Case
    devices: int
    step_s: float = math.inf
    share: float = math.nan
    synchronised_bytes: float = math.nan
    why_not: str = ""

    @property
    def samples_per_s(self) -> float:
        """Throughput."""
        return PER_DEVICE * self.devices / self.step_s


class Annotated(WideResNet):
    """ResNet-50 whose features and classifier say how they run."""

    def features(self, images: jax.Array) -> jax.Array:
        """What the classifier reads, by the model's own code."""
        head, self.head = self.head, lambda x: x
        found = self(images, True)
        self.head = head
        return found


def resnet(num_classes: int) -> WideResNetConfig:
    """ResNet-50 (He et al. 2015) with so many classes."""
    return WideResNetConfig(image_size=224, num_classes=num_classes, blocks_per_stage=(3, 4, 6, 3), base_channels=64)


def loss_of(form: str, devices: int, num_classes: int) -> Callable[..., Any]:
    """The loss of a contender, annotated."""

    def loss(model: Annotated, batch: Any, _: Any) -> Any:
        if form in ("dp", "free"):
            return cross_entropy(model(batch["images"], True), batch["labels"]), {}
        with autoshard.replicate(devices):
            x = model.features(batch["images"])
        if form == "hybrid":
            with autoshard.split(devices, dims={"classes": num_classes}):
                return cross_entropy(model.head(x), batch["labels"]), {}
        with autoshard.split(devices, dims={"features": ("*head.kernel", 0)}):
            logits = model.head(x)
        return cross_entropy(logits, batch["labels"]), {}

    return loss


def cluster_of(devices: int, speed: float = 1.0) -> Cluster:
    """So many V100, eight a node, at a multiple of the catalogue's speed."""
    found = Cluster.from_file(CLUSTER)
    (group,) = found.groups
    device = dataclasses.replace(
        group.device_type,
        peak_flops_per_s=tuple((kind, flops * speed) for kind, flops in group.device_type.peak_flops_per_s),
        memory_bandwidth_bytes_per_s=group.device_type.memory_bandwidth_bytes_per_s * speed,
    )
    nodes, each = max(1, devices // 8), min(devices, 8)
    inter = ETHERNET if nodes > 1 else None
    group = dataclasses.replace(group, device_type=device, num_nodes=nodes, devices_per_node=each, inter_node=inter)
    return Cluster(f"whale-v100x{devices}", (group,), None)


def planned(case: Case, devices: int, speed: float) -> Outcome:
    """The plan of a contender."""
    config = resnet(case.num_classes)
    objective = nnx_objective(lambda rngs: Annotated(config, rngs=rngs), loss_of(case.form, devices, case.num_classes))
    step = autoshard.TrainStep(objective.loss, optax.sgd(0.1, momentum=0.9), has_mutable=True)

    def init(key: jax.Array) -> Any:
        params, mutable = objective.init(key)
        return step.init(params, mutable=mutable)

    state, batch = jax.eval_shape(init, jax.random.key(0)), batch_shapes(config, PER_DEVICE * devices)
    given = {
        "cluster": cluster_of(devices, speed),
        "mesh": {"data": devices},
        "donate_argnums": 0,
        "options": PlanOptions(schedule=Schedule.LEAST_MEMORY, mesh_limit_s=120, least_memory_s=0),
    }
    try:
        plan = (autoshard.baselines.data_parallel if case.form == "dp" else autoshard.plan)(step, state, batch, **given)
    except autoshard.AutoshardError as error:
        return Outcome(case, devices, why_not=str(error))
    whole = [a for a in plan.arguments if a.name.startswith("state.params") and not any(a.entries)]
    synchronised_bytes = float(sum(4 * math.prod(a.shape) for a in whole))
    return Outcome(case, devices, plan.estimate.step_s, plan.estimate.comm_s / plan.estimate.step_s, synchronised_bytes)


def speed_of_one() -> float:
    """The multiple of the catalogue's speed at which one GPU makes the published throughput.

    Of a step, a part falls as the speed rises and a part (launches) stays: two plans tell both.
    """
    case = dataclasses.replace(CASES[0], form="free")
    whole_s, half_s = planned(case, 1, 1.0).step_s, planned(case, 1, 0.5).step_s
    falling_s = half_s - whole_s
    return falling_s / (PER_DEVICE / PUBLISHED_1 - (whole_s - falling_s))


def report(outcomes: Sequence[Outcome], speed: float) -> str:
    """The results as Markdown."""
    by = {(o.case, o.devices): o for o in outcomes}
    counts = sorted({o.devices for o in outcomes})
    lines = [
        "# Whale's large classification, annotated",
        "",
        "Simulated by `python benchmarks/whale_annotations.py`; nothing ran on a GPU. Published: Jia et al., USENIX",
        "ATC 2022, figures 13 to 16.",
        "",
        ASSUMPTIONS.rstrip(),
        f"- The scale of the device's speed comes to {speed:.2f}.",
        "",
        "## Samples a second (figures 13 to 15)",
        "",
        "| classes | contender | " + " | ".join(f"{n} V100: ours | published" for n in counts) + " |",
        "|---|---|" + "--:|--:|" * len(counts),
    ]
    for case in CASES:
        row = []
        for n in counts:
            o, published = by[case, n], case.published[COUNTS.index(n)]
            row += [
                "out of memory" if o.why_not else f"{o.samples_per_s:,.0f}",
                "" if published is None else f"{published:,.0f}",
            ]
        lines.append(f"| {case.num_classes:,} | {case.name} | {' | '.join(row)} |")
    dp, hybrid, free, sp1, sp2, _ = CASES
    lines += ["", "## Gains", "", "| | " + " | ".join(f"{n}: ours | published" for n in counts) + " |"]
    lines.append("|---|" + "--:|--:|" * len(counts))
    for name, one, other in (
        ("hybrid over data parallelism, 100,000 classes", hybrid, dp),
        ("free plan over hybrid, 100,000 classes", free, hybrid),
        ("SP1 over SP2, 1,000,000 classes", sp1, sp2),
    ):
        row = []
        for n in counts:
            k = COUNTS.index(n)
            ours = by[one, n].samples_per_s / by[other, n].samples_per_s
            pair = one.published[k], other.published[k]
            row += [f"{ours:.2f}", f"{pair[0] / pair[1]:.2f}" if pair[0] and pair[1] else ""]
        lines.append(f"| {name} | {' | '.join(row)} |")
    shares = {dp: (0.12, 0.44, 0.645), hybrid: (0.068, 0.077, 0.10)}
    lines += [
        "",
        "## Share of communication in a step (figure 16)",
        "",
        "| | " + " | ".join(f"{n}: ours | published" for n in counts) + " |",
    ]
    lines.append("|---|" + "--:|--:|" * len(counts))
    for case, published in shares.items():
        row = [x for n in counts for x in (f"{by[case, n].share:.3f}", f"{published[COUNTS.index(n)]:.3f}")]
        lines.append(f"| {case.name} | {' | '.join(row)} |")
    n = counts[-1]
    less = 1 - by[hybrid, n].synchronised_bytes / by[dp, n].synchronised_bytes
    lines += [
        "",
        "Whale's shares of hybrid are those of its bridge, the features that are gathered; ours, of all communication.",
        "",
        f"Weights that are synchronised: {by[dp, n].synchronised_bytes / 1e6:.0f} MB under data parallelism, "
        f"{by[hybrid, n].synchronised_bytes / 1e6:.0f} MB under hybrid: {less:.1%} less (published: 89.7 %).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Plans all contenders and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", choices=COUNTS, default=list(COUNTS), help="numbers of GPUs")
    chosen = parser.parse_args()
    started = time.perf_counter()
    speed = speed_of_one()
    print(f"speed {speed:.3f} after {time.perf_counter() - started:.0f} s", flush=True)
    outcomes = []
    for devices in chosen.devices:
        for case in CASES:
            outcome = planned(case, devices, speed)
            outcomes.append(outcome)
            told = outcome.why_not or f"{outcome.samples_per_s:,.0f} samples/s, {outcome.share:.3f} communication"
            print(
                f"{devices} {case.num_classes:,} {case.name}: {told} ({time.perf_counter() - started:.0f} s)",
                flush=True,
            )
    text = report(outcomes, speed)
    print(text)
    if chosen.devices == list(COUNTS):
        RESULTS.write_text(text)


if __name__ == "__main__":
    sys.exit(main())

"""Uneven shares and uneven cuts on devices of really unequal speed, against even ones.

    python benchmarks/unequal_devices.py [--ratios 1.5,2,3] [--rounds 7]

Needs root. For each ratio two worker processes run, one with 0.8 of a core and one with 0.8 / ratio, held there by the
cgroup CPU controller. Each measures its own speed on the model while the other is idle; the planner is given the
speeds, and chooses shares of the batch (data parallel) and where to cut the layers (pipeline). Then, in every round,
each process measures its speed alone again, and one step of each of four plans is taken: even and planned shares,
even and planned cuts. Even steps go at the pace of the slow device, so the ideal gain is (fast + slow) / (2 slow).
Ratios are taken within a round; medians over the rounds. Writes results/unequal-devices.md and .json.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import statistics
import sys
import time

from quota import CpuQuota, result_of_workers

ROOT = pathlib.Path(__file__).resolve().parent
FAST_CORES = 0.8
EXAMPLES, TOKENS, WIDTH, LAYERS = 60, 128, 256, 12
MICRO_BATCH, SIZES = 3, (2, 3)
ALONE_EXAMPLES = 12
NOMINAL_FLOPS_PER_S = 1e11
"""A rate to plan with before any speed is known, from which the planner's count of operations is found."""
LATENCY_S, BANDWIDTH_BYTES_PER_S = 1e-3, 1e9


@dataclasses.dataclass(frozen=True)
class Round:
    """What one round measured.

    Attributes:
      speeds: Examples per second of each process alone. cores: What each got, in the time of that.
      steps_s: By plan: the time of its step, until the last process had ended it.
    """

    speeds: list[float]
    cores: list[float]
    steps_s: dict[str, float]


def main() -> None:
    """Runs the workers for each ratio, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", default="1.5,2,3")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        address, number, ratio, folder = arguments.worker
        work(address, int(number), float(ratio), pathlib.Path(folder), arguments.rounds)
        return
    results = {}
    for ratio in map(float, arguments.ratios.split(",")):
        results[ratio] = measured(ratio, arguments.rounds)
        print(json.dumps(results[ratio]["load"]), *rows({ratio: results[ratio]}), sep="\n", flush=True)
    command = "python benchmarks/unequal_devices.py " + " ".join(sys.argv[1:])
    (ROOT / "results" / "unequal-devices.json").write_text(json.dumps(results, indent=1) + "\n")
    (ROOT / "results" / "unequal-devices.md").write_text(table(results, command.strip(), arguments.rounds))


def measured(ratio: float, rounds: int) -> dict:
    """What the first of two new processes reports."""
    return result_of_workers(__file__, 2, ratio, ["--rounds", str(rounds)])


def rows(results: dict) -> list[str]:
    """Lines of the table."""
    lines = []
    for ratio, result in results.items():
        taken = [Round(**one) for one in result["rounds"]]
        for what in ("shares", "cuts"):
            gains = [one.steps_s[f"even {what}"] / one.steps_s[f"planned {what}"] for one in taken]
            ideals = [sum(one.speeds) / (2 * min(one.speeds)) for one in taken]
            parts = [gain / ideal for gain, ideal in zip(gains, ideals, strict=True)]
            median = lambda values: f"{statistics.median(values):.2f}"
            cells = [
                f"{ratio:g}",
                median([one.speeds[0] / one.speeds[1] for one in taken]),
                {"shares": "data parallel", "cuts": "two-stage pipeline"}[what],
                result["plans"][f"even {what}"],
                result["plans"][f"planned {what}"],
                median([one.steps_s[f"even {what}"] for one in taken]),
                median([one.steps_s[f"planned {what}"] for one in taken]),
                f"{statistics.median(gains):.2f} ({min(gains):.2f} - {max(gains):.2f})",
                median(ideals),
                f"{statistics.median(parts):.1%}",
                f"{result['predicted'][f'even {what}'] / result['predicted'][f'planned {what}']:.2f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def table(results: dict, command: str, rounds: int) -> str:
    """The report."""
    got = [
        cores / quota
        for result in results.values()
        for one in result["rounds"]
        for cores, quota in zip(one["cores"], result["cores"], strict=True)
    ]
    loads = [load for result in results.values() for load in result["load"]]
    head = (
        "nominal ratio | measured ratio | form | even | planned | even step, s | planned step, s | gain (range) | "
        "ideal gain | gain / ideal | predicted gain"
    )
    return f"""# Devices of unequal speed

`{command}`: a residual MLP of {LAYERS} layers ({TOKENS} x {WIDTH} values an example), {EXAMPLES} examples a step, plain
SGD; two processes with one CPU device each, held at {FAST_CORES:g} and {FAST_CORES:g} / ratio of a core by the cgroup
CPU controller. {rounds} rounds, each with the speeds of both processes alone and one step of every plan; medians of
ratios within a round. Shares are micro-batches of examples, cuts are layers (the loss counts as one), fast device
first. The ideal gain is (fast + slow) / (2 slow), by the speeds alone. The machine has {os.cpu_count()} cores; its load
average was {min(loads):.1f} to {max(loads):.1f}. The processes come before all other load: while they were measured
alone they got {min(got):.0%} of their quota or more.

| {head} |
|{" --- |" * (head.count("|") + 1)}
{chr(10).join(rows(results))}
"""


# ---- a worker


def work(address: str, number: int, ratio: float, folder: pathlib.Path, rounds: int) -> None:
    """One of the two processes."""
    import jax

    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, 2, number)
    from residual_mlp import training

    from autoshard import StagedPlan
    from autoshard.transfer.peers import all_gather_text

    quota = CpuQuota(f"unequal-{number}")
    cores = [FAST_CORES, FAST_CORES / ratio]
    try:
        step, state, batch = training(LAYERS, EXAMPLES, TOKENS, WIDTH)
        alone = Alone(step, state, batch, quota)
        quota.limit(cores[number])
        speeds = [statistics.median(s) for s in zip(*(in_turn(alone, number)[0] for _ in range(5)), strict=True)]
        quota.limit(None)
        first = planned(step, state, batch, speeds) if number == 0 else {}
        names = ["even shares", "planned shares", "even cuts", "planned cuts"]
        plans = {name: StagedPlan.of_first(first.get(name)) for name in names}
        runs = {name: plan.jit(step, coordinator_address=address) for name, plan in plans.items()}
        states = {}
        for name, run in runs.items():  # compiles
            states[name], _ = run(state, batch)
            states[name], _ = run(states[name], batch)
            run.wait(states[name])
        quota.limit(cores[number])
        taken, load = [], []
        for k in range(rounds):
            found, got = in_turn(alone, number)
            steps_s = {}
            for name in random.Random(k).sample(names, len(names)):
                all_gather_text("")
                begin_s = time.perf_counter()
                states[name], _ = runs[name](states[name], batch)
                runs[name].wait(states[name])
                steps_s[name] = max(map(float, all_gather_text(f"{time.perf_counter() - begin_s:.6f}")))
            taken.append(dataclasses.asdict(Round(found, got, steps_s)))
            load.append(os.getloadavg()[0])
        quota.limit(None)
        if number == 0:
            result = {
                "cores": cores,
                "speeds": speeds,
                "load": load,
                "plans": {name: described(plan) for name, plan in plans.items()},
                "predicted": {name: plan.step_s for name, plan in plans.items()},
                "rounds": taken,
            }
            (folder / "result.json").write_text(json.dumps(result))
        all_gather_text("over")
    finally:
        quota.close()


class Alone:
    """Measures how many examples a second this process does by itself: loss and gradients of micro-batches."""

    def __init__(self, step, state, batch, quota):
        import jax

        self._quota = quota
        self._params = jax.device_put(state.params)
        self._part = jax.tree.map(lambda x: jax.device_put(x[:MICRO_BATCH]), batch)
        run = lambda params, part: jax.value_and_grad(lambda p: step.loss_fn(p, part, None)[0])(params)
        self._run = jax.jit(run)
        self()

    def __call__(self):
        """(examples per second, cores that it got)."""
        import jax

        used_s, begin_s = self._quota.used_s(), time.perf_counter()
        for _ in range(ALONE_EXAMPLES // MICRO_BATCH):
            jax.block_until_ready(self._run(self._params, self._part))
        took_s = time.perf_counter() - begin_s
        return ALONE_EXAMPLES / took_s, (self._quota.used_s() - used_s) / took_s


def in_turn(alone, number):
    """(speeds, cores) of both processes, of which one works at a time."""
    from autoshard.transfer.peers import all_gather_text

    speeds, cores = [], []
    for turn in range(2):
        all_gather_text("")
        speed, got = alone() if turn == number else (0.0, 0.0)
        texts = all_gather_text(f"{speed:.6f} {got:.6f}")
        speed, got = map(float, texts[turn].split())
        speeds.append(speed)
        cores.append(got)
    return speeds, cores


def planned(step, state, batch, speeds):
    """The four plans."""
    import jax

    from autoshard import PlanOptions, plan
    from autoshard.pipelines.plan.make import plan_staged
    from autoshard.pipelines.schedule.tasks import ScheduleKind
    from autoshard.pipelines.search.arrangement import Arrangement, Pipeline, Stage, Submesh
    from autoshard.pipelines.search.options import StageOptions

    order = ScheduleKind.ONE_F_ONE_B
    options = PlanOptions(cache=False)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batch))
    submeshes = Submesh(0, 0, 0), Submesh(1, 0, 1)
    count = EXAMPLES // MICRO_BATCH

    def even(pipelines, rates):
        return plan_staged(step, *shapes, cluster(rates), options, StageOptions(), arrangement=Arrangement(pipelines))

    whole = lambda num_layers: [
        Pipeline((submesh,), (Stage(0, num_layers),), MICRO_BATCH, count // 2, order) for submesh in submeshes
    ]
    num_layers = LAYERS + 1  # the loss is one
    nominal = even(tuple(whole(num_layers)), [NOMINAL_FLOPS_PER_S, 1.01 * NOMINAL_FLOPS_PER_S])
    own = nominal.durations.pipelines[0].stages[0]
    example_s = (own.forward_s + own.backward_s) / MICRO_BATCH
    rates = [NOMINAL_FLOPS_PER_S * example_s * speed for speed in speeds]
    half = (Stage(0, LAYERS // 2), Stage(LAYERS // 2, num_layers))
    search = lambda stages, sizes: plan(
        step,
        *shapes,
        cluster=cluster(rates),
        options=options,
        stages=StageOptions(num_stages=stages, micro_batch_sizes=sizes, schedules=(order,)),
    )
    return {
        "even shares": even(tuple(whole(num_layers)), rates),
        "planned shares": search(1, SIZES),
        "even cuts": even((Pipeline(submeshes, half, MICRO_BATCH, count, order),), rates),
        "planned cuts": search(2, (MICRO_BATCH,)),
    }


def cluster(rates):
    """Two kinds of device of these rates, in floating-point operations a second. Compute alone is to count."""
    from autoshard.cluster import Cluster, DeviceType, Link, NodeGroup

    link = Link(LATENCY_S, BANDWIDTH_BYTES_PER_S, 0, "estimated")
    groups = []
    for name, rate in zip(("fast", "slow"), rates, strict=True):
        device = DeviceType(name, (("float32", rate),), 2**34, 1e12, 0.0, "measured on the model itself")
        groups.append(NodeGroup(name, device, 1, 1, link))
    return Cluster("unequal", tuple(groups), dataclasses.replace(link, level=1))


def described(plan):
    """Shares of a plan, or layers of its stages, by device."""
    pipelines = plan.arrangement.pipelines
    if len(pipelines) > 1:
        shares = {p.submeshes[0].slice: f"{p.num_micro_batches} x {p.micro_batch_size}" for p in pipelines}
        return " / ".join(shares[k] for k in sorted(shares))
    (one,) = pipelines
    layers = {p.slice: str(s.stop - s.start) for p, s in zip(one.submeshes, one.stages, strict=True)}
    return " / ".join(layers[k] for k in sorted(layers)) + f", {one.num_micro_batches} x {one.micro_batch_size}"


if __name__ == "__main__":
    main()

"""Recorded steps against the schedules that predict them: bubbles, time, and micro-batches in flight.

    python benchmarks/bubbles.py [--stages 2,3,4] [--micro-batches 4,8] [--steps 5]

Needs root. Every stage runs in a process of its own, held at an equal part of less than two cores by the cgroup CPU
controller. The schedule is then simulated with the medians of the recorded tasks, by stage and phase, and compared
with what was recorded, from the beginning of the first task to the end of the last; the optimizer's update is left out,
since it is not recorded. Medians over steps. Writes results/bubbles.md and .json.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent
CORES = 1.6
EXAMPLES, TOKENS, WIDTH, LAYERS = 3, 512, 256, 8
"""Examples of a micro-batch, and the model."""


def main() -> None:
    """Runs the workers for each number of stages, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="2,3,4")
    parser.add_argument("--micro-batches", default="4,8")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    counts = [int(n) for n in arguments.micro_batches.split(",")]
    if arguments.worker:
        address, number, total, folder = arguments.worker
        work(address, int(number), int(total), pathlib.Path(folder), counts, arguments.steps)
        return
    results = []
    for total in map(int, arguments.stages.split(",")):
        results += measured(total, arguments)
        print(*rows(results[-4 * len(counts) :]), sep="\n", flush=True)
    command = "python benchmarks/bubbles.py " + " ".join(sys.argv[1:])
    (ROOT / "results" / "bubbles.json").write_text(json.dumps(results, indent=1) + "\n")
    (ROOT / "results" / "bubbles.md").write_text(table(results, command.strip(), arguments.steps))


def measured(total: int, arguments: argparse.Namespace) -> list[dict]:
    """What the first of as many new processes as stages reports."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    }
    own = ["--steps", str(arguments.steps), "--micro-batches", arguments.micro_batches]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *own, "--worker", f"127.0.0.1:{port}"]
        workers = [
            subprocess.Popen([*command, str(number), str(total), folder], env=environment) for number in range(total)
        ]
        codes = [worker.wait() for worker in workers]
        if any(codes):
            raise SystemExit(f"The workers ended with {codes}.")
        return json.loads((pathlib.Path(folder) / "result.json").read_text())


def rows(results: list[dict]) -> list[str]:
    """Lines of the table."""
    lines = []
    for one in results:
        recorded, predicted = (statistics.median(one[of]["bubbles"]) for of in ("recorded", "predicted"))
        seconds = [statistics.median(one[of]["span_s"]) for of in ("recorded", "predicted")]
        ratios = [a / b for a, b in zip(one["recorded"]["span_s"], one["predicted"]["span_s"], strict=True)]
        cells = [
            one["kind"],
            str(one["submeshes"]),
            str(one["micro_batches"]),
            f"{predicted:.1%}",
            f"{recorded:.1%}",
            *(f"{s:.2f}" for s in reversed(seconds)),
            f"{statistics.median(ratios):.3f}",
            f"{', '.join(map(str, one['in_flight']))}",
            f"{', '.join(map(str, one['bounds']))}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def table(results: list[dict], command: str, steps: int) -> str:
    """The report."""
    loads = [one["load"] for one in results]
    head = (
        "schedule | processes | micro-batches | bubbles predicted | recorded | predicted, s | recorded, s | "
        "recorded / predicted | most in flight | bound"
    )
    return f"""# Schedules as predicted and as recorded

`{command}`: a residual MLP of {LAYERS} layers, one process with one CPU device for each submesh, held at {CORES:g}
cores in all by the cgroup CPU controller; interleaved with two stages on each submesh. Predicted: the schedule
simulated with the medians of that step's recorded tasks, by stage and phase. Bubbles: the share of the time between the
first task's beginning and the last one's end in which submeshes run no task. Medians over {steps} steps. In flight:
micro-batches that a stage of each submesh holds at most. The machine has {os.cpu_count()} cores; its load average was
{min(loads):.1f} to {max(loads):.1f}, but the measured processes come before all other load.

| {head} |
|{" --- |" * (head.count("|") + 1)}
{chr(10).join(rows(results))}
"""


# ---- a worker


def work(address: str, number: int, total: int, folder: pathlib.Path, counts: list[int], steps: int) -> None:
    """The process of one submesh."""
    import jax

    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, total, number)
    from quota import CpuQuota
    from residual_mlp import training

    from autoshard import StagedPlan
    from autoshard.pipelines.schedule.tasks import ScheduleKind
    from autoshard.transfer.peers import all_gather_text

    quota = CpuQuota(f"bubbles-{number}")
    results = []
    try:
        for count in counts:
            for kind in ScheduleKind:
                step, state, batch = training(LAYERS, EXAMPLES * count, TOKENS, WIDTH)
                plan = StagedPlan.of_first(planned(step, state, batch, total, count, kind) if number == 0 else None)
                run = plan.jit(step, coordinator_address=address, record=True)
                for _ in range(2):  # compiles
                    state, _ = run(state, batch)
                    run.wait(state)
                all_gather_text("")
                quota.limit(CORES / total)
                timelines = []
                for _ in range(steps):
                    all_gather_text("")
                    state, _ = run(state, batch)
                    timelines.append(run.timeline)
                quota.limit(None)
                results.append(compared(plan, kind, total, count, timelines))
        if number == 0:
            (folder / "result.json").write_text(json.dumps(results))
        all_gather_text("over")
    finally:
        quota.close()


def planned(step, state, batch, total, count, kind):
    """A plan of one pipeline over all submeshes."""
    from autoshard import PlanOptions
    from autoshard.cluster import Cluster, DeviceType, Link, NodeGroup
    from autoshard.pipelines.plan.make import plan_staged
    from autoshard.pipelines.schedule.tasks import ScheduleKind
    from autoshard.pipelines.search.arrangement import Arrangement, Pipeline, Stage, Submesh
    from autoshard.pipelines.search.options import StageOptions

    link = Link(1e-3, 1e9, 0, "estimated")
    device = DeviceType("share of a core", (("float32", 1e10),), 2**34, 1e11, 1e-5, "estimated")
    hardware = Cluster("equal", (NodeGroup("cpu", device, 1, total, link),))
    num_stages = total * (2 if kind is ScheduleKind.INTERLEAVED else 1)
    starts = [round(s * LAYERS / num_stages) for s in range(num_stages)]
    stages = tuple(Stage(a, b) for a, b in zip(starts, [*starts[1:], LAYERS + 1], strict=True))  # the loss is a layer
    submeshes = tuple(Submesh(0, n, 0) for n in range(total))
    arrangement = Arrangement((Pipeline(submeshes, stages, EXAMPLES, count, kind),))
    return plan_staged(step, state, batch, hardware, PlanOptions(cache=False), StageOptions(), arrangement=arrangement)


def compared(plan, kind, total, count, timelines):
    """What was recorded of some steps, and what the schedule predicts with the tasks' medians."""
    from autoshard.pipelines.schedule.orders import in_flight_bound

    predicted = [tasks_of(with_medians(plan, timeline)) for timeline in timelines]
    recorded = [tasks_of(timeline) for timeline in timelines]
    schedule = plan.durations.pipelines[0].schedule
    stages = [[s for s in range(len(plan.arrangement.pipelines[0].stages)) if s % total == k] for k in range(total)]
    result = {"kind": kind.value, "submeshes": total, "micro_batches": count, "load": os.getloadavg()[0]}
    for name, found in (("recorded", recorded), ("predicted", predicted)):
        result[name] = {
            "span_s": [span(tasks) for tasks in found],
            "bubbles": [1 - sum(e.stop_s - e.start_s for e in tasks) / (total * span(tasks)) for tasks in found],
        }
    result["in_flight"] = [max(t.submeshes[k].most_in_flight for t in timelines) for k in range(total)]
    result["bounds"] = [max(in_flight_bound(schedule, s) for s in own) for own in stages]
    return result


def with_medians(plan, timeline):
    """The plan's timeline with the medians of recorded tasks in place of its estimates."""
    from autoshard.pipelines.schedule.durations import StepDurations
    from autoshard.pipelines.schedule.simulate import simulate
    from autoshard.pipelines.schedule.tasks import Phase

    took = collections.defaultdict(list)
    for event in tasks_of(timeline):
        took[event.stage, event.phase].append(event.stop_s - event.start_s)
    (own,) = plan.durations.pipelines
    median = lambda s, phase: statistics.median(took.get((s, phase), [0.0]))
    stages = tuple(
        dataclasses.replace(
            one,
            forward_s=median(s, Phase.FORWARD),
            backward_s=median(s, Phase.BACKWARD),
            weight_s=median(s, Phase.WEIGHT),
        )
        for s, one in enumerate(own.stages)
    )
    return simulate(StepDurations((dataclasses.replace(own, stages=stages),)))


def tasks_of(timeline):
    """The tasks of a timeline."""
    return [e for e in timeline.events if e.phase is not None and e.to_submesh is None]


def span(tasks):
    """Seconds from the first task's beginning to the last one's end."""
    return max(e.stop_s for e in tasks) - min(e.start_s for e in tasks)


if __name__ == "__main__":
    main()

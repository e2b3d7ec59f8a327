"""What watching for slow devices costs while none is slow: steps with `stragglers.mode: migrate` beside steps without.

    python benchmarks/stragglers_overhead.py [--processes 2,1] [--batches 64,256] [--blocks 40]

The ViT of configs/stragglers_tiny.yaml on two CPU devices, in one process or in two, made ready as `autoshard train`
does it, twice: with `mode: off`, and with `mode: migrate`, where each step is also followed by what the trainer does
then (measuring, exchanging times, the detector, the controller). Blocks of ten steps of either follow each other in
pairs, in random order within a pair. Ratios are of one pair, medians over the pairs, with the median's 95 % interval
(order statistics); of wall-clock time, and of processor time of the first process, which other load of the machine
moves less. Both blocks run the same compiled program, so that what the watcher's own calls take is told, too, as parts
of the time of watched blocks: that is free of what other load does to steps, and its wall-clock time has the wait for
other processes in an exchange. A slowdown that is found by chance would move units, which is told. Writes
results/stragglers-overhead.md.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import time

from quota import result_of_workers

ROOT = pathlib.Path(__file__).resolve().parent
STEPS = 10


def main() -> None:
    """Runs the workers, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="2,1")
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("--blocks", type=int, default=40, help="pairs of blocks")
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        address, number, _, folder = arguments.worker
        count = int(arguments.processes)
        work(address, int(number), count, arguments.batch, arguments.blocks, pathlib.Path(folder))
        return
    lines = []
    for processes in map(int, arguments.processes.split(",")):
        for batch in map(int, arguments.batches.split(",")):
            own = ["--processes", str(processes), "--blocks", str(arguments.blocks), "--batch", str(batch)]
            lines.append(row(processes, batch, result_of_workers(__file__, processes, 1, own)))
            print(lines[-1], flush=True)
    head = (
        "processes | batch | off, ms a step | watched, ms a step | ratio (95 %) | ratio of processor time (95 %) | "
        "in the watcher, of wall-clock time | of processor time | "
        "changes of shares | load average"
    )
    (ROOT / "results" / "stragglers-overhead.md").write_text(
        f"""# Watching for slow devices while none is slow

`python benchmarks/stragglers_overhead.py`: the ViT of configs/stragglers_tiny.yaml on two CPU devices,
{arguments.blocks} pairs of blocks of {STEPS} steps; medians, ratios within a pair. The machine has {os.cpu_count()}
cores.

| {head} |
|{" --- |" * (head.count("|") + 1)}
{chr(10).join(lines)}
"""
    )


def row(processes: int, batch: int, told: dict) -> str:
    """A line of the table."""
    cells = [
        f"{processes}",
        f"{batch}",
        f"{1e3 * statistics.median(told['off']):.2f}",
        f"{1e3 * statistics.median(told['watched']):.2f}",
        interval(told["off"], told["watched"]),
        interval(told["off_cpu"], told["watched_cpu"]),
        *(f"{told[f'own{kind}'] / sum(told[f'watched{kind}']):.2%}" for kind in ("", "_cpu")),
        f"{told['changes']}",
        f"{told['load']:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def interval(off: list[float], watched: list[float]) -> str:
    """The median ratio of pairs, and its 95 % interval."""
    ratios = sorted(w / o for o, w in zip(off, watched, strict=True))
    # the median lies between these two with at least 95 %, by the binomial distribution's normal approximation
    reach = round(0.98 * len(ratios) ** 0.5)
    low, high = ratios[max(0, len(ratios) // 2 - reach)], ratios[min(len(ratios) - 1, len(ratios) // 2 + reach)]
    return f"{statistics.median(ratios):.3f} ({low:.3f} - {high:.3f})"


def work(address: str, number: int, count: int, batch: int, blocks: int, folder: pathlib.Path) -> None:
    """One of the processes."""
    import jax

    jax.config.update("jax_num_cpu_devices", 2 // count)
    if count > 1:
        jax.distributed.initialize(address, count, number)

    from autoshard.train.config import load_config
    from autoshard.train.planning import make_plan
    from autoshard.train.registry import load_data, train_functions
    from autoshard.train.run import planned_run
    from autoshard.train.stragglers import Stragglers

    file = ROOT.parent / "configs" / "stragglers_tiny.yaml"
    config = load_config(file, [f"data.batch_size={batch}", "stragglers.emulate={}"])
    off = config.model_copy(update={"stragglers": config.stragglers.model_copy(update={"mode": "off"})})
    data = load_data(config)
    functions = train_functions(config)
    plan = make_plan(config, functions)
    runs = [planned_run(c, functions, data, plan, folder) for c in (off, config)]
    states = [run.initial_state() for run in runs]
    changes = [0]
    args = jax.eval_shape(functions.init, config.train.seed), data.batches.shapes()
    watcher = Stragglers(
        config.stragglers, plan, runs[1].step, functions.step, args, lambda _: changes.__setitem__(0, changes[0] + 1)
    )
    x = runs[0].batch(0)
    taken = [0]

    own = [0.0, 0.0]

    def watching(call, *given) -> None:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        call(*given)
        own[0] += (time.perf_counter() - began_s) / STEPS
        own[1] += (time.process_time() - began_cpu_s) / STEPS

    def block(which: int) -> tuple[float, float]:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            if which:
                watching(watcher.before_step, taken[0] + 1)
            stepped_s = time.perf_counter()
            states[which], metrics = runs[which].step(states[which], x)
            jax.block_until_ready(metrics)
            if which:
                taken[0] += 1
                watching(watcher.after_step, taken[0], time.perf_counter() - stepped_s, states[which])
        return (time.perf_counter() - began_s) / STEPS, (time.process_time() - began_cpu_s) / STEPS

    for which in (0, 1, 0, 1):
        block(which)
    own[:] = 0.0, 0.0
    times: list[list[tuple[float, float]]] = [[], []]
    for pair in range(blocks):
        for which in random.Random(pair).sample((0, 1), 2):
            times[which].append(block(which))
    if number == 0:
        (off_s, off_cpu_s), (watched_s, watched_cpu_s) = (list(zip(*one, strict=True)) for one in times)
        told = {"off": off_s, "watched": watched_s, "off_cpu": off_cpu_s, "watched_cpu": watched_cpu_s}
        told |= {"own": own[0], "own_cpu": own[1], "changes": changes[0], "load": os.getloadavg()[0]}
        (folder / "result.json").write_text(json.dumps(told))
    if count > 1:
        from autoshard.transfer.peers import all_gather_text

        all_gather_text("over")


if __name__ == "__main__":
    main()

"""Tables in host memory, really run: steps a second of `pipelined` and `async` against `sync`, and their AUC.

    python benchmarks/host_tables.py                       # both parts, about an hour
    python benchmarks/host_tables.py --part throughput --ids zipf --workers 1 --rounds 3 --seconds 10
    python benchmarks/host_tables.py --part auc --seeds 0,1,2

Throughput needs Linux and two CPUs that nothing else uses. CPU 0 stands for the accelerator: a process that is held
there before JAX starts runs the dense part of the step on it, in one thread. The worker processes and the threads that
serve them, in `sync` too, are held on CPU 1 (`Execution.worker_cpus`). The main thread's Python runs on CPU 0 too, and
so counts as the accelerator's time. A click model after DLRM reads bags of ids of several tables, with Adagrad; the
width of its MLP is chosen so that, in `sync`, the dense part takes as long as looking rows up and writing them back,
within 5 %. Two stages of equal time overlap in half of it at best: the ideal is 2, or what remains of it where the two
are not quite equal.

Every measurement is a process of its own: it warms up until nothing has been compiled for a while (rows of steps in
flight are patched by programs of a few sizes), then counts the steps of some seconds. Batches are made before. In each
round all modes follow each other in random order; ratios are of one round, medians over the rounds. A measurement
during which other programs took more than 3 % of a CPU is repeated, up to five times; the one least disturbed counts.

AUC: the zoo's `criteo_tiny` model, with Adagrad, on made click logs (`autoshard clicks`) of 26 categories that follow
Zipf's law, for three epochs, on all CPUs; every mode from the same state and over the same batches, and the whole state
evaluated on examples held out. Writes results/host-tables.md and .json; a part that is not run keeps its figures.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
ACCELERATOR_CPU, HOST_CPU = 0, 1
TABLES, ROWS, DIM, EXAMPLES, BAG = 8, 2_000_000, 8, 8192, 4
NUMBERS, INNER = 13, 64
ZIPF = 1.05
BATCHES = 64
LEAST_WARM_S, QUIET_STEPS = 4.0, 60
"""Of the warm-up: its least time, and steps without a compilation that end it."""
MOST_DISTURBED, MOST_TRIES = 0.03, 5
NEAR = 0.05
"""By how much the two halves of a calibrated step may differ."""
AUC_EXAMPLES, AUC_HELD_OUT, AUC_BATCH, AUC_EPOCHS, AUC_RATE = 131_072, 131_072, 256, 3, 0.05


@dataclasses.dataclass(frozen=True)
class Case:
    """What one process measures.

    Attributes:
      ids: `zipf` or `uniform`. mode, max_staleness, prefetch, num_workers: As in `autoshard.Execution`.
      width: Of the MLP's hidden layers.
    """

    ids: str
    mode: str
    max_staleness: int
    prefetch: int
    num_workers: int
    width: int = 0

    @property
    def name(self) -> str:
        """As tables tell it."""
        if self.mode == "sync":
            return "sync"
        stale = f", max_staleness {self.max_staleness}" if self.mode == "async" else ""
        return f"{self.mode}{stale}, prefetch {self.prefetch}"


def main() -> None:
    """Runs the parts that are asked for, and writes what is known of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("throughput", "auc", "all"), default="all")
    parser.add_argument("--ids", default="zipf,uniform", help="how ids are drawn: zipf, uniform, or both")
    parser.add_argument("--workers", default="1,2", help="numbers of worker processes, all on CPU 1")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each mode")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a measurement, after it has warmed up")
    parser.add_argument("--seeds", default="0,1,2", help="of the AUC: each draws examples, order and weights")
    parser.add_argument("--out", default=str(RESULTS / "host-tables"), help="path of both files, without .md and .json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        told = json.loads(arguments.child)
        print(json.dumps(measured(Case(**told["case"]), told["seconds"])))
        return
    path = pathlib.Path(f"{arguments.out}.json")
    results = json.loads(path.read_text()) if path.exists() else {}

    def write() -> None:
        path.write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".md").write_text(report(results))

    if arguments.part in ("throughput", "all"):
        results.setdefault("throughput", {})
        for ids in arguments.ids.split(","):
            for workers in map(int, arguments.workers.split(",")):
                of = throughput(ids, workers, arguments.rounds, arguments.seconds)
                results["throughput"][f"{ids}|{workers}"] = of
                write()
    if arguments.part in ("auc", "all"):
        results["auc"] = auc(list(map(int, arguments.seeds.split(","))))
        write()


# ---- throughput


def throughput(ids: str, workers: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Measures all modes for one distribution of ids and number of workers."""
    sync = Case(ids, "sync", 0, 1, workers)
    width = calibrated(sync, seconds)
    cases = [sync, Case(ids, "pipelined", 0, 2, workers), Case(ids, "pipelined", 0, 4, workers)]
    cases += [Case(ids, "async", bound, 2 if bound < 4 else 4, workers) for bound in (1, 2, 4)]
    cases = [dataclasses.replace(case, width=width) for case in cases]
    taken: list[dict[str, Any]] = []
    for number in range(rounds):
        one = {}
        for case in random.Random(number).sample(cases, len(cases)):
            one[case.name] = undisturbed(case, seconds)
        taken.append({case.name: one[case.name] for case in cases})
        for case in cases:
            ratio = one["sync"]["step_s"] / one[case.name]["step_s"]
            print(f"round {number}, {ids}, {workers} workers, {case.name}: {ratio:.3f}", flush=True)
    bounds = {case.name: case.max_staleness for case in cases}
    return {"width": width, "bounds": bounds, "seconds": seconds, "rounds": taken}


def calibrated(case: Case, seconds: float) -> int:
    """The width of the MLP with which both halves of a step of `sync` take equal time."""
    tried: list[tuple[int, float]] = []
    width = 128
    for _ in range(8):
        one = undisturbed(dataclasses.replace(case, width=width), max(3.0, seconds / 2))
        excess_s = one["device_s"] - one["host_s"]
        if abs(excess_s) < NEAR * max(one["device_s"], one["host_s"]):
            return width
        tried.append((width, excess_s))
        tried.sort(key=lambda t: abs(t[1]))
        (a, a_s), (b, b_s) = tried[0], tried[1] if len(tried) > 1 else (0, 0.0)
        if len(tried) == 1:
            wanted = width // 4 if excess_s > 0 else 4 * width
        else:
            wanted = a - a_s * (b - a) / (b_s - a_s) if b_s != a_s else width
        following = max(8, min(8192, round(wanted / 8) * 8))
        if following in [w for w, _ in tried]:
            return tried[0][0]
        width = following
    return tried[0][0]


def undisturbed(case: Case, seconds: float) -> dict[str, Any]:
    """What a new process measures while other programs leave the CPUs alone, if they do."""
    tries = []
    for _ in range(MOST_TRIES):
        wait_for_quiet()
        told = json.dumps({"case": dataclasses.asdict(case), "seconds": seconds})
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": str(1 << 30),  # memory once taken is kept, as an accelerator keeps its own
            "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
        }
        command = [sys.executable, __file__, "--child", told]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        one = json.loads(done.stdout.strip().splitlines()[-1])
        print(f"  {case}: {brief(one)}", flush=True)
        tries.append(one)
        if one["others"] <= MOST_DISTURBED:
            break
    return min(tries, key=lambda one: one["others"])


def brief(one: dict[str, Any]) -> str:
    """A measurement in a line."""
    numbers = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in one.items())
    return ", ".join(numbers)


def busy_s(cpu: int | None = None) -> float:
    """CPU seconds that programs have used of a CPU, or of all, and that others took from this machine."""
    line = 0 if cpu is None else 1 + cpu
    fields = pathlib.Path("/proc/stat").read_text().split("\n", line + 1)[line].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(most_s: float = 600.0) -> None:
    """Waits until other programs take less than a twentieth of a CPU for two seconds."""
    until_s = time.monotonic() + most_s
    while time.monotonic() < until_s:
        before_s = busy_s()
        time.sleep(2.0)
        if busy_s() - before_s < 0.1:
            return


def measured(case: Case, seconds: float) -> dict[str, Any]:
    """Steps of one mode, in this process."""
    os.sched_setaffinity(0, {ACCELERATOR_CPU})  # before JAX makes its threads
    import jax

    import autoshard

    compiled = [0]
    count = lambda event, *_, **__: compiled.__setitem__(0, compiled[0] + event.endswith("backend_compile_duration"))
    jax.monitoring.register_event_duration_secs_listener(count)
    step, make = training(case.width)
    batches = drawn(case.ids)
    execution = autoshard.Execution(
        case.mode,
        max_staleness=case.max_staleness,
        num_workers=case.num_workers,
        prefetch=case.prefetch,
        worker_cpus=(HOST_CPU,),
    )
    is_over = [False]

    def repeated() -> Iterator[Any]:
        while not is_over[0]:
            yield from batches

    with autoshard.HostTables(step, make, batches[0], execution=execution) as tables:
        used_s = lambda: time.process_time() + sum(map(process_s, tables.pool.process_ids))
        cpus = (None, ACCELERATOR_CPU, HOST_CPU)
        counters = lambda: (time.perf_counter(), used_s(), *map(busy_s, cpus))
        began_s, last_compiled, quiet, first = time.perf_counter(), 0, 0, None
        waits_s, stale, rows = [], [], []
        for done in tables.steps(repeated()):
            now_s = time.perf_counter()
            if first is None:
                quiet = 0 if compiled[0] > last_compiled else quiet + 1
                last_compiled = compiled[0]
                if now_s - began_s > LEAST_WARM_S and quiet >= QUIET_STEPS:
                    jax.block_until_ready(done.metrics)
                    first, start = done.number, counters()
                continue
            waits_s.append(done.wait_s)
            stale.append(done.staleness)
            rows.append(done.num_rows)
            if now_s - start[0] > seconds:
                jax.block_until_ready(done.metrics)
                end = counters()
                is_over[0] = True
                break
        count_of_steps = done.number - first
        loss = float(done.metrics["loss"])
    took_s, used, all_used, device_used, host_used = (b - a for a, b in zip(start, end, strict=True))
    host_s = statistics.fmean(waits_s)
    return {
        "step_s": took_s / count_of_steps,
        "steps": count_of_steps,
        "host_s": host_s,
        "device_s": took_s / count_of_steps - host_s,
        "rows": statistics.fmean(rows),
        "staleness": max(stale),
        "mean_staleness": statistics.fmean(stale),
        "compiled": compiled[0] - last_compiled,
        "device_busy": device_used / took_s,
        "host_busy": host_used / took_s,
        "others": max(0.0, (all_used - used) / took_s),
        "loss": loss,
    }


def process_s(number: int) -> float:
    """CPU seconds of a process."""
    fields = pathlib.Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def training(width: int) -> tuple[Any, Any]:
    """The step, and the function that makes its state."""
    import jax
    import jax.numpy as jnp
    import optax

    import autoshard

    def loss_fn(params: Any, batch: Any, _: Any) -> Any:
        rows = [jnp.take(t, batch["ids"][:, n], axis=0).sum(1) for n, t in enumerate(params["tables"])]
        numbers = jax.nn.relu(batch["numbers"] @ params["bottom"])
        vectors = jnp.stack([numbers, *rows], axis=1)
        pairs = (jnp.square(vectors.sum(1)) - jnp.square(vectors).sum(1)) / 2  # the products of all pairs, summed
        x = jnp.concatenate([numbers, pairs], axis=1) @ params["enter"]
        for up, down in params["blocks"]:
            x = x + jax.nn.relu(x @ up) @ down
        logits = (x @ params["leave"])[:, 0]
        return jnp.mean(jnp.logaddexp(0, logits) - batch["clicks"] * logits), None

    step = autoshard.TrainStep(loss_fn, optax.adagrad(0.01))

    def make() -> Any:
        keys = iter(jax.random.split(jax.random.key(0), TABLES + 7))
        normal = lambda *shape: jax.random.normal(next(keys), shape) / shape[0] ** 0.5
        even = lambda: jax.random.uniform(next(keys), (ROWS, DIM), minval=-1, maxval=1) * ROWS**-0.5
        tables = [even() for _ in range(TABLES)]
        blocks = [(normal(INNER, width), normal(width, INNER) * 0.1) for _ in range(2)]
        enter, leave = normal(2 * DIM, INNER), normal(INNER, 1)
        rest = {"bottom": normal(NUMBERS, DIM), "enter": enter, "blocks": blocks, "leave": leave}
        return step.init({"tables": tables, **rest})

    return step, make


def drawn(ids: str) -> list[Any]:
    """Batches whose ids are all alike, or follow Zipf's law in no order."""
    import numpy as np

    rng = np.random.default_rng(0)
    shares = np.arange(1.0, ROWS + 1) ** (-ZIPF if ids == "zipf" else 0.0)
    until, order = np.cumsum(shares) / shares.sum(), rng.permutation(ROWS)
    made = []
    for _ in range(BATCHES):
        ranks = np.minimum(np.searchsorted(until, rng.random((EXAMPLES, TABLES, BAG))), ROWS - 1)
        made.append(
            {
                "ids": order[ranks].astype(np.int32),
                "numbers": rng.standard_normal((EXAMPLES, NUMBERS), np.float32),
                "clicks": (rng.random(EXAMPLES) < 0.25).astype(np.float32),
            }
        )
    return made


# ---- AUC


def auc(seeds: list[int]) -> dict[str, Any]:
    """Trains every mode for every seed, and evaluates it on examples held out."""
    import jax
    import numpy as np
    import optax
    from autoshard_models.dlrm import PRESETS, objective

    import autoshard
    from autoshard.train.click_metrics import click_metrics
    from autoshard.train.data.criteo import as_batch
    from autoshard.train.data.made_clicks import MadeClicks

    config = PRESETS["criteo_tiny"]
    model = objective(config)
    step = autoshard.TrainStep(
        lambda params, batch, key: (model.loss(params, {}, batch, key)[0], None), optax.adagrad(AUC_RATE)
    )
    evaluate = jax.jit(lambda params, batch: model.evaluate(params, {}, batch, jax.random.key(0))[1]["logits"])
    modes = {"sync": autoshard.Execution("sync"), "pipelined": autoshard.Execution("pipelined")}
    for bound in (2, 4):
        name = f"async, max_staleness {bound}"
        modes[name] = autoshard.Execution("async", max_staleness=bound, prefetch=bound)
    results: dict[str, Any] = {"hidden": [], "modes": {name: [] for name in modes}, "seeds": seeds}
    for seed in seeds:
        chunks = list(MadeClicks(AUC_EXAMPLES + AUC_HELD_OUT, seed=seed).chunks())
        parts = [as_batch(clicks, config.table_rows) for clicks, _ in chunks]
        all_examples = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        log_odds = np.concatenate([odds for _, odds in chunks])
        at = lambda places, all_examples=all_examples: {name: x[places] for name, x in all_examples.items()}
        held_out = [at(np.arange(k, k + 4096)) for k in range(AUC_EXAMPLES, AUC_EXAMPLES + AUC_HELD_OUT, 4096)]
        clicks = np.concatenate([batch["clicks"] for batch in held_out])
        results["hidden"].append(click_metrics(log_odds[AUC_EXAMPLES:], clicks).auc)
        rng = np.random.default_rng(seed)
        order = np.concatenate([rng.permutation(AUC_EXAMPLES) for _ in range(AUC_EPOCHS)]).reshape(-1, AUC_BATCH)
        state = step.init(model.init(jax.random.key(seed))[0])
        for name, execution in modes.items():
            with autoshard.HostTables(step, state, at(order[0]), execution=execution) as tables:
                stale = [done.staleness for done in tables.steps(map(at, order))]
                trained = tables.state()
            logits = np.concatenate([evaluate(trained.params, batch) for batch in held_out])
            one = {
                "auc": click_metrics(logits, clicks).auc,
                "log_loss": click_metrics(logits, clicks).log_loss,
                "staleness": max(stale),
                "mean_staleness": statistics.fmean(stale),
                "equals_sync": False,
            }
            leaves = [np.asarray(x) for x in jax.tree.leaves((trained.params, trained.opt_state))]
            if name == "sync":
                reference = leaves
            one["equals_sync"] = all(np.array_equal(x, y) for x, y in zip(reference, leaves, strict=True))
            results["modes"][name].append(one)
            print(f"seed {seed}, {name}: {brief(one)}", flush=True)
    return results


# ---- the report


def report(results: dict[str, Any]) -> str:
    """Both parts as Markdown."""
    parts = ["# Tables in host memory: throughput and AUC of the modes\n"]
    if "throughput" in results:
        parts.append(throughput_report(results["throughput"]))
    if "auc" in results:
        parts.append(auc_report(results["auc"]))
    return "\n".join(parts)


def spread(numbers: list[float], digits: int = 2) -> str:
    """Median and range."""
    return f"{statistics.median(numbers):.{digits}f} ({min(numbers):.{digits}f} - {max(numbers):.{digits}f})"


def throughput_report(of: dict[str, Any]) -> str:
    """What was measured, a row for each mode."""
    head = (
        "ids | workers | mode | step, ms | host side, ms | dense side, ms | times sync (range) | ideal | of the ideal "
        "| max staleness (bound) | mean | CPU 0 busy | CPU 1 busy | others' CPU"
    )
    rows = []
    for key, one in of.items():
        ids, workers = key.split("|")
        for name, bound in one["bounds"].items():
            own = [r[name] for r in one["rounds"]]
            sync = [r["sync"] for r in one["rounds"]]
            median = lambda what, own=own: statistics.median(x[what] for x in own)
            gains = [s["step_s"] / x["step_s"] for s, x in zip(sync, own, strict=True)]
            ideal = statistics.median(s["step_s"] / max(s["host_s"], s["device_s"]) for s in sync)
            is_sync = name == "sync"
            cells = [
                ids,
                workers,
                name,
                f"{1e3 * median('step_s'):.2f}",
                f"{1e3 * median('host_s'):.2f}" if is_sync else "",
                f"{1e3 * median('device_s'):.2f}" if is_sync else "",
                "1" if is_sync else spread(gains),
                "" if is_sync else f"{ideal:.2f}",
                "" if is_sync else f"{statistics.median(gains) / ideal:.0%}",
                f"{max(x['staleness'] for x in own)} ({bound})",
                f"{median('mean_staleness'):.2f}",
                f"{median('device_busy'):.0%}",
                f"{median('host_busy'):.0%}",
                f"{max(x['others'] for x in own):.1%}",
            ]
            rows.append("| " + " | ".join(cells) + " |")
    first = next(iter(of.values()))
    compiled = sum(x["compiled"] for one in of.values() for r in one["rounds"] for x in r.values())
    widths = ", ".join(f"{one['width']} ({key.replace('|', ', workers: ')})" for key, one in of.items())
    rows_read = {key: statistics.median(r["sync"]["rows"] for r in one["rounds"]) for key, one in of.items()}
    distinct = ", ".join(f"{number:,.0f} ({key.split('|')[0]})" for key, number in rows_read.items() if "|1" in key)
    return f"""## Throughput

`python benchmarks/host_tables.py --part throughput`: two CPUs, of which one stands for the accelerator (JAX's process,
held there before it starts, one thread) and one holds the worker processes and the threads that serve them. A click
model with {TABLES} tables of {ROWS:,} rows of {DIM} float32, bags of {BAG} ids, {EXAMPLES:,} examples a step, an MLP
and Adagrad; {math.prod((TABLES, BAG, EXAMPLES)):,} ids a batch, of which different: {distinct}. Zipf's exponent is
{ZIPF}. The MLP is as wide as makes both sides of `sync` equal, within {NEAR:.0%} when chosen: {widths}.
{len(first["rounds"])} rounds of {first["seconds"]:g} s a mode, each in a new process, after at least
{LEAST_WARM_S:g} s and {QUIET_STEPS} steps without a compilation; programs compiled while it was measured: {compiled}.
Medians, and ranges over the rounds. *Host side* is looking up and writing back in `sync`, as the step waits for it;
*ideal* is the step of `sync` by the longer of its sides. *Others' CPU* is the most that other programs took of a CPU.

| {head} |
|{" --- |" * (head.count("|") + 1)}
{chr(10).join(rows)}
"""


def auc_report(of: dict[str, Any]) -> str:
    """A row for each mode."""
    head = "mode | AUC, by seed | less that of sync, points of 0.01 | max staleness (mean) | every bit as in sync"
    rows, sync = [], [one["auc"] for one in of["modes"]["sync"]]
    for name, runs in of["modes"].items():
        apart = [100 * (one["auc"] - s) for one, s in zip(runs, sync, strict=True)]
        cells = [
            name,
            ", ".join(f"{one['auc']:.5f}" for one in runs),
            "" if name == "sync" else ", ".join(f"{x:+.3f}" for x in apart),
            f"{max(one['staleness'] for one in runs)} ({statistics.fmean(one['mean_staleness'] for one in runs):.2f})",
            "yes" if all(one["equals_sync"] for one in runs) else "no",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return f"""## AUC

`python benchmarks/host_tables.py --part auc`: the model `criteo_tiny` (26 tables of up to 1,024 rows of 16) with
Adagrad of rate {AUC_RATE}, {AUC_EPOCHS} epochs of {AUC_EXAMPLES:,} made examples in batches of {AUC_BATCH}, evaluated
on {AUC_HELD_OUT:,} held out; seeds {", ".join(map(str, of["seeds"]))}. The hidden model that drew the clicks ranks them
with an AUC of {", ".join(f"{x:.5f}" for x in of["hidden"])}. Two workers; nothing is held on any CPU.

| {head} |
|{" --- |" * (head.count("|") + 1)}
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    main()

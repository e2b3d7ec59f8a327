"""Slow replicas, really slow: a batch shared out by measured speeds against equal parts.

    python benchmarks/uneven_batches.py [--ratios 2,4,8] [--processes 2] [--rounds 7]

Needs root. Worker processes with one CPU device each are the replicas of a residual MLP (`autoshard.UnevenStep`); one
is held at 1 / ratio of what the others have by the cgroup CPU controller, as in `stragglers_real.py`. No speed is told:
in six steps at even shares each process reads from the scheduler how long it was busy, the detector names the slow one,
and `step.shares(slowness)` says who runs how many parts. Then, in every round, each kind of step is taken twice, in
random order, and the second is timed: `plain` is the planned step of the `TrainStep` itself, `even` and `shared` are
one compiled program. Before anything is slowed, `plain` and `even` are timed side by side as well: what the loop over
parts costs. The ideal gain is that of work divided at will. Writes results/uneven-batches.md and .json.
"""

import json
import os
import pathlib
import random
import statistics
import time

from quota import CpuQuota, ideal_gain, over_ratios
from stragglers_real import FAST_CORES, WATCHED

EXAMPLES, PARTS, WIDTH, HIDDEN, LAYERS = 8192, 64, 128, 2048, 2
KINDS = ("plain", "even", "shared")


def main() -> None:
    """Runs the workers for each ratio, and writes the tables."""
    over_ratios(__file__, __doc__, "uneven-batches", work, rows, table)


def row(key: str, one: dict) -> str:
    """A line of the table."""
    median = lambda rounds, kind: statistics.median(r[kind] for r in rounds)
    gains = [r["even"] / r["shared"] for r in one["rounds"]]
    gain = statistics.median(gains)
    cells = [
        *key.split("|"),
        f"{one['slowness']:.2f}",
        str(one["named_after"]),
        " / ".join(map(str, one["counts"])),
        *(f"{median(one['rounds'], kind):.3f}" for kind in KINDS),
        f"{gain:.2f} ({min(gains):.2f} - {max(gains):.2f})",
        f"{one['ideal']:.2f}",
        f"{gain / one['ideal']:.0%}",
        f"{statistics.median(r['even'] / r['plain'] for r in one['before']):.3f}",
    ]
    return "| " + " | ".join(cells) + " |"


def rows(results: dict) -> list[str]:
    """Lines of the table."""
    return [row(key, one) for key, one in results.items()]


def table(results: dict, rounds: int) -> str:
    """The report."""
    loads = [load for one in results.values() for load in one["load"]]
    head = (
        "processes | nominal ratio | measured slowness | named after steps | parts | plain, s | even, s | shared, s | "
        "gain (range) | ideal gain | gain / ideal | even / plain, nobody slow"
    )
    return f"""# Slow replicas of data parallelism

`python benchmarks/uneven_batches.py`: a residual MLP of {LAYERS} layers ({WIDTH} wide, {HIDDEN} hidden units),
{EXAMPLES} examples a step in {PARTS} parts, plain SGD; one CPU device a process, the last one held at 1 / ratio of the
others' cores. Each is bound to one core; of two processes the other one has its own, of four each of the others has
{FAST_CORES / 4:g} of it. {rounds} rounds; medians, and medians of ratios within a round. `plain` is the planned step
without parts, `even` and `shared` are `UnevenStep`. The machine has {os.cpu_count()} cores; its load average was
{min(loads):.1f} to {max(loads):.1f}. The ideal gain is that for the measured slowness, which is too large where two
processes share a core: who waits for it seems slower than it is.

| {head} |
|{" --- |" * (head.count("|") + 1)}
{chr(10).join(rows(results))}
"""


def work(address: str, number: int, count: int, ratio: float, folder: pathlib.Path, rounds: int) -> None:
    """One of the processes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    os.sched_setaffinity(0, {number % (os.cpu_count() or 1)})  # a quota is lost in part where threads change their core
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, count, number)

    import autoshard
    from autoshard.balance.busy_time import BusyTime
    from autoshard.balance.detect import Detector
    from autoshard.transfer.peers import all_gather_text

    def loss_fn(params, x, rng):
        for up, down in zip(params["up"], params["down"], strict=True):
            x = x + jax.nn.relu(x @ up) @ down
        return jnp.mean(jnp.square(x)), {}

    plain = autoshard.TrainStep(loss_fn, optax.sgd(1e-3))
    uneven = autoshard.UnevenStep(plain, count, PARTS)

    def init(seed):
        keys = jax.random.split(jax.random.key(seed), 2 * LAYERS)
        up = [jax.random.normal(k, (WIDTH, HIDDEN)) / WIDTH**0.5 for k in keys[:LAYERS]]
        down = [jax.random.normal(k, (HIDDEN, WIDTH)) / HIDDEN**0.5 for k in keys[LAYERS:]]
        return plain.init({"up": up, "down": down})

    quota = CpuQuota(f"uneven-{number}")
    fast = None if count <= (os.cpu_count() or 1) else FAST_CORES / count
    try:
        shapes = jax.eval_shape(init, 0), jax.ShapeDtypeStruct((EXAMPLES, WIDTH), "float32")
        options = autoshard.PlanOptions(while_trips=uneven.mean_parts)
        planned = autoshard.baselines.data_parallel(plain, *shapes, mesh={"data": count}, donate_argnums=0)
        shared = autoshard.plan(uneven, *shapes, uneven.even, donate_argnums=0, options=options)
        runs = {"plain": planned.jit(plain), "uneven": shared.jit(uneven)}
        x = np.asarray(jax.random.normal(jax.random.key(1), shapes[1].shape))
        batches, states = {}, {}
        for kind, (plan, run) in {"plain": (planned, runs["plain"]), "uneven": (shared, runs["uneven"])}.items():
            own = (*shapes, uneven.even)[: 2 if kind == "plain" else 3]
            batches[kind] = jax.make_array_from_callback(x.shape, run.in_shardings(own)[1], lambda index: x[index])
            states[kind] = plan.init(init, 0, run=run)
        counts = {"even": uneven.even}
        busy = BusyTime()

        def timed(kind):
            name = "plain" if kind == "plain" else "uneven"
            args = (states[name], batches[name], *(() if kind == "plain" else (counts[kind],)))
            all_gather_text("")
            busy.lap_s()
            begin_s = time.perf_counter()
            states[name], metrics = jax.block_until_ready(runs[name](*args))
            took_s, busy_s = time.perf_counter() - begin_s, busy.lap_s()
            told = [tuple(map(float, t.split())) for t in all_gather_text(f"{took_s:.6f} {busy_s:.6f}")]
            return max(t for t, _ in told), [b for _, b in told], float(metrics["loss"])

        def round_of(kinds, seed):
            steps_s = {}
            for kind in random.Random(seed).sample(kinds, len(kinds)):
                timed(kind)
                steps_s[kind] = timed(kind)[0]
            return steps_s

        for kind in ("plain", "even"):
            timed(kind)  # compiles
        if fast is not None:
            quota.limit_evenly(fast)
        before = [round_of(("plain", "even"), k) for k in range(rounds)]
        cores = (fast or 1) / ratio if number == count - 1 else fast
        if cores is not None:
            quota.limit_evenly(cores)
        known, named_after = Detector(), 0
        for taken in range(1, WATCHED + 1):
            known = known.then(timed("even")[1])
            if known.named[-1] and not named_after:
                named_after = taken
        slowness = known.slowness
        counts["shared"] = uneven.shares(slowness)
        taken, load = [], []
        for k in range(rounds):
            taken.append(round_of(KINDS, k))
            load.append(os.getloadavg()[0])
        quota.limit(None)
        if number == 0:
            result = {
                "ideal": ideal_gain(slowness),
                "slowness": max(slowness),
                "named_after": named_after,
                "counts": counts["shared"].tolist(),
                "before": before,
                "rounds": taken,
                "load": load,
            }
            (folder / "result.json").write_text(json.dumps(result))
        all_gather_text("over")
    finally:
        quota.close()


if __name__ == "__main__":
    main()

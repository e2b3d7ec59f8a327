"""Slow processes along a tensor axis, really slow: moving and leaving out units against doing nothing.

    python benchmarks/stragglers_real.py [--ratios 2,4,8] [--processes 2] [--rounds 7]

Needs root. Worker processes with one CPU device each share every layer of a residual MLP along a tensor axis; one is
held at 1 / ratio of what the others have by the cgroup CPU controller. Of two processes on two cores the other one is
not held; of more, each has a quota, which together leave cores free. No speed is told: in six steps at even shares
each process reads from the scheduler how long it was busy (`autoshard/balance/busy_time.py`), the detector names the
slow one, and the controller decides for each mode what moves and what is left out. Then, in every round, each mode
takes two steps, in random order, of which the second is timed: the first moves the state. All modes run the same
compiled program, except `off`, which is the planned one. The ideal gain is that of work divided at will: the sum of the
speeds over the number of processes times the least. Ratios are taken within a round; medians over the rounds. Writes
results/stragglers-real.md and .json.
"""

import dataclasses
import json
import os
import pathlib
import random
import statistics
import time

from quota import CpuQuota, ideal_gain, over_ratios

TOKENS, WIDTH, HIDDEN, LAYERS = 4096, 128, 8192, 2
WATCHED = 6
FAST_CORES = 1.2
"""Cores for all processes, where there are more than cores; less than there are, so that quotas decide."""
SPARE = 1.5
"""Places are made for a slowdown so many times the nominal one, since quotas slow processes more than they tell."""
MODES = ("off", "one unit", "resize", "migrate", "semi")


def main() -> None:
    """Runs the workers for each ratio, and writes the tables."""
    over_ratios(__file__, __doc__, "stragglers-real", work, rows, table)


def rows(results: dict) -> list[str]:
    """Lines of the table."""
    lines = []
    for key, one in results.items():
        processes, ratio = key.split("|")
        median = lambda mode, one=one: statistics.median(r[mode] for r in one["rounds"])
        for mode in MODES:
            gains = [r["off"] / r[mode] for r in one["rounds"]]
            gain = statistics.median(gains)
            part = f"{(gain) / one['ideal']:.0%}" if mode != "off" else "-"
            told = one["predicted"][mode]
            cells = [
                processes,
                ratio,
                f"{one['slowness']:.2f}",
                str(one["named_after"]),
                mode,
                one["shares"][mode],
                f"{median(mode):.3f}",
                f"{gain:.2f} ({min(gains):.2f} - {max(gains):.2f})",
                f"{one['ideal']:.2f}",
                part,
                f"{told / median(mode):.0%}" if mode != "off" else "-",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def table(results: dict, rounds: int) -> str:
    """The report."""
    loads = [load for one in results.values() for load in one["load"]]
    head = (
        "processes | nominal ratio | measured slowness | named after steps | mode | computes, of all units | step, s | "
        "gain (range) | ideal gain | gain / ideal | model / measured step"
    )
    return f"""# Slow processes along a tensor axis

`python benchmarks/stragglers_real.py`: a residual MLP of {LAYERS} layers ({WIDTH} wide, {HIDDEN} hidden units),
{TOKENS} rows a step, plain SGD; one CPU device a process, the last one held at 1 / ratio of the others' cores. Of two
processes the other one has a core; of four each of the others has {FAST_CORES / 4:g} cores.
{rounds} rounds; medians of ratios within a round. `one unit` is the program for uneven shares with one unit moved, so
that what it costs by itself is seen. `resize` and `semi` may leave out half of an even share. The last column is what
the controller's own model predicts for the step, scaled to the step of `off`, over the measured one. The machine has
{os.cpu_count()} cores; its load average was {min(loads):.1f} to {max(loads):.1f}.

| {head} |
|{" --- |" * (head.count("|") + 1)}
{chr(10).join(rows(results))}
"""


# ---- a worker


def training():
    """(step, shapes of parameters and batch, maker of both)."""
    import jax
    import jax.numpy as jnp

    def init(seed):
        keys = jax.random.split(jax.random.key(seed), 2 * LAYERS)
        up = [jax.random.normal(k, (WIDTH, HIDDEN)) / WIDTH**0.5 for k in keys[:LAYERS]]
        down = [jax.random.normal(k, (HIDDEN, WIDTH)) / HIDDEN**0.5 for k in keys[LAYERS:]]
        return {"up": up, "down": down}

    def loss_of(params, x):
        for up, down in zip(params["up"], params["down"], strict=True):
            x = x + jax.nn.relu(x @ up) @ down
        return jnp.mean(jnp.square(x))

    def step(params, x):
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients), loss

    return step, init


def work(address: str, number: int, count: int, ratio: float, folder: pathlib.Path, rounds: int) -> None:
    """One of the processes."""
    import jax
    import numpy as np

    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, count, number)

    import autoshard
    from autoshard.balance.busy_time import BusyTime
    from autoshard.balance.detect import Detector
    from autoshard.balance.options import Balance
    from autoshard.balance.places import Placing, even_placing, moved
    from autoshard.balance.policy import Disturbance, Policy, act
    from autoshard.plans.apply import argument_shapes, check
    from autoshard.plans.balanced import units_of
    from autoshard.plans.movable_work import island_seconds, parts_of
    from autoshard.transfer.peers import all_gather_text

    quota = CpuQuota(f"stragglers-{number}")
    fast = None if count <= (os.cpu_count() or 1) else FAST_CORES / count
    try:
        step, init = training()
        shapes = jax.eval_shape(init, 0), jax.ShapeDtypeStruct((TOKENS, WIDTH), "float32")
        plan = autoshard.baselines.megatron(step, *shapes, mesh={"tensor": count}, donate_argnums=0)
        balance = Balance("semi", absorbs=max(4.0, SPARE * ratio), most_buckets=32 // count, max_loss_share=0.5)
        run = plan.jit(step, balance=balance)
        params = plan.init(init, 0, run=run)
        x = np.asarray(jax.random.normal(jax.random.key(1), shapes[1].shape))
        everywhere = jax.sharding.NamedSharding(run.mesh, jax.sharding.PartitionSpec())
        x = jax.make_array_from_callback(x.shape, everywhere, lambda index: x[index])
        busy = BusyTime()

        def timed(params):
            all_gather_text("")
            busy.lap_s()
            begin_s = time.perf_counter()
            params, loss = jax.block_until_ready(run(params, x))
            took_s, busy_s = time.perf_counter() - begin_s, busy.lap_s()
            told = [tuple(map(float, t.split())) for t in all_gather_text(f"{took_s:.6f} {busy_s:.6f}")]
            return params, max(t for t, _ in told), [b for _, b in told], float(loss)

        params, *_ = timed(params)  # compiles
        params, *_ = timed(params)
        cores = (fast or 1) / ratio if number == count - 1 else fast
        if cores is not None:
            quota.limit_evenly(cores)
        known, named_after, evens = Detector(), 0, []
        for taken in range(1, WATCHED + 1):
            params, step_s, times, _ = timed(params)
            known = known.then(times)
            evens.append(step_s)
            if known.named[-1] and not named_after:
                named_after = taken
        slowness = known.slowness
        graph = check(plan, step, argument_shapes(plan)).graph
        own_s = island_seconds(plan, graph, units_of(plan, graph))
        other_s = plan.estimate.compute_s - sum(own_s.values())
        scale = statistics.median(evens) / max(slowness) / plan.estimate.compute_s
        rooms = run.balance.rooms
        placed = [(room, even_placing(room)) for room in rooms]
        parts = parts_of(placed, [own_s[room.unit.index] for room in rooms], other_s, 1e9, scale)
        placings, predicted, shares = {}, {}, {}
        for mode in MODES:
            options = dataclasses.replace(balance, mode="off" if mode == "one unit" else mode)
            action = act(Policy(options), Disturbance(slowness, 10_000), parts)
            chosen = []
            for part, decision in zip(parts, action.decisions, strict=True):
                units = moved(part.placing, decision.counts).units
                chosen.append(Placing(units, decision.active))
            if mode == "one unit":
                counts = [list(p.placing.counts) for p in parts]
                chosen = [moved(p.placing, [c[0] + 1, *c[1:-1], c[-1] - 1]) for p, c in zip(parts, counts, strict=True)]
            placings[mode], predicted[mode] = chosen, action.after_s
            run.balance.place(chosen)
            shares[mode] = " / ".join(f"{share:.0%}" for share in run.balance.shares())
        taken, load = [], []
        for k in range(rounds):
            steps_s = {}
            for mode in random.Random(k).sample(MODES, len(MODES)):
                run.balance.place(placings[mode])
                params, *_ = timed(params)
                params, steps_s[mode], _, loss = timed(params)
            taken.append(steps_s)
            load.append(os.getloadavg()[0])
        quota.limit(None)
        if number == 0:
            result = {
                "ideal": ideal_gain(slowness),
                "slowness": max(slowness),
                "named_after": named_after,
                "shares": shares,
                "predicted": predicted,
                "rounds": taken,
                "load": load,
                "loss": loss,
            }
            (folder / "result.json").write_text(json.dumps(result))
        all_gather_text("over")
    finally:
        quota.close()


if __name__ == "__main__":
    main()

"""What the runtime of tables in host memory takes for a batch, however few ids it has: `HostRates.batch_s`.

    python benchmarks/host_batches.py                      # two minutes
    python benchmarks/host_batches.py --pooling            # bags summed at the host: bytes to the devices, CPU time
    python benchmarks/host_batches.py --layers             # dense layers at the host: operations a second of CPU time

CPU time of the process that runs the steps, not of its workers, for a step with four ids in the mode `sync`, less that
of the same step over rows that are there already. What remains is Python, messages to workers, copies to and from the
device. One thread does most of it, so that no number of CPUs shortens it.

With `--pooling`: eight tables of rows of 8 float32, bags of four ids that follow Zipf's law, Adagrad. What goes to the
devices for a batch, as rows with their state and positions, and as sums; and CPU time of the sums and of the update of
rows, beside `HostRates.line_s` times the lines that `offloading/choices.py` counts.

With `--layers`: a tower of 256, 1,024, 1,024 and 256 numbers over one row of 256 for each of 4,096 examples, Adagrad.
"""

import argparse
import itertools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autoshard
from autoshard.offloading.situation import HostRates, lines
from autoshard.tables.host_layers import CutResult
from autoshard.tables.rows_loss import RowsBatch
from autoshard.tables.sparse_step import sparse_step
from autoshard.tables.state_rows import rows_of


def program(num_tables: int) -> tuple[autoshard.TrainStep, autoshard.TrainState, dict[str, np.ndarray]]:
    """A step that looks four rows up in each table, its state, and a batch."""
    params = {f"t{n}": jnp.ones((1000, 16)) for n in range(num_tables)}

    def loss_fn(p, batch, _):
        return sum(jnp.sum(p[name][batch["ids"]] ** 2) for name in p), None

    step = autoshard.TrainStep(loss_fn, optax.adagrad(0.1))
    return step, step.init(params), {"ids": np.arange(4, dtype=np.int32)}


def cpu_s(run, count: int) -> float:
    """CPU time of this process for one of `count` steps."""
    began_s = time.process_time()
    run(count)
    return (time.process_time() - began_s) / count


def batch_s(num_tables: int, num_workers: int, count: int) -> float:
    """Of a step in `sync`, less the step alone."""
    step, state, batch = program(num_tables)
    execution = autoshard.Execution("sync", num_workers=num_workers)
    with autoshard.HostTables(step, state, batch, execution=execution) as tables:
        steps = lambda n: sum(1 for done in tables.steps([batch] * n) if jax.block_until_ready(done.metrics))
        steps(20)
        with_tables_s = cpu_s(steps, count)
        sparse = tables.sparse
    read = sparse.rows_of_batch(batch)
    kept = [sparse.state_of(state, read.rows)]
    fed = jax.device_put(RowsBatch(batch=batch, positions=tuple(read.positions)))
    alone = jax.jit(sparse.step, donate_argnums=0)

    def steps_alone(n: int) -> None:
        for _ in range(n):
            kept[0], metrics = alone(kept[0], fed)
            jax.block_until_ready(metrics)

    steps_alone(20)
    return with_tables_s - cpu_s(steps_alone, count)


def pooling(count: int) -> None:
    """Prints bytes and CPU time of batches whose bags are summed at the host."""
    tables, num_rows, dim, examples, bag = 8, 200_000, 8, 8192, 4
    names = [f"t{n}" for n in range(tables)]

    def loss_fn(p, batch, _):
        sums = [p[name][batch["ids"][:, n]].sum(1) for n, name in enumerate(names)]
        return jnp.mean(jnp.square(sum(sums) @ p["dense"])), None

    step = autoshard.TrainStep(loss_fn, optax.adagrad(0.1))
    state = step.init({name: jnp.ones((num_rows, dim)) for name in names} | {"dense": jnp.ones((dim, 1))})
    rng = np.random.default_rng(0)
    until = np.cumsum(np.arange(1.0, num_rows + 1) ** -1.05)
    drawn = [np.searchsorted(until / until[-1], rng.random((examples, tables, bag))) for _ in range(4)]
    batches = [{"ids": np.minimum(ids, num_rows - 1).astype(np.int32)} for ids in drawn]
    by_rows, by_sums = (sparse_step(step, state, batches[0], pooled=p) for p in ((), names))
    size = lambda tree: sum(np.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
    rows_bytes = sum(size(x) for x in rows_of(by_rows.state, by_rows.update.leaves)) + size(by_rows.batch["positions"])
    host = by_sums.layers
    assert host is not None
    rows = [np.ones((by_sums.capacities[x.table], *x.row_shape), np.float32) for x in by_sums.update.leaves]
    gradients = tuple(np.ones(x.shape, x.dtype) for x in host.shapes)
    result = CutResult({}, gradients, ())
    sums_s, update_s, distinct = [], [], []
    for number in range(count):
        batch = batches[number % len(batches)]
        read = by_sums.rows_of_batch(batch)
        distinct.append(sum(map(len, read.rows)))
        times_s = [time.process_time()]
        for run in (host.values, lambda *args: host.update(*args, result)):
            run(rows, (), read.positions, batch)
            times_s.append(time.process_time())
        sums_s.append(times_s[1] - times_s[0])
        update_s.append(times_s[2] - times_s[1])
    ids, own, places = tables * examples * bag, statistics.median(distinct), sum(by_sums.capacities)
    counted_s = (3 * ids * lines(4 * dim) + 2 * places * lines(8 * dim)) * HostRates().line_s
    print(f"to the devices: {rows_bytes / 1e6:.1f} MB of rows, {size(host.shapes) / 1e6:.1f} MB of sums")
    print(
        f"{ids:,} ids, {own:,.0f} different: sums {statistics.median(sums_s) * 1e3:.1f} ms, update "
        f"{statistics.median(update_s) * 1e3:.1f} ms of CPU time; priced at {counted_s * 1e3:.1f} ms"
    )


def layers(count: int) -> None:
    """Prints what dense layers reach on CPUs, forward and in the update, which makes them again and their gradients."""
    examples, widths, num_rows = 4096, (256, 1024, 1024, 256, 8), 100_000
    names = [f"w{n}" for n in range(len(widths) - 1)]

    def loss_fn(p, batch, _):
        x = p["table"][batch["ids"]]
        for name in names:
            x = jax.nn.relu(x @ p[name])
        return jnp.mean(jnp.square(x @ p["dense"])), None

    step = autoshard.TrainStep(loss_fn, optax.adagrad(0.1))
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32) / 16
    params = {name: normal(*shape) for name, shape in zip(names, itertools.pairwise(widths), strict=True)}
    state = step.init(params | {"table": normal(num_rows, widths[0]), "dense": normal(widths[-1], 1)})
    batch = {"ids": rng.integers(0, num_rows, examples).astype(np.int32)}
    sparse = sparse_step(step, state, batch, host_layers=names)
    host = sparse.layers
    assert host is not None
    rows = [np.ones((sparse.capacities[x.table], *x.row_shape), np.float32) for x in sparse.update.leaves]
    own = rows, [np.asarray(x) for x in rows_of(state, host.dense)], sparse.rows_of_batch(batch).positions, batch
    result = CutResult({}, tuple(np.ones(x.shape, x.dtype) for x in host.shapes), ())
    flops = sum(cut.flops for cut in host.cuts)
    for name, run, passes in (("values", host.values, 1), ("update", lambda *args: host.update(*args, result), 3)):
        run(*own)
        found = [cpu_s(lambda _, run=run: run(*own), 1) for _ in range(count)]
        rate = passes * flops / statistics.median(found)
        print(f"{name}: {passes} x {flops / 1e9:.1f} GFLOP, {rate / 1e9:.0f} GFLOP/s of CPU time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of a measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements, of which the median counts")
    parser.add_argument("--pooling", action="store_true", help="measure sums of bags at the host instead")
    parser.add_argument("--layers", action="store_true", help="measure dense layers at the host instead")
    arguments = parser.parse_args()
    if arguments.layers:
        layers(min(arguments.steps, 12))
        return
    if arguments.pooling:
        pooling(min(arguments.steps, 40))
        return
    print("| tables | workers | CPU time of a batch |\n|---:|---:|---:|")
    for num_tables, num_workers in ((1, 1), (1, 4), (8, 1), (8, 4)):
        found = [batch_s(num_tables, num_workers, arguments.steps) for _ in range(arguments.rounds)]
        print(f"| {num_tables} | {num_workers} | {statistics.median(found) * 1e3:.2f} ms |", flush=True)


if __name__ == "__main__":
    main()

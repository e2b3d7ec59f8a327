"""What the runtime of tables in host memory takes for a batch, however few ids it has: `HostRates.batch_s`.

    python benchmarks/host_batches.py                      # two minutes

CPU time of the process that runs the steps, not of its workers, for a step with four ids in the mode `sync`, less that
of the same step over rows that are there already. What remains is Python, messages to workers, copies to and from the
device. One thread does most of it, so that no number of CPUs shortens it.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autoshard
from autoshard.tables.rows_loss import RowsBatch


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of a measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements, of which the median counts")
    arguments = parser.parse_args()
    print("| tables | workers | CPU time of a batch |\n|---:|---:|---:|")
    for num_tables, num_workers in ((1, 1), (1, 4), (8, 1), (8, 4)):
        found = [batch_s(num_tables, num_workers, arguments.steps) for _ in range(arguments.rounds)]
        print(f"| {num_tables} | {num_workers} | {statistics.median(found) * 1e3:.2f} ms |", flush=True)


if __name__ == "__main__":
    main()

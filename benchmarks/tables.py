"""Embedding tables on one kind of device: the plan beside tables by rows, by columns, by table and whole.

    python benchmarks/tables.py --cluster h100x16 --zipf 0 1.05          # a table of predicted steps
    python benchmarks/tables.py --cluster h100x16 --verify               # and what XLA:GPU sends for each

The model is configs/dlrm_criteo.yaml: the sizes of MLPerf's benchmark on the Criteo 1 TB click logs, 65,536 examples a
step, plain SGD unless `--optimizer` says otherwise. By rows, by columns and whole are the strategies `ddp+rows`,
`ddp+columns` and `ddp` of the library, on one axis over all devices. By table, as TorchRec's `TABLE_WISE`, is no even
split of each tensor; its figure is a lower bound made of the rest of the step by columns, and of what the device with
most tables must send, get, look up, add and update: tables are dealt out by size, largest first, to whoever has least.

With `--sparse` the step is planned once more with sparse gradients for tables of more rows than a batch has ids
(`autoshard.tables.sparse_on_devices`), and momentum that is lazy for them.
"""

import argparse
import dataclasses
import math
import pathlib

import autoshard
from autoshard import baselines
from autoshard.cluster import Cluster
from autoshard.cost.collectives import all_to_all
from autoshard.errors import AutoshardError
from autoshard.strategies.strategies import DataRule, Spread, Strategy
from autoshard.tables import sparse_on_devices
from autoshard.train.config import TrainConfig, load_config
from autoshard.train.planning import arguments
from autoshard.train.registry import staged_functions, train_functions

ROOT = pathlib.Path(__file__).resolve().parents[1]
STRATEGIES = (
    Strategy(DataRule.DDP),
    Strategy(DataRule.DDP, spread=Spread.ROWS),
    Strategy(DataRule.DDP, spread=Spread.COLUMNS),
    Strategy(DataRule.DDP, spread=Spread.TABLES),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to place the tables: its predicted step, what each device sends, its memory, and what XLA sends."""

    name: str
    step_s: float
    sent_bytes: float
    peak_bytes: float
    note: str = ""
    compiled_bytes: float | None = None

    def __str__(self) -> str:
        compiled = "" if self.compiled_bytes is None else f"{self.compiled_bytes / 1e6:.2f}"
        figures = f"{self.step_s * 1e3:.2f} | {self.sent_bytes / 1e6:.1f} | {compiled} | {self.peak_bytes / 1e9:.2f}"
        return f"| {self.name} | {figures} | {self.note} |"


def by_table(config: TrainConfig, cluster: Cluster, columns: autoshard.Plan) -> Row:
    """A lower bound of whole tables on single devices: the step by columns, in which what belongs to tables takes as
    much longer as the device with most has more than an even share.
    """
    from autoshard_models import dlrm

    sizes = dlrm.PRESETS[config.model.preset]
    n = columns.num_devices
    rows, count = [0] * n, [0] * n
    for size in sorted(sizes.table_rows, reverse=True):
        at = min(range(n), key=lambda d: (rows[d], count[d]))
        rows[at], count[at] = rows[at] + size, count[at] + 1
    more_rows, more_ids = max(rows) * n / sum(rows), max(count) * n / len(sizes.table_rows)
    e = columns.estimate
    updates_s = sum(c.compute_s for c in e.compute if "train_step.py" in c.source)
    lookups_s = sum(c.compute_s for c in e.compute if c.name in ("gather", "scatter-add"))
    (axis,) = columns.logical_mesh.axes
    width = 4.0 * sizes.embed_dim * config.data.batch_size
    own = all_to_all([axis], width * max(count))
    even = all_to_all([axis], width * len(sizes.table_rows) / n)
    step_s = e.step_s + (more_rows - 1) * updates_s + (more_ids - 1) * lookups_s + 2 * (own.time_s - even.time_s)
    sent_bytes = e.comm_bytes + 2 * (own.wire_bytes - even.wire_bytes)
    needed = 2 * max(rows) * sizes.embed_dim * 4
    return Row("by table", step_s, sent_bytes, needed, f"a lower bound; {max(rows):,} rows on one device")


def measured(
    config: TrainConfig, cluster: Cluster, zipf: float, limit_s: float, verify: bool, sparse: bool
) -> list[Row]:
    functions = train_functions(config)
    args = arguments(config, functions)
    lookups = autoshard.Lookups(autoshard.IdDistribution(zipf))
    options = autoshard.PlanOptions(mesh_limit_s=limit_s, lookups=lookups)
    compiled = lambda plan: plan.verify(functions.step, *args).compiled_bytes if verify else None
    rows = []
    plan = autoshard.plan(functions.step, *args, cluster=cluster, donate_argnums=0, options=options)
    count = sum(e.exchange is not None for _, e in plan.shardings)
    e = plan.estimate
    note = f"{', '.join(f'{a}={n}' for a, n in plan.axes)}; {count} exchanges; gap {plan.certificate.gap:.2%}"
    rows.append(Row("plan", e.step_s, e.comm_bytes, e.peak_bytes, note, compiled(plan)))
    if sparse:
        step = sparse_on_devices(staged_functions(config).step, *args, lazy=True)
        own = autoshard.plan(step, *args, cluster=cluster, donate_argnums=0, options=options)
        count, e = sum(e.exchange is not None for _, e in own.shardings), own.estimate
        note = f"{', '.join(f'{a}={n}' for a, n in own.axes)}; {count} exchanges; gap {own.certificate.gap:.2%}"
        sent = own.verify(step, *args).compiled_bytes if verify else None
        rows.append(Row("plan, sparse gradients", e.step_s, e.comm_bytes, e.peak_bytes, note, sent))
    subject = baselines.prepare_subject(functions.step, *args, cluster=cluster, donate_argnums=0)
    for strategy in STRATEGIES:
        outcome = baselines.try_baseline(strategy, subject, options=options)
        if outcome.plan is None:
            rows.append(Row(strategy.name, math.nan, math.nan, math.nan, outcome.reason[:60]))
            continue
        own, e = autoshard.Plan.of(outcome.plan), outcome.plan.estimate
        note = "" if outcome.fits else "does not fit"
        try:
            sent = compiled(own)
        except AutoshardError as error:
            sent, note = None, f"{note} {str(error)[:60]}".strip()
        rows.append(Row(strategy.name, e.step_s, e.comm_bytes, e.peak_bytes, note, sent))
        if strategy.spread is Spread.COLUMNS:
            rows.append(by_table(config, cluster, own))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="dlrm_criteo")
    parser.add_argument("--cluster", default="h100x16")
    parser.add_argument("--zipf", type=float, nargs="+", default=[0.0, 1.05])
    parser.add_argument("--time-limit", type=float, default=60.0, help="of each search on a mesh, in seconds")
    parser.add_argument("--verify", action="store_true", help="compile each with XLA:GPU")
    parser.add_argument("--sparse", action="store_true", help="plan the step with sparse gradients, too")
    parser.add_argument("overrides", nargs="*", help="such as data.batch_size=32768")
    asked = parser.parse_args()
    config = load_config(ROOT / "configs" / f"{asked.config}.yaml", asked.overrides)
    cluster = Cluster.from_file(ROOT / "configs" / "clusters" / f"{asked.cluster}.yaml")
    for zipf in asked.zipf:
        print(f"\n{asked.config} on {asked.cluster}, Zipf exponent {zipf:g}\n")
        print("| tables | step ms | sent MB | compiled MB | memory GB | |\n|---|---|---|---|---|---|")
        for row in measured(config, cluster, zipf, asked.time_limit, asked.verify, asked.sparse):
            print(row, flush=True)


if __name__ == "__main__":
    main()

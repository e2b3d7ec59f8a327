"""What is usually done, priced by the same rules: CPUs alone, accelerators alone, tables on hosts one after another.

Accelerators alone are what TorchRec's planner chooses from: tables by row, by column or by table (whole tables dealt
out to devices, the largest first, as its greedy partitioner does), and whole where that is small. By row is priced with
duplicates removed, as autoshard does it, so that it is no worse than TorchRec's.
"""

import dataclasses

from autoshard.cost.collectives import all_to_all
from autoshard.errors import MemoryBudgetError
from autoshard.host_tables.options import Execution
from autoshard.offloading.choices import Choice, Place, by_column, by_row, exchange_fixed_s, layers, on_host
from autoshard.offloading.search import Found, Outcome, SearchOptions, outcome, search, with_best_workers
from autoshard.offloading.situation import Situation, lines


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """One way to run the step.

    Attributes:
      name: What it is called.
      step_s: Its time; infinite if it does not fit.
      why_not: Why it does not fit; empty if it does.
    """

    name: str
    step_s: float
    why_not: str = ""


def compared(s: Situation, found: Found) -> tuple[Compared, ...]:
    """The usual ways, and the plan. On accelerators alone only rows of the batch are updated, as TorchRec does it."""
    s = dataclasses.replace(s, updates_all_rows=False)
    rows = [
        _cpus_alone(s),
        _fitting(s, "accelerators, by table", *_by_table(s)),
        _priced(s, "accelerators, by column", [by_column(t, s) for t in s.tables]),
        _priced(s, "accelerators, by row", [by_row(t, s) for t in s.tables]),
        _best_on_accelerators(s),
        _priced(s, "tables on hosts, sync", [on_host(t, s) for t in s.tables]),
        Compared(f"plan ({found.best.execution.outline})", found.best.step_s),
    ]
    return tuple(rows)


def _priced(s: Situation, name: str, choices: list[Choice]) -> Compared:
    """One batch after another."""
    priced = with_best_workers(s, Execution("sync"), choices)
    return _fitting(s, name, priced.step_s, priced.device_bytes, priced.host_bytes)


def _fitting(s: Situation, name: str, step_s: float, device_bytes: float, host_bytes: float = 0.0) -> Compared:
    """A row; without a time where memory does not suffice."""
    for what, needed, there in (
        ("accelerator", device_bytes, s.budget_bytes),
        ("host", host_bytes, s.host_budget_bytes),
    ):
        if needed > there * (1 + 1e-9):
            return Compared(name, float("inf"), f"{needed / 1e9:,.0f} GB of {there / 1e9:,.0f} GB of each {what}")
    return Compared(name, step_s)


def _cpus_alone(s: Situation) -> Compared:
    """Tables and dense part on all CPUs: rows are looked up and updated, and never sent."""
    cpu_s = memory_s = host_bytes = 0.0
    for table in s.tables:
        ids, rows = table.num_ids / s.num_nodes, table.ids.expected_distinct(table.num_ids, table.num_rows)
        touched = rows / s.num_nodes
        cpu_s += ids * (s.rates.id_s + 2 * lines(table.row_bytes) * s.rates.line_s)
        cpu_s += touched * 2 * lines(table.state_bytes) * s.rates.line_s
        memory_s += (4 * ids * table.row_bytes + 2 * touched * table.state_bytes) / s.host_bytes_per_s
        host_bytes += table.size_bytes / s.num_nodes
    dense_s = s.dense.flops / s.num_nodes / s.host_flops_per_s
    busy_s = (cpu_s + s.reading_s) / s.host.num_cpus
    return _fitting(s, "CPUs alone", max(busy_s, memory_s) + dense_s, 0.0, host_bytes)


def _by_table(s: Situation) -> tuple[float, float]:
    """Time and memory of the busiest device, with whole tables dealt out."""
    device = s.mesh.device_type
    time_s, bytes_ = [0.0] * s.num_devices, [s.dense.memory_bytes] * s.num_devices
    sent = 0.0
    for table in sorted(s.tables, key=lambda t: -max(t.size_bytes / s.budget_bytes, t.num_ids * t.row_bytes / 1e9)):
        distinct = table.ids.expected_distinct(table.num_ids, table.num_rows)
        moved = 5 * table.num_ids * table.row_bytes + 2 * distinct * table.state_bytes
        room = [d for d in range(s.num_devices) if bytes_[d] + table.size_bytes <= s.budget_bytes]
        owner = min(room or range(s.num_devices), key=lambda d: (time_s[d], bytes_[d]))
        time_s[owner] += moved / device.memory_bytes_per_s + device.launch_overhead_s
        bytes_[owner] += table.size_bytes
        collective = all_to_all(s.mesh.axes, table.num_ids * table.row_bytes / s.num_devices)
        sent += 2 * (collective.time_s - collective.fixed_s)
    return s.dense.step_s + max(time_s) + sent + exchange_fixed_s(s), max(bytes_)


def _best_on_accelerators(s: Situation) -> Compared:
    """The best mix of all these but for whole tables dealt out."""
    places = (Place.WHOLE, Place.BY_COLUMN, Place.BY_ROW)
    name = "accelerators, best mix"
    try:
        best = search(s, SearchOptions(places=places, modes=("sync",))).best
    except MemoryBudgetError:
        least = min(
            (outcome(s, Execution("sync"), [of(t, s) for t in s.tables], 0).device_bytes for of in (by_row, by_column)),
        )
        return _fitting(s, name, 0.0, least)
    return Compared(name, best.step_s)


def elsewhere(s: Situation, best: Outcome, number: int, places: list[Choice]) -> list[tuple[Choice, Outcome]]:
    """What the plan would be with one table at each of some other places, and all else as it is; but where layers run
    at the host behind that table, they then do not, and the rows of their other tables are sent.
    """
    own = best.choices[number]
    rest = [
        on_host(table, s) if own.cut is not None and choice.cut == own.cut else choice
        for table, choice in zip(s.tables, best.choices, strict=True)
    ]
    changed = []
    for choice in places:
        if (choice.place, choice.hot_rows) != (own.place, own.hot_rows):
            choices = [*rest[:number], choice, *rest[number + 1 :]]
            if best.num_workers:
                changed.append((choice, outcome(s, best.execution, choices, best.num_workers)))
            else:
                changed.append((choice, with_best_workers(s, best.execution, choices)))
    return changed


def with_cut(s: Situation, best: Outcome, number: int) -> Outcome:
    """What the plan would be with layers at the host in front of one cut, and all else as it is; in `sync` where rows
    in flight are patched.
    """
    cut, choices = s.cuts[number], []
    for table, choice in zip(s.tables, best.choices, strict=True):
        is_split = choice.cut is not None and not s.cuts[choice.cut].paths.isdisjoint(cut.paths)
        if table.path in cut.tables:
            choices.append(layers(table, number, s))
        else:
            choices.append(on_host(table, s) if is_split else choice)
    execution = best.execution if best.execution.mode != "pipelined" else Execution("sync")
    return with_best_workers(s, execution, choices)

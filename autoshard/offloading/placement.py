"""The decision as data, and as text that tells why."""

import dataclasses
from typing import Any

from autoshard.host_tables.options import Execution
from autoshard.offloading.choices import Choice, Place, choices_of, layers_s, spared_s
from autoshard.offloading.compare import Compared, compared, elsewhere, with_cut
from autoshard.offloading.search import Found, Outcome, SearchOptions, search, with_best_workers
from autoshard.offloading.situation import HostCut, Situation, TableUse
from autoshard.printing import TextConsole, amount, seconds, table


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedTable:
    """A table and its place.

    Attributes:
      use: The table. choice: Its place, with what that takes.
      place: The same for people. elsewhere: What moving it from host memory, or there, would do, for people.
    """

    use: TableUse
    choice: Choice
    place: str
    elsewhere: str


@dataclasses.dataclass(frozen=True, slots=True)
class TablePlacement:
    """Which table lives where, and how batches follow each other. Printing it shows all of it.

    Attributes:
      situation: What was placed on what.
      found: The best outcome, its bound, and the best of every mode.
      compared: What is usually done.
    """

    situation: Situation
    found: Found
    compared: tuple[Compared, ...]

    @property
    def best(self) -> Outcome:
        """The outcome that was chosen."""
        return self.found.best

    @property
    def step_s(self) -> float:
        """Predicted time of a step."""
        return self.best.step_s

    @property
    def examples_per_s(self) -> float:
        """Predicted throughput."""
        return self.situation.batch_size / self.step_s

    @property
    def gap(self) -> float:
        """How much better than the chosen one a placement may be, by the bound that was proven; at least 0."""
        return max(self.found.considered[0].objective_s / self.found.bound_s - 1, 0.0)

    @property
    def host_tables(self) -> tuple[str, ...]:
        """Paths of the tables that live in host memory, hot rows apart or not: `tables` of `autoshard.HostTables`."""
        pairs = zip(self.situation.tables, self.best.choices, strict=True)
        return tuple(t.path for t, choice in pairs if choice.place.is_on_host)

    @property
    def hot_rows(self) -> dict[str, int]:
        """By path of a table, how many of its most frequent rows stay on accelerators; for `hot_rows` of
        `autoshard.HostTables`, which takes these numbers where rows are numbered by frequency, and else the rows.
        """
        pairs = zip(self.situation.tables, self.best.choices, strict=True)
        return {t.path: choice.hot_rows for t, choice in pairs if choice.hot_rows}

    @property
    def pooled(self) -> tuple[str, ...]:
        """Paths of the tables whose rows are read by sums or layers at the host: `pooled` of `autoshard.HostTables`."""
        pairs = zip(self.situation.tables, self.best.choices, strict=True)
        return tuple(t.path for t, choice in pairs if choice.place in (Place.POOLED, Place.LAYERS))

    @property
    def cuts(self) -> tuple[HostCut, ...]:
        """In front of which dense layers run at the host."""
        numbers = dict.fromkeys(choice.cut for choice in self.best.choices if choice.cut is not None)
        return tuple(self.situation.cuts[n] for n in numbers)

    @property
    def host_layers(self) -> tuple[str, ...]:
        """Paths of the parameters whose layers run at the host: `host_layers` of `autoshard.HostTables`."""
        return tuple(path for cut in self.cuts for path in cut.params)

    @property
    def execution(self) -> Execution | None:
        """How `autoshard.HostTables` is to run it; None where no table is in host memory."""
        workers = self.best.num_workers
        return dataclasses.replace(self.best.execution, num_workers=workers) if workers else None

    @property
    def workers_per_accelerator(self) -> float:
        """CPUs that serve tables, for each accelerator."""
        return self.best.num_workers / self.situation.devices_per_node

    @property
    def outline(self) -> str:
        """What was decided and predicted, in a few lines."""
        return _outline(self)

    @property
    def tables(self) -> tuple["PlacedTable", ...]:
        """Which table lives where, and why, the largest first."""
        sizes = [t.size_bytes for t in self.situation.tables]
        return tuple(_placed(self, number) for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]))

    @property
    def tables_text(self) -> str:
        """Which table lives where, and why."""
        return _text(_tables(self))

    def __str__(self) -> str:
        return explained(self)


def placement_of(s: Situation, options: SearchOptions | None = None) -> TablePlacement:
    """Decides where every table lives, and how batches follow each other.

    Args:
      s: Tables, the rest of the step, accelerators and hosts.
      options: What may be chosen.

    Raises:
      MemoryBudgetError: No placement fits.
    """
    found = search(s, options or SearchOptions())
    return TablePlacement(s, found, compared(s, found))


def _outline(placement: TablePlacement) -> str:
    """The decision, where time goes, and memory of each level."""
    s, best, console = placement.situation, placement.best, TextConsole()
    stages, counts = best.stages, {}
    for choice in best.choices:
        counts[choice.place.value] = counts.get(choice.place.value, 0) + 1
    size = sum(t.size_bytes for t in s.tables)
    console.print(
        f"{len(s.tables)} tables of {amount(size)} with the optimizer's state, on {s.num_devices} x "
        f"{s.mesh.device_type.name} and {s.num_nodes} host{'s' if s.num_nodes > 1 else ''} of {s.host}"
    )
    console.print("  places     " + "; ".join(f"{count} in {name}" for name, count in counts.items()))
    for cut in placement.cuts:
        console.print(f"  layers     at the host: {_layers(cut)}, {amount(cut.value_bytes)} sent behind them")
    console.print(
        f"  step       {seconds(best.step_s)} predicted, {placement.examples_per_s:,.0f} examples/s; busiest: the "
        f"{stages.busiest}"
    )
    console.print(
        f"  stages     host {seconds(stages.host_s)}, link down {seconds(stages.down_s)}, accelerator "
        f"{seconds(stages.accelerator_s)} (dense {seconds(s.dense.step_s)}), link up {seconds(stages.up_s)}"
        + (f", network {seconds(stages.network_s)}" if s.num_nodes > 1 else "")
    )
    console.print(f"  mode       {_mode(best)}")
    if best.num_workers:
        console.print(
            f"  CPUs       {best.num_workers} workers a host, {placement.workers_per_accelerator:.3g} for each "
            f"accelerator; {s.most_workers} could serve"
        )
    console.print(
        f"  memory     {amount(best.device_bytes)} of {amount(s.budget_bytes)} on each accelerator; "
        f"{amount(best.host_bytes)} of {amount(s.host_budget_bytes)} on each host"
    )
    console.print(
        f"  proof      no placement that was considered is more than {placement.gap:.2%} better, by the same prices"
    )
    return console.text.rstrip()


def explained(placement: TablePlacement) -> str:
    """The outline, why each table is where it is, what else there is, and what all of it is based on."""
    s = placement.situation
    rates = s.rates
    assumed = (
        f"Assumed: a CPU finds an id in {seconds(rates.id_s)} and reads or writes a line of 64 bytes at a random place "
        f"in {seconds(rates.line_s)} (estimates); host memory {amount(s.host_bytes_per_s)}/s, links "
        f"{amount(s.to_device.bandwidth_bytes_per_s)}/s each way; on CPUs the dense part reaches "
        f"{rates.flops_share:.0%} of their peak. {_ids(placement)}"
        + (f" To read an example takes a CPU {seconds(rates.read_s)}." if rates.read_s else "")
    )
    cuts = (_text(_cuts(placement)),) if s.cuts else ()
    parts = _outline(placement), placement.tables_text, *cuts, _text(_others(placement)), _text(_modes(placement))
    return "\n\n".join((*parts, _text(assumed)))


def _text(what: Any) -> str:
    """What a terminal shows of something."""
    console = TextConsole()
    console.print(what)
    return console.text.rstrip()


def _mode(best: Outcome) -> str:
    execution = best.execution
    if execution.mode == "async":
        return f"{execution.outline}; rows may lack the updates of up to {execution.staleness} steps"
    if execution.mode == "pipelined":
        return f"{execution.outline}, patched: results are those of sync"
    return f"{execution.outline}: results are exact"


def _ids(placement: TablePlacement) -> str:
    exponents = sorted({t.ids.zipf_exponent for t in placement.situation.tables})
    told = f"{exponents[0]:.3g}" if len(exponents) == 1 else f"{exponents[0]:.3g} to {exponents[-1]:.3g}"
    return f"Ids follow Zipf's law with exponent {told} (0: all rows alike)."


def _tables(placement: TablePlacement):
    made = table(
        "Tables, the largest first",
        (("table", "left"), ("rows", "right"), ("size", "right"), ("ids a step", "right"), ("lives in", "left"),
         ("elsewhere", "left")),
    )  # fmt: skip
    for one in placement.tables:
        own = one.use
        made.add_row(
            own.path, f"{own.num_rows:,}", amount(own.size_bytes), f"{own.num_ids:,}", one.place, one.elsewhere
        )  # fmt: skip
    return made


def _placed(placement: TablePlacement, number: int) -> PlacedTable:
    use, choice = placement.situation.tables[number], placement.best.choices[number]
    place = choice.place.value + (f" ({choice.hot_rows:,} rows)" if choice.hot_rows else "")
    return PlacedTable(use, choice, place, _why(placement, number))


def _why(placement: TablePlacement, number: int) -> str:
    """For accelerators and for the host, whichever it is not: what moving the table there would do."""
    s, best = placement.situation, placement.best
    is_pooling = any(choice.place is Place.POOLED for choice in best.choices)
    all_of = [c for c in choices_of(s.tables[number], s, False, has_pooling=is_pooling) if c.cut is None]
    others = elsewhere(s, best, number, [c for c in all_of if c.place.fits_mode(best.execution.mode)])
    others = [(c, o) for c, o in others if c.place in placement.found.places]
    on_host = best.choices[number].place.is_on_host
    wanted = [(c, o) for c, o in others if c.place.is_on_host != on_host]
    if not wanted:
        return ""
    fitting = [(c, o) for c, o in wanted if o.fits]
    if not fitting:
        choice, least = min(wanted, key=lambda pair: pair[1].device_bytes + pair[1].host_bytes)
        level = "accelerator" if least.device_bytes > s.budget_bytes else "host"
        over = least.device_bytes - s.budget_bytes if level == "accelerator" else least.host_bytes - s.host_budget_bytes
        return f"{choice.place.value}: {amount(over)} too much for each {level}"
    choice, other = min(fitting, key=lambda pair: pair[1].objective_s)
    slower = other.step_s - best.step_s
    if slower < 0.0005 * best.step_s:
        work = other.stages.sum_s - best.stages.sum_s
        return f"{choice.place.value}: as fast, {seconds(abs(work))} {'more' if work > 0 else 'less'} work"
    return f"{choice.place.value}: +{seconds(slower)} a step"


def _cuts(placement: TablePlacement):
    """What each cut would do to the plan, with its tables in host memory."""
    s, best = placement.situation, placement.best
    made = table(
        "Layers at the host (all else as planned)",
        (("layers", "left"), ("of tables", "right"), ("sent", "right"), ("operations", "right"), ("on CPUs", "right"),
         ("spared accelerators", "right"), ("step", "right")),
    )  # fmt: skip
    for number, cut in enumerate(s.cuts):
        found = with_cut(s, best, number)
        step = seconds(found.step_s) if found.fits else "does not fit"
        is_chosen = any(choice.cut == number for choice in best.choices)
        made.add_row(
            _layers(cut), str(len(cut.tables)), amount(cut.value_bytes), amount(cut.flops, "FLOP"),
            seconds(layers_s(cut, s)), seconds(spared_s(cut, s)), f"{step}{', chosen' if is_chosen else ''}",
        )  # fmt: skip
    return made


def _layers(cut: HostCut) -> str:
    """The parameters of a cut, few of many."""
    first, *more = cut.params or ("none but tables",)
    return f"{first} to {more[-1]} ({len(cut.params)})" if more else first


def _others(placement: TablePlacement):
    made = table("Compared", (("way", "left"), ("step", "right"), ("examples/s", "right"), ("plan is", "right")))
    for row in placement.compared:
        if row.why_not:
            made.add_row(row.name, "does not fit", "", row.why_not)
        else:
            rate = placement.situation.batch_size / row.step_s
            made.add_row(row.name, seconds(row.step_s), f"{rate:,.0f}", f"{row.step_s / placement.step_s:.2f}x")
    return made


def _modes(placement: TablePlacement):
    made = table(
        "The best of every mode", (("mode", "left"), ("step", "right"), ("busiest", "left"), ("stale", "right"))
    )
    refined = (with_best_workers(placement.situation, one.execution, one.choices) for one in placement.found.considered)
    for one in sorted(refined, key=lambda one: one.objective_s):
        made.add_row(one.execution.outline, seconds(one.step_s), one.stages.busiest, str(one.execution.staleness))
    return made

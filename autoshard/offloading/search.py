"""The best place for every table, by integer programming, for every mode of execution; proven.

With x[t, c] = 1 where table t is at its place c, and L_r[t, c] the seconds that this takes of resource r
(`choices.py`), the totals of a step are

    L_r = D_r + sum over t, c of x[t, c] L_r[t, c] + u F_r

D is the dense part; F are latencies that are paid once: of the links where a table is on a host (u = u_host), of the
exchanges where accelerators send each other rows (u = u_exchange), with u >= x[t, c] for each place that needs it.
With W workers the host is busy for H = max(L_cpu / W, L_host_memory) + L_thread + u_host (batch_s + W worker_s): one
thread hands each batch to every worker. The stages of a batch are H, the network, down, accelerator, up. With S their
sum, a step takes at least

    sync                          T >= S                  a batch after another
    pipelined or async, k slots   T >= L for each stage L, and T >= S / k

where k batches at most are between their look-up and the end of their write-back (a pipeline with k credits). Reading
examples ahead takes its part of all CPUs: T >= (L_cpu + reading) / CPUs.
Minimised is

    T + 0.001 S

so that of places that are equally fast those with least work are taken, under

    sum over c of x[t, c] = 1                             for each table
    x[t, c] = x[t', c]                                    for layers at the host, c in front of a cut of tables t, t'
    dense + sum x (device_bytes + k in_flight_bytes) <= memory of an accelerator
    sum x (host_bytes + k host_in_flight_bytes) <= memory of a host

Each program, one for every mode and W = 1, 2, 4, ..., is solved by HiGHS to a stated gap; the best of them is taken,
with the W that is best for its places, and the least of their bounds is proven for all of them. In `pipelined`, rows
that the batches before it have changed are patched on the accelerator, which takes the time `patched_s` for each of
these.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from autoshard.errors import ConfigError, MemoryBudgetError
from autoshard.host_tables.options import Execution, Mode
from autoshard.offloading.choices import Choice, Loads, Place, choices_of, exchange_fixed_s
from autoshard.offloading.situation import Situation

STAGE_NAMES = ("host", "network", "link down", "accelerator", "link up")
"""In the order in which a batch goes through them."""
_WORK_WEIGHT = 1e-3
_RELATIVE_GAP = 1e-4
_TIME_LIMIT_S = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class SearchOptions:
    """What may be chosen.

    Attributes:
      max_staleness: Steps whose updates a look-up may miss; with 0, results are those of `sync`.
      most_prefetch: Batches that may be looked up ahead.
      hot_rows: Whether hot rows may live apart from the cold ones of their table; it must be known which they are.
      places: Where tables may live.
      modes: Modes that may be chosen.
      pooling: Whether the host may sum rows, where the loss does nothing else with them; not with hot rows.
      host_layers: Whether dense layers may run at the host, behind the rows that they read; or paths of the parameters
        whose layers must, and no others. Not with hot rows.
    """

    max_staleness: int = 0
    most_prefetch: int = 4
    hot_rows: bool = False
    places: tuple[Place, ...] = tuple(Place)
    modes: tuple[Mode, ...] = ("sync", "pipelined", "async")
    pooling: bool = False
    host_layers: bool | tuple[str, ...] = False

    def __post_init__(self) -> None:
        if (self.pooling or self.host_layers) and self.hot_rows:
            raise ConfigError(
                "Rows are summed at the host, and layers run there, or hot rows stay on the devices, not both in one "
                f"step; received pooling={self.pooling}, host_layers={self.host_layers} and hot_rows=True. Leave one "
                "of them out."
            )

    def executions(self) -> list[Execution]:
        """Every way in which batches may follow each other."""
        ahead = range(1, self.most_prefetch + 1)
        found = [Execution("sync")]
        found += [Execution("pipelined", prefetch=d) for d in ahead]
        stale = range(1, min(self.max_staleness, self.most_prefetch + 1) + 1)
        found += [Execution("async", max_staleness=n, prefetch=max(n - 1, 1)) for n in stale]
        return [one for one in found if one.mode in self.modes]


@dataclasses.dataclass(frozen=True, slots=True)
class Stages:
    """Seconds that a step keeps each stage busy."""

    host_s: float
    network_s: float
    down_s: float
    accelerator_s: float
    up_s: float

    @property
    def all_s(self) -> tuple[float, ...]:
        """In the order of a batch."""
        return self.host_s, self.network_s, self.down_s, self.accelerator_s, self.up_s

    @property
    def sum_s(self) -> float:
        """What a batch takes by itself."""
        return sum(self.all_s)

    @property
    def busiest(self) -> str:
        """The stage that takes longest."""
        return STAGE_NAMES[int(np.argmax(self.all_s))]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """A placement, priced.

    Attributes:
      execution: How batches follow each other, but for its workers. num_workers: CPUs of each host that serve tables.
      choices: For each table.
      stages: What keeps whom busy.
      step_s: Time of a step.
      objective_s: What was minimised.
      device_bytes, host_bytes: Memory of each accelerator, and of each host.
      fits: Whether that is within the budgets.
    """

    execution: Execution
    num_workers: int
    choices: tuple[Choice, ...]
    stages: Stages
    step_s: float
    objective_s: float
    device_bytes: float
    host_bytes: float
    fits: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The best outcome, and what no placement can be better than.

    Attributes:
      best: The outcome. bound_s: Of its objective.
      considered: The best outcome of every mode of execution that has one, the best first.
      places: Where tables could live.
    """

    best: Outcome
    bound_s: float
    considered: tuple[Outcome, ...]
    places: tuple[Place, ...]


def outcome(s: Situation, execution: Execution, choices: Sequence[Choice], workers: int) -> Outcome:
    """Prices a placement with so many workers of each host; see the head of this file."""
    k, mode = execution.num_slots, execution.mode
    total = sum((c.loads for c in choices), Loads(accelerator_s=s.dense.step_s))
    uses_host = any(c.place.is_on_host for c in choices)
    exchange_s = exchange_fixed_s(s) if any(c.place.is_exchanged for c in choices) else 0.0
    latency_s = s.to_device.latency_s if uses_host else 0.0
    patched_s = (k - 1) * sum(c.patched_s for c in choices) if mode == "pipelined" else 0.0
    thread_s = total.thread_s + (s.rates.batch_s + workers * s.rates.worker_s if uses_host else 0.0)
    stages = Stages(
        max(total.cpu_s / max(workers, 1), total.host_memory_s) + thread_s,
        total.network_s,
        total.down_s + latency_s,
        total.accelerator_s + patched_s + exchange_s,
        total.up_s + latency_s,
    )
    step_s = _step_s(s, execution, stages, choices)
    device = s.dense.memory_bytes + sum(c.device_bytes + k * c.in_flight_bytes for c in choices)
    host = sum(c.host_bytes + k * c.host_in_flight_bytes for c in choices)
    fits = device <= s.budget_bytes * (1 + 1e-9) and host <= s.host_budget_bytes * (1 + 1e-9)
    objective = step_s + _WORK_WEIGHT * stages.sum_s
    return Outcome(
        execution, workers if uses_host else 0, tuple(choices), stages, step_s, objective, device, host, fits
    )


def _step_s(s: Situation, execution: Execution, stages: Stages, choices: Sequence[Choice]) -> float:
    """Time of a step whose stages take so long; see the head of this file."""
    reading_s = (sum(c.loads.cpu_s for c in choices) + s.reading_s) / s.most_workers
    if execution.mode == "sync":
        return max(stages.sum_s, reading_s)
    return max(*stages.all_s, stages.sum_s / execution.num_slots, reading_s)


def as_planned(s: Situation, found: Outcome, over_rows_s: float) -> Outcome:
    """A placement whose step over the rows of a batch was planned, and takes so long on the accelerators."""
    patches = found.execution.num_slots - 1 if found.execution.mode == "pipelined" else 0
    accelerator_s = over_rows_s + patches * sum(c.patched_s for c in found.choices)
    stages = dataclasses.replace(found.stages, accelerator_s=accelerator_s)
    step_s = _step_s(s, found.execution, stages, found.choices)
    return dataclasses.replace(found, stages=stages, step_s=step_s, objective_s=step_s + _WORK_WEIGHT * stages.sum_s)


def search(s: Situation, options: SearchOptions = SearchOptions()) -> Found:
    """The best placement of all tables.

    Raises:
      MemoryBudgetError: No placement fits; tells what would have to.
    """
    outcomes, bounds, fixed = [], [], _fixed_cuts(s, options.host_layers)
    has_layers = bool(options.host_layers)
    all_choices = [choices_of(table, s, options.hot_rows, options.pooling, has_layers) for table in s.tables]
    if fixed is not None:
        numbers = [next((n for n in fixed if table.path in s.cuts[n].tables), None) for table in s.tables]
        all_choices = [[c for c in own if c.cut == n] for own, n in zip(all_choices, numbers, strict=True)]
    for execution in options.executions():
        can_be = lambda c, mode=execution.mode: c.place in options.places and c.place.fits_mode(mode)
        per_table = [list(filter(can_be, choices)) for choices in all_choices]
        solved = [found for count in worker_counts(s) if (found := _solve(s, execution, per_table, count)) is not None]
        if solved:
            outcomes.append(min((o for o, _ in solved), key=lambda o: o.objective_s))
            bounds += [bound for _, bound in solved]
    if not outcomes and fixed is not None and not {"sync", "async"}.intersection(options.modes):
        raise ConfigError(
            "Layers run at the host in `sync` and `async`; received "
            f"host_layers={options.host_layers} and modes={options.modes}. Allow another mode, or leave the layers out."
        )
    if not outcomes:
        raise MemoryBudgetError(_no_room(s, options))
    ranked = sorted(outcomes, key=lambda o: o.objective_s)
    best = ranked[0]
    return Found(with_best_workers(s, best.execution, best.choices), min(bounds), tuple(ranked), options.places)


def _fixed_cuts(s: Situation, host_layers: bool | tuple[str, ...]) -> tuple[int, ...] | None:
    """The cuts in front of which layers must run at the host; None where any may.

    Raises:
      ConfigError: There is no cut behind one of these layers.
    """
    if isinstance(host_layers, bool):
        return None
    wanted = set(host_layers)
    having = lambda path: [n for n, cut in enumerate(s.cuts) if path in cut.params and wanted.issuperset(cut.params)]
    first = {having(path)[0] for path in host_layers if having(path)}
    last = [n for n in first if not any(s.cuts[n].paths < s.cuts[m].paths for m in first)]
    missing = wanted.difference(*(s.cuts[n].params for n in last))
    if missing:
        known = "; ".join(", ".join(cut.params) for cut in s.cuts if cut.params)
        raise ConfigError(
            "Layers run at the host behind a cut of the loss, all of whose parameters are named; received "
            f"host_layers={list(host_layers)}, and no cut has `{min(missing)}` and others of these alone. There are: "
            f"{known or 'none that the optimizer allows'}. Name all of one."
        )
    return tuple(sorted(last))


def worker_counts(s: Situation) -> list[int]:
    """Numbers of workers of a host for which places are searched."""
    return sorted({*(2**n for n in range(s.most_workers.bit_length())), s.most_workers})


def with_best_workers(s: Situation, execution: Execution, choices: Sequence[Choice]) -> Outcome:
    """Prices a placement with as few workers as take at most 0.1 % longer than the best number of them."""
    if not any(choice.place.is_on_host for choice in choices):
        return outcome(s, execution, choices, 0)
    of = [outcome(s, execution, choices, count) for count in range(1, s.most_workers + 1)]
    least_s = min(one.step_s for one in of)
    return next(one for one in of if one.step_s <= 1.001 * least_s)


def _solve(
    s: Situation, execution: Execution, per_table: list[list[Choice]], num_workers: int
) -> tuple[Outcome, float] | None:
    """The best outcome of a mode with so many workers, and a bound; None if nothing fits."""
    if not all(per_table):
        return None
    flat = list(itertools.chain(*per_table))
    owner = np.repeat(np.arange(len(per_table)), [len(c) for c in per_table])
    program = _Program(s, execution, flat, num_workers)
    for number in range(len(per_table)):
        program.add((owner == number).astype(float), (), 1.0, 1.0)
    result = program.solved()
    if result is None:
        return None
    x, bound_s = result
    picks = [int(np.argmax(np.where(owner == n, x, -1))) for n in range(len(per_table))]
    return outcome(s, execution, [flat[p] for p in picks], num_workers), bound_s


_T, _H, _U_HOST, _U_EXCHANGE = range(4)
"""Variables behind x: the time of a step, the time of the host, and what is used at all."""


class _Program:
    """The integer program of one mode and number of workers, but for one place for each table; seconds are in a unit
    of its own.
    """

    def __init__(self, s: Situation, execution: Execution, flat: Sequence[Choice], num_workers: int):
        k, mode = execution.num_slots, execution.mode
        of = lambda name: np.array([getattr(c.loads, name) for c in flat])
        patches = (k - 1) if mode == "pipelined" else 0
        accelerator = of("accelerator_s") + patches * np.array([c.patched_s for c in flat])
        self._dense_s = s.dense.step_s
        self._n = len(flat)
        self._unit_s = self._dense_s + max(float(row.sum()) for row in (accelerator, of("down_s"), of("cpu_s")))
        self._rows: list[np.ndarray] = []
        self._lows: list[float] = []
        self._highs: list[float] = []
        latency_s = s.to_device.latency_s
        # A stage: fixed seconds, those of each choice, and those of the variables behind them.
        host = of("thread_s"), {_H: 1.0, _U_HOST: s.rates.batch_s + num_workers * s.rates.worker_s}
        stages = [
            (0.0, *host),
            (0.0, of("network_s"), {}),
            (0.0, of("down_s"), {_U_HOST: latency_s}),
            (self._dense_s, accelerator, {_U_EXCHANGE: exchange_fixed_s(s)}),
            (0.0, of("up_s"), {_U_HOST: latency_s}),
        ]
        scaled = [
            (fixed / self._unit_s, row / self._unit_s, {v: w if v == _H else w / self._unit_s for v, w in more.items()})
            for fixed, row, more in stages
        ]
        total = 0.0, np.zeros(self._n), {}
        for stage in scaled:
            total = _sum(total, stage, 1.0)
        for row in (of("cpu_s") / num_workers, of("host_memory_s")):
            self.add(-row / self._unit_s, ((_H, 1.0),), 0.0, np.inf)
        for stage in (total,) if mode == "sync" else (*scaled, _times(total, 1 / k)):
            self._takes(stage)
        reading = s.reading_s / s.most_workers / self._unit_s
        self._takes((reading, of("cpu_s") / s.most_workers / self._unit_s, {}))
        for number, choice in enumerate(flat):
            for is_used, variable in ((choice.place.is_on_host, _U_HOST), (choice.place.is_exchanged, _U_EXCHANGE)):
                if is_used:
                    self.add(-np.eye(1, self._n, number)[0], ((variable, 1.0),), 0.0, np.inf)
        for cut in range(len(s.cuts)):
            first, *others = [n for n, choice in enumerate(flat) if choice.cut == cut] or [0]
            for other in others:
                self.add(np.eye(1, self._n, first)[0] - np.eye(1, self._n, other)[0], (), 0.0, 0.0)
        device = np.array([c.device_bytes + k * c.in_flight_bytes for c in flat]) / s.budget_bytes
        own = np.array([c.host_bytes + k * c.host_in_flight_bytes for c in flat]) / s.host_budget_bytes
        self.add(device, (), -np.inf, 1 - s.dense.memory_bytes / s.budget_bytes)
        self.add(own, (), -np.inf, 1.0)
        self._cost = _sum((0.0, np.zeros(self._n), {_T: 1.0}), total, _WORK_WEIGHT)

    def add(self, row: np.ndarray, more: Sequence[tuple[int, float]], low: float, high: float) -> None:
        """low <= row x + more <= high."""
        self._rows.append(self._whole(row, dict(more)))
        self._lows.append(low)
        self._highs.append(high)

    def _takes(self, stage: "_Sum") -> None:
        """T is at least that."""
        fixed, row, more = stage
        self.add(-row, tuple((v, -w) for v, w in more.items()) + ((_T, 1.0),), fixed, np.inf)

    def _whole(self, row: np.ndarray, more: Mapping[int, float]) -> np.ndarray:
        return np.concatenate([row, [more.get(v, 0.0) for v in range(4)]])

    def solved(self) -> tuple[np.ndarray, float] | None:
        """The best x, and a bound of the objective in seconds; None if nothing fits."""
        fixed, row, more = self._cost
        top = np.concatenate([np.ones(self._n), [np.inf, np.inf, 1.0, 1.0]])
        result = milp(
            self._whole(row, more),
            constraints=LinearConstraint(
                csr_array(np.array(self._rows)),
                np.array(self._lows),  # pyright: ignore[reportArgumentType]
                np.array(self._highs),  # pyright: ignore[reportArgumentType]
            ),
            integrality=np.concatenate([np.ones(self._n), [0.0, 0.0, 1.0, 1.0]]),
            bounds=Bounds(np.zeros(self._n + 4), top),  # pyright: ignore[reportArgumentType]
            options={"mip_rel_gap": _RELATIVE_GAP, "time_limit": _TIME_LIMIT_S},
        )
        if result.x is None:
            return None
        return result.x[: self._n], (result.mip_dual_bound + fixed) * self._unit_s


_Sum = tuple[float, np.ndarray, dict[int, float]]
"""A fixed part, a weight for each choice, and weights of the variables behind them."""


def _times(a: _Sum, factor: float) -> _Sum:
    return a[0] * factor, a[1] * factor, {v: w * factor for v, w in a[2].items()}


def _sum(a: _Sum, b: _Sum, factor: float) -> _Sum:
    """a + factor b."""
    more = dict(a[2])
    for variable, weight in b[2].items():
        more[variable] = more.get(variable, 0.0) + factor * weight
    return a[0] + factor * b[0], a[1] + factor * b[1], more


def _no_room(s: Situation, options: SearchOptions) -> str:
    gb = 1e9
    tables = sum(t.size_bytes for t in s.tables)
    places = ", ".join(p.value for p in options.places)
    return (
        f"No placement fits ({places}): tables with the optimizer's state take {tables / gb:,.0f} GB; {s.num_devices} "
        f"accelerators have {s.budget_bytes / gb:,.1f} GB each, of which the dense part needs "
        f"{s.dense.memory_bytes / gb:,.1f} GB, and {s.num_nodes} hosts {s.host_budget_bytes / gb:,.0f} GB each. Give "
        "more nodes, fewer or narrower rows, or an optimizer that keeps less."
    )

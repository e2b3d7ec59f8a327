"""Drives message passing and capacity prices together: the lower bound, and labels decoded on the way.

Few instants carry a price in the end. The ascent therefore starts with none, works on the core of the problem for the
instants that count so far (`core.py`), and lets another one count when the decoded labels exceed its capacity by more
than that of any instant that counts already.

Two ways of moving prices take turns after each pair of sweeps; a block of either is judged by the bound it gained per
iteration, and the better one gets most blocks:

  * coordinate ascent: the prices that are best beside the messages, one after the other (`prices.py`). The bound never
    falls and no step length is needed, but it may stall where prices and messages would have to move together.
  * subgradient steps: each price moves by a step of its own in the direction of the decoded labels' usage minus the
    capacity, averaged over iterations (as in the volume algorithm of Barahona and Anbil, 2000). Steps grow while the
    direction lasts and shrink when it turns (Rprop of Riedmiller and Braun, 1993), so that they find their length at
    each instant. The bound may fall for a while; when it falls too far, the best state is taken up again and all steps
    shrink.
"""

from collections.abc import Callable

import numpy as np

from autoshard.solver.bound.core import CoreGraph
from autoshard.solver.bound.messages import factor_minima, node_costs, price_tables, price_unary, sweep
from autoshard.solver.bound.prices import ascend_prices
from autoshard.solver.bound.reparametrization import Reparametrization
from autoshard.solver.factor_graph import FactorGraph, message_count, with_own_tables
from autoshard.solver.labelling import labels_usage

START = 20
"""Pairs of sweeps before prices move, unless prices were given."""
BLOCK = 25
"""Iterations of one way of moving prices before the two are compared."""
AVERAGING = 0.3
"""Weight of the newest usage in the average."""
GROWTH, SHRINKAGE, RETREAT = 1.2, 0.5, 0.3
"""Factors on a step while its direction lasts, when it turns, and when the best state is taken up again."""
LONGEST, SHORTEST, FIRST = 0.1, 1e-5, 1e-3
"""Bounds of a step, and the first step of an instant, as shares of (cost scale / capacity)."""
SLIGHT = 0.02
"""Steps are shorter in proportion where the usage is within this share of the capacity."""
FALL = 4e-3
"""The best state is taken up again when the bound falls below it by more than this share of the cost scale."""
EXCESS = 3e-3
"""An instant starts to count when it is exceeded by more than this share of the largest capacity."""
EARLY, LOOK_EARLY, LOOK = 80, 4, 10
"""Iterations between looks for instants that should count: `LOOK_EARLY` during the first `EARLY`, then `LOOK`."""
WINDOW, PRICED_WINDOW = 15, 60
"""Iterations over which a gain is judged; with prices a longer one."""
PATIENCE = 60
"""Iterations that prices have at first, before any gain is missed: the bound may stand still until they are felt."""
FADING = 0.98
"""Weight of an iteration's decoded labels relative to the next one's, in `DualAscent.seen`."""


class DualAscent:
    """A dual state of a `FactorGraph` problem and the way it climbs.

    Attributes:
      bound: Best lower bound so far (without the network's constant). prices, messages: the state that proves it.
      decoded: Labels decoded by the latest sweep in each direction, two int64 [n].
      seen: float64 [L]; how often each label was decoded, older iterations counting less.
    """

    def __init__(
        self, graph: FactorGraph, prices: np.ndarray | None = None, messages: np.ndarray | None = None
    ) -> None:
        """The state with the given prices and messages to begin with; zero where None."""
        self.graph = graph
        nodes, most = len(graph.label_start) - 1, 1
        for sizes in (np.diff(graph.label_start), graph.rows, graph.columns):
            most = max(most, int(sizes.max(initial=1)))
        self.scratch = np.zeros((2, most))
        self.bound = -np.inf
        self.decoded = [np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)]
        self.seen = np.zeros(len(graph.unary))
        finite = graph.tables[np.isfinite(graph.tables)]
        self._largest = max(float(np.abs(graph.unary).max(initial=0.0)), float(finite.max(initial=0.0)), 1e-300)
        instants = len(graph.capacity)
        self._capacity = max(float(graph.capacity.max(initial=0.0)), 1e-300)
        self._trial = np.zeros(instants) if prices is None else prices.copy()
        self._best_prices = self._trial.copy()
        self._step, self._way = np.zeros(instants), np.zeros(instants)
        self._average, self._over = np.zeros(instants), np.zeros(instants)
        self._iteration = 0 if prices is None or not prices.any() else START
        self._by_coordinates, self._block_start, self._block_bound, self._blocks = True, -1, -np.inf, 0
        self._gain = {True: 0.0, False: np.inf}
        self._history: list[float] = []
        first = np.zeros(message_count(graph)) if messages is None else messages
        self._lay_out(self._trial > 0, first, first)

    @property
    def prices(self) -> np.ndarray:
        """Prices of the best state, float64 [T]."""
        return self._best_prices

    @property
    def messages(self) -> np.ndarray:
        """Messages of the best state."""
        return self._core.whole_messages(self._best)

    def _lay_out(self, active: np.ndarray, trial: np.ndarray, best: np.ndarray) -> None:
        """Makes the core for the instants `active`, with the messages given for the whole problem."""
        self._core = CoreGraph(self.graph, active)
        graph = self._core.graph
        self._trial_messages, self._best = self._core.messages_from(trial), self._core.messages_from(best)
        self._unary, self._theta = np.zeros(len(graph.unary)), np.zeros(len(graph.unary))
        self._tables = graph.tables.copy() if len(graph.pair_first) else graph.tables
        self._labels = [np.zeros(len(graph.label_start) - 1, np.int64) for _ in range(2)]

    def climb(
        self,
        iterations: int,
        target: float,
        stop_at: float,
        stall: float,
        stop: Callable[[], bool] = lambda: False,
    ) -> int:
        """Runs up to `iterations` pairs of sweeps.

        Args:
          target: Cost of a known solution (without the constant), for the scale of costs; +inf if none is known.
          stop_at: Stop when the bound reaches this.
          stop: Asked after each iteration whether to stop.
          stall: Stop when the last `WINDOW` iterations (`PRICED_WINDOW` with prices) together gain less than this.

        Returns:
          Iterations done.
        """
        window, patience = (PRICED_WINDOW, PATIENCE) if len(self.graph.capacity) else (WINDOW, 0)
        for done in range(1, iterations + 1):
            bound = self._pair_of_sweeps()
            if bound > self.bound:
                self.bound = bound
                self._best_prices, self._best = self._trial.copy(), self._trial_messages.copy()
            self._history.append(self.bound)
            self._read_labels()
            self._iteration += 1
            stalled = len(self._history) > window + patience and self.bound - self._history[-1 - window] < stall
            if self.bound >= stop_at or stalled or stop():
                return done
            if len(self.graph.capacity) and self._iteration >= START:
                self._move(bound, target)
        return iterations

    def _pair_of_sweeps(self) -> float:
        core, graph = self._core, self._core.graph
        prices = self._trial[core.active]
        self._reprice(prices)
        node_costs(graph, self._unary, self._trial_messages, self._theta)
        total = 0.0
        for way in (0, 1):
            total = sweep(
                graph, self._tables, self._trial_messages, self._theta, way == 1, self.scratch, self._labels[way]
            )
        with np.errstate(over="ignore"):  # where nothing fits, prices grow without end; what overflows bounds nothing
            paid = float(prices @ graph.capacity)
        return total + core.constant - paid if np.isfinite(paid) else -np.inf

    def _reprice(self, prices: np.ndarray) -> None:
        price_unary(self._core.graph, prices, self._unary)
        if len(self._core.graph.pair_first):
            price_tables(self._core.graph, prices, self._tables)

    def _read_labels(self) -> None:
        self.seen *= FADING
        for way in (0, 1):
            self.decoded[way] = self._core.whole_labels(self._labels[way])
            self.seen[self.graph.label_start[:-1] + self.decoded[way]] += 1.0

    def _move(self, bound: float, target: float) -> None:
        """Moves the prices once, and lets an instant count if one should."""
        scale = max(abs(self.bound), 1e-4 * self._largest)
        if np.isfinite(target):
            scale = max(scale, abs(target))
        unit = scale / self._capacity
        if bound < self.bound - FALL * scale:
            self._trial, self._trial_messages = self._best_prices.copy(), self._best.copy()
            self._step *= RETREAT
            self._way[:] = 0.0
            return
        self._compare_ways()
        active = np.flatnonzero(self._core.active)
        if len(active):
            usage = 0.5 * (
                labels_usage(self._core.graph, self._labels[0]) + labels_usage(self._core.graph, self._labels[1])
            )
            excess = (usage - self._core.graph.capacity) / self._capacity
            self._average[active] += AVERAGING * (excess - self._average[active])
            if self._by_coordinates:
                self._coordinate_step(active, unit)
            else:
                self._subgradient_step(active, unit)
        if self._iteration % (LOOK_EARLY if self._iteration < EARLY else LOOK) == 0:
            self._look_for_instants(unit)

    def _compare_ways(self) -> None:
        """Ends a block and chooses the way of the next one; every fourth block goes to the other way."""
        if self._block_start < 0:
            self._block_start, self._block_bound = self._iteration, self.bound
        if self._iteration - self._block_start < BLOCK:
            return
        self._gain[self._by_coordinates] = self.bound - self._block_bound
        self._blocks += 1
        coordinates_gain = self._gain[True] >= self._gain[False]
        if self._iteration >= EARLY - BLOCK:
            self._by_coordinates = coordinates_gain if self._blocks % 4 else not coordinates_gain
        self._block_start, self._block_bound = self._iteration, self.bound
        self._way[:] = 0.0

    def _coordinate_step(self, active: np.ndarray, unit: float) -> None:
        prices = self._trial[active]
        change = ascend_prices(self._core.graph, self._theta, self._tables, self._trial_messages, prices, FIRST * unit)
        change = np.where(np.isfinite(change), change, 0.0)  # where nothing fits, no price is high enough
        self._trial[active] = np.maximum(0.0, prices + change)
        self._step[active] = np.maximum(self._step[active], 0.5 * np.abs(change))

    def _subgradient_step(self, active: np.ndarray, unit: float) -> None:
        excess, prices = self._average[active], self._trial[active]
        way = np.sign(excess)
        way[(prices <= 0) & (way < 0)] = 0.0
        unpriced = (prices <= 0) & (way > 0)
        if unpriced.any():  # of those without a price, only the most exceeded gets one
            worst = np.argmax(np.where(unpriced, excess, -np.inf))
            way[unpriced] = 0.0
            way[worst] = 1.0
        agreement = way * self._way[active]
        step = self._step[active]
        step = np.where(agreement > 0, step * GROWTH, np.where(agreement < 0, step * SHRINKAGE, step))
        step = np.clip(step, SHORTEST * unit, LONGEST * unit)
        self._step[active], self._way[active] = step, way
        self._trial[active] = np.maximum(0.0, prices + way * step * np.minimum(1.0, np.abs(excess) / SLIGHT))

    def _look_for_instants(self, unit: float) -> None:
        excess = (labels_usage(self.graph, self.decoded[1]) - self.graph.capacity) / self._capacity
        self._over += (excess - self._over) * (0.5 if self._iteration > START + LOOK else 1.0)
        active = self._core.active
        most = self._average[active].max(initial=0.0)
        worst = int(np.argmax(np.where(active, -np.inf, self._over)))
        if active[worst] or self._over[worst] <= max(EXCESS, most):
            return
        self._step[worst], self._average[worst] = FIRST * unit, self._over[worst]
        active = active.copy()
        active[worst] = True
        core = self._core
        self._lay_out(active, core.whole_messages(self._trial_messages), core.whole_messages(self._best))

    def decoded_at(self, prices: np.ndarray, pairs: int) -> np.ndarray:
        """Labels decoded at other prices, float64 [T], after so many pairs of sweeps from the best state, which stays;
        only instants that count so far have prices. int64 [n]."""
        trial, messages = self._trial, self._trial_messages
        self._trial, self._trial_messages = prices, self._best.copy()
        for _ in range(pairs):
            self._pair_of_sweeps()
        self._trial, self._trial_messages = trial, messages
        return self._core.whole_labels(self._labels[1])

    def penalties(self) -> np.ndarray:
        """First penalties per unit of overrun for repairing labels: the prices, with a small floor; float64 [T]."""
        scale = max(abs(self.bound), 1e-3 * self._largest) / self._capacity
        return np.maximum(self.prices, 1e-4 * scale)

    def reparametrization(self) -> Reparametrization:
        """The best state, computed afresh."""
        graph, messages = with_own_tables(self.graph), self.messages
        unary, theta = np.zeros(len(graph.unary)), np.zeros(len(graph.unary))
        tables = graph.tables.copy() if len(graph.pair_first) else graph.tables
        price_unary(graph, self.prices, unary)
        if len(graph.pair_first):
            price_tables(graph, self.prices, tables)
        node_costs(graph, unary, messages, theta)
        low = np.minimum.reduceat(theta, graph.label_start[:-1]).sum() if len(theta) else 0.0
        bound = low + factor_minima(graph, tables, messages) - self.prices @ graph.capacity
        return Reparametrization(graph, self.prices, messages, unary, tables, theta, float(bound))

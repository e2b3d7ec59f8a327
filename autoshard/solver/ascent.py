"""Drives message passing and capacity prices together: the lower bound, and labels decoded on the way.

Prices follow a projected subgradient of the bound: usage - capacity, where usage is that of the decoded labels,
averaged over recent sweeps (Barahona and Anbil's volume algorithm, 2000), with Polyak's step length
f (target - bound) / |usage - capacity|^2. Steps are taken from the best state seen; f shrinks while they fail.
"""

import numpy as np

from autoshard.solver.flat import Flat, message_count
from autoshard.solver.messages import factor_minima, node_costs, price_tables, price_unary, sweep
from autoshard.solver.primal import labels_usage

AVERAGING = 0.2
"""Weight of the newest usage in the average."""
PATIENCE = 6
"""Failed steps before the step length shrinks."""
WINDOW, PRICED_WINDOW = 15, 60
"""Iterations over which a gain is judged; steps of prices need some to find their length."""
FADING = 0.98
"""Weight of an iteration's decoded labels relative to the next one's, in `Ascent.seen`."""


class Ascent:
    """A dual state of a `Flat` problem and the way it climbs.

    Attributes:
      bound: Best lower bound so far (without the network's constant). prices, messages: the state that proves it.
      decoded: Labels decoded by the latest sweep in each direction, two int64 [n].
      seen: float64 [L]; how often each label was decoded, older iterations counting less.
    """

    def __init__(self, flat: Flat, prices: np.ndarray | None = None) -> None:
        self.flat = flat
        nodes, most = len(flat.label_start) - 1, 1
        for sizes in (np.diff(flat.label_start), flat.rows, flat.columns):
            most = max(most, int(sizes.max(initial=1)))
        self.scratch = np.zeros((2, most))
        self.prices = np.zeros(len(flat.capacity)) if prices is None else prices.copy()
        self.messages = np.zeros(message_count(flat))
        self.bound = -np.inf
        self.decoded = [np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)]
        self.seen = np.zeros(len(flat.unary))
        self._unary = np.zeros(len(flat.unary))
        self._theta = np.zeros(len(flat.unary))
        self._tables = flat.tables.copy() if len(flat.pair_first) else flat.tables
        finite = flat.tables[np.isfinite(flat.tables)]
        self._largest = max(float(np.abs(flat.unary).max(initial=0.0)), float(finite.max(initial=0.0)), 1e-300)
        self._usage: np.ndarray | None = None
        self._step, self._fails = 1.0, 0
        self._trial_prices, self._trial_messages = self.prices.copy(), self.messages.copy()
        self._history: list[float] = []

    def climb(self, iterations: int, target: float, stop_at: float, stall: float) -> int:
        """Runs up to `iterations` pairs of sweeps.

        Args:
          target: Cost of a known solution (without the constant), for the step length; +inf if none is known.
          stop_at: Stop when the bound reaches this.
          stall: Stop when the last `WINDOW` iterations (`PRICED_WINDOW` with prices) together gain less than this.

        Returns:
          Iterations done.
        """
        priced = len(self.flat.capacity) > 0
        window = PRICED_WINDOW if priced else WINDOW
        for iteration in range(iterations):
            bound = self._pair_of_sweeps(self._trial_prices, self._trial_messages)
            improved = bound > self.bound
            if improved:
                small = bound - self.bound < 0.02 * (target - self.bound) if np.isfinite(target) else False
                self.bound = bound
                self.prices, self.messages = self._trial_prices.copy(), self._trial_messages.copy()
            self._history.append(self.bound)
            self.seen *= FADING
            for decoded in self.decoded:
                self.seen[self.flat.label_start[:-1] + decoded] += 1.0
            if self.bound >= stop_at:
                return iteration + 1
            if len(self._history) > window and self.bound - self._history[-1 - window] < stall:
                return iteration + 1
            if not priced:
                continue
            usage = labels_usage(self.flat, self.decoded[iteration % 2])
            self._usage = usage if self._usage is None else (1 - AVERAGING) * self._usage + AVERAGING * usage
            if improved:
                self._fails = 0
                if not small:
                    self._step = min(self._step * 1.1, 2.0)
            else:
                self._fails += 1
                if self._fails >= PATIENCE:
                    self._step, self._fails = max(self._step * 0.7, 1e-4), 0
                    self._trial_messages = self.messages.copy()
            self._trial_prices = self._moved(target)
        return iterations

    def _pair_of_sweeps(self, prices: np.ndarray, messages: np.ndarray) -> float:
        flat = self.flat
        self._reprice(prices)
        node_costs(flat, self._unary, messages, self._theta)
        for way in (0, 1):
            total = sweep(flat, self._tables, messages, self._theta, way == 1, self.scratch, self.decoded[way])
        return total - float(prices @ flat.capacity)

    def _reprice(self, prices: np.ndarray) -> None:
        price_unary(self.flat, prices, self._unary)
        if len(self.flat.pair_first):
            price_tables(self.flat, prices, self._tables)

    def _moved(self, target: float) -> np.ndarray:
        direction = self._usage - self.flat.capacity
        direction[(self.prices <= 0) & (direction < 0)] = 0.0
        length = float(direction @ direction)
        if length == 0:
            return self.prices.copy()
        gap = max(0.05 * abs(self.bound), 1e-4 * self._largest)
        if np.isfinite(target):
            gap = min(gap, target - self.bound)
        return np.maximum(0.0, self.prices + self._step * max(gap, 0.0) / length * direction)

    def penalties(self) -> np.ndarray:
        """First penalties per unit of overrun for repairing labels: the prices, with a small floor; float64 [T]."""
        scale = max(abs(self.bound), 1e-3 * self._largest) / max(float(self.flat.capacity.max(initial=0.0)), 1e-300)
        return np.maximum(self.prices, 1e-4 * scale)

    def priced_unary(self) -> np.ndarray:
        """Unary costs with the best state's prices, without messages; float64 [L]."""
        self._reprice(self.prices)
        return self._unary.copy()

    def state(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Returns (theta [L], priced tables, proven bound) of the best state, computed afresh."""
        self._reprice(self.prices)
        node_costs(self.flat, self._unary, self.messages, self._theta)
        low = np.minimum.reduceat(self._theta, self.flat.label_start[:-1]).sum() if len(self._theta) else 0.0
        bound = low + factor_minima(self.flat, self._tables, self.messages) - self.prices @ self.flat.capacity
        return self._theta.copy(), self._tables, float(bound)

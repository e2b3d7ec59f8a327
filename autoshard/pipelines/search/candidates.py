"""Candidates that a group of pipelines could have, and how fast each could be at best.

A *candidate* says on which mesh options the stages of a pipeline run, how many submeshes of each, how many replicas
there are, and how the batch is divided; not which layers go where. For the bounds here the layers may be divided as one
likes: with a[k, l] the time of layer l on option k and any weights v[k], stages with P[k] submeshes on option k and the
slowest taking T satisfy

    sum over k of v[k] P[k] T >= sum over l of min over k of v[k] a[k, l] =: D   (here v[k] = 1 / sum over l of a[k, l])

which is exact for one option. What a replica sends of its weights and gradients is more work of that kind, but where
several stages share a submesh: then most of it is sent while the submesh is busy with another stage. A layer cannot be
divided: of the kind of layer with most work there must be room for all of them in T, whole ones on each submesh. With T
bounded, the bounds of `cut` bound the step. How long submeshes wait for each other is counted by `waiting_bounds`,
which takes longer. What could never fit the memory, even computed again, is left out; of the
interleaved schedule, what would not fit if all stages of a submesh were equal.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.candidate import Candidate
from autoshard.pipelines.search.options import StageOptions
from autoshard.pipelines.search.replica_group import SearchContext

ROUNDS = 8
"""Steps from one number of whole layers to the next."""
CHUNKS = (2, 3, 4, 6, 8, 12, 16)
"""Stages on each submesh that are tried where they are interleaved: each number fills a pipeline in about as much less
time than the one before."""
MOST_COUNTS = 10_000
"""Numbers of submeshes that are looked at for one choice of mesh options; of more, a part in even steps."""


class CandidateSet:
    """All candidates on the same mesh options with the same size of micro-batches."""

    def __init__(self, context: SearchContext, options: tuple[int, ...], micro_batch_size: int):
        self.context, self.options, self.micro_batch_size = context, options, micro_batch_size
        costs = [context.intervals.layer_costs(o, micro_batch_size) for o in options]
        times = np.array([[c.forward_s + c.backward_s + c.weight_s if c else np.inf for c in row] for row in costs])
        forward = np.array([[c.forward_s if c else 0.0 for c in row] for row in costs])
        self.is_possible = bool(np.isfinite(times).any(axis=1).all() and np.isfinite(times).any(axis=0).all())
        if not self.is_possible:
            return
        known = np.isfinite(times)
        speeds = known.sum(axis=1) / np.where(known, times, 0.0).sum(axis=1)
        self.weights = speeds / speeds.max()  # v[k]
        self.work_s = float((self.weights[:, None] * times).min(axis=0).sum())  # D
        with np.errstate(divide="ignore", invalid="ignore"):
            heads = np.where(known & (times > 0), forward / times, 0.0)
        self.least_head = float(heads.min())
        backward = np.array([[c.backward_s if c else 0.0 for c in row] for row in costs])
        self.least_chain_s = float(np.where(known, forward + backward, np.inf).min(axis=0).sum())  # no weight tasks
        self.least_forward_s = np.where(known, forward, np.inf).min(axis=0)
        self.greater_share = float(np.where(known & (times > 0), np.maximum(heads, 1 - heads), 1.0).min())
        kinds = context.intervals.layers.kinds
        totals = {k: sum(times[:, l].min() for l in range(len(kinds)) if kinds[l] == k) for k in set(kinds)}
        self.main = max(totals, key=lambda k: totals[k])
        self.num_main = kinds.count(self.main)
        self.main_s = times[:, kinds.index(self.main)]
        self.slots = np.array([context.topology.num_submeshes(o) for o in options])
        self._sent = min(
            sum(
                c.weight_total_bytes * (1 + (c.gradient_bytes / c.weight_bytes if c.weight_bytes else 0))
                for c in row
                if c
            )
            for row in costs
        )
        tied = sum(s.size_bytes * 3 * (len(s.readers) - 1) for s in context.intervals.layers.shared_weights)
        self._sent = max(0.0, self._sent - tied)
        self._holds(costs)

    def _holds(self, costs: list[list]) -> None:
        """What layers need and submeshes have of memory."""
        limits = np.array([self.context.limits_bytes[self._slice(o)] for o in self.options])
        self._fixed = np.array(
            [[c.weight_bytes + c.gradient_bytes + c.residual_bytes if c else np.inf for c in row] for row in costs]
        )
        self._state = np.array([[c.optimizer_bytes if c else np.inf for c in row] for row in costs])
        working = np.array([min(c.working_bytes for c in row if c) for row in costs])
        self._room = np.maximum(0.0, limits - working)
        main = [row[self.context.intervals.layers.kinds.index(self.main)] for row in costs]
        self._main_fixed = np.array([c.weight_bytes + c.gradient_bytes if c else np.inf for c in main])
        self._main_state = np.array([c.optimizer_bytes if c else np.inf for c in main])
        self._main_residual = np.array([c.residual_bytes if c else np.inf for c in main])
        self._least_held = np.array([min(min(c.input_bytes, c.residual_bytes) for c in row if c) for row in costs])

    def _slice(self, option: int) -> int:
        return self.context.topology.table.options[option].slice

    def sent_s(self, num_pipelines: np.ndarray) -> np.ndarray:
        """Least time of copies and gradients, weighted like `work_s`, of a replica of so many."""
        near = [self.context.topology.near_s_per_byte(o) for o in self.options]
        each = [w * row[np.minimum(num_pipelines, len(row)) - 1] for w, row in zip(self.weights, near, strict=True)]
        return self._sent * np.minimum.reduce(each) / num_pipelines

    def counts(self, num_pipelines: int, options: StageOptions, num_owners: int | None = None) -> np.ndarray:
        """[candidates, parts]: numbers of submeshes that there is room for.

        Args:
          num_pipelines: Replicas. options: What is fixed.
          num_owners: Replicas that share the optimizer's state, if there are others besides.
        """
        num_layers = self.context.intervals.layers.num_layers
        most = np.minimum(self.slots // num_pipelines, num_layers - len(self.options) + 1)
        if (most < 1).any():
            return np.zeros((0, len(self.options)), dtype=int)
        each = max(2, int(MOST_COUNTS ** (1 / len(self.options))))
        ranges = [np.arange(1, m + 1) if m <= each else np.unique(np.linspace(1, m, each).astype(int)) for m in most]
        found = np.array(list(itertools.product(*ranges))) if len(ranges) > 2 else _grid(ranges)
        total = found.sum(axis=1)
        is_allowed = total <= num_layers
        if options.num_stages is not None:
            is_allowed &= (options.num_stages % total == 0) & (options.num_stages >= total)
        is_allowed &= self._fits(found, num_owners or num_pipelines)
        return found[is_allowed]

    def _fits(self, counts: np.ndarray, num_owners: int) -> np.ndarray:
        need = self._fixed + self._state / num_owners
        finite = np.where(np.isfinite(need), need, 0.0).sum(axis=1)
        weights = np.where(finite > 0, 1 / np.maximum(finite, 1.0), 1.0)
        least = np.where(np.isfinite(need), weights[:, None] * need, np.inf).min(axis=0).sum()
        tied = (
            sum(s.size_bytes * 4 * len(s.readers) for s in self.context.intervals.layers.shared_weights) * weights.max()
        )
        return counts @ (weights * self._room) >= (least - tied) * (1 - 1e-9)

    def _main_layers(self, counts: np.ndarray, num_owners: int, held: np.ndarray, *, plain: bool) -> np.ndarray:
        """How many layers of the main kind all submeshes of a pipeline have room for, at most.

        Args:
          counts: [candidates, parts]. num_owners: Replicas that share the optimizer's state.
          held: For the last stage, the last but one, ...: micro-batches in flight.
          plain: Without computing anything again; else, whatever helps: n layers need at least their residuals once,
            and for each further micro-batch in flight the inputs or the residuals of a layer.
        """
        need = self._main_fixed + self._main_state / num_owners
        if plain:
            room, need = self._room[:, None], need[:, None] + held[None, :] * self._main_residual[:, None]
        else:
            room = self._room[:, None] - (held[None, :] - 1) * self._least_held[:, None]
            need = (need + self._main_residual)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.where(np.isfinite(need), np.floor(np.maximum(room, 0.0) / need * (1 + 1e-9)), 0.0)
        ahead = np.concatenate([np.zeros((len(self.options), 1)), np.cumsum(each, axis=1)], axis=1)
        total, stops = counts.sum(axis=1), np.cumsum(counts, axis=1)
        parts = np.arange(len(self.options))[None, :]
        first = total[:, None] - stops
        return (ahead[parts, first + counts] - ahead[parts, first]).sum(axis=1)

    def least_s(
        self, num_pipelines: np.ndarray, num_micro_batches: np.ndarray, schedules: Sequence[ScheduleKind]
    ) -> np.ndarray:
        """A bound for all candidates with so many replicas; inf where there is no room.

        Submesh p waits for the stages before it, which have the layers 0 ... p - 1 at least: with F[p] their least
        forward times, T >= F[p] + M t[p]. Since no weight is above 1, with V = sum over k of v[k] P[k] the bound of the
        module becomes V T >= M D + F[0] + ... + F[V - 1]. Of all V that there is room for, one makes it least.
        """
        most = np.minimum(self.slots[None, :] // num_pipelines[:, None], self.context.intervals.layers.num_layers)
        power, work = most @ self.weights, num_micro_batches * self.work_s
        waits = np.concatenate([[0.0], np.cumsum(np.cumsum(self.least_forward_s) - self.least_forward_s)])  # by V
        grid = np.arange(1, len(waits))
        with np.errstate(divide="ignore", invalid="ignore"):
            at_most = (work + np.interp(power, np.arange(len(waits)), waits)) / power
            inside = np.where(grid[None, :] <= power[:, None], (work[:, None] + waits[None, 1:]) / grid, np.inf)
            bound = np.minimum(at_most, inside.min(axis=1))
            if ScheduleKind.INTERLEAVED not in schedules:
                bound = np.maximum(bound, (work + self.sent_s(num_pipelines)) / power)
        chain_s = self.least_chain_s if ScheduleKind.ZERO_BUBBLE in schedules else self.work_s / self.weights.max()
        return np.where((most >= 1).all(axis=1), np.maximum(bound, chain_s), np.inf)

    def candidates(
        self, num_pipelines: int, num_micro_batches: int, options: StageOptions, below_s: float, most: int
    ) -> tuple[list[Candidate], float]:
        """Candidates with so many replicas whose bound is below a time: the best by guess, a bound for the others."""
        counts = self.counts(num_pipelines, options)
        return self.candidates_of(counts, num_pipelines, num_micro_batches, options, below_s, most)

    def candidates_of(
        self,
        counts: np.ndarray,
        num_pipelines: int,
        num_micro_batches: int,
        options: StageOptions,
        below_s: float,
        most: int,
        num_owners: int | None = None,
    ) -> tuple[list[Candidate], float]:
        """Those with the given numbers of submeshes [candidates, parts]; `num_owners` as for `counts`."""
        found: list[Candidate] = []
        rest_s = math.inf
        if not len(counts):
            return found, rest_s
        num_layers, total = self.context.intervals.layers.num_layers, counts.sum(axis=1)
        power = counts @ self.weights
        number = num_micro_batches
        sent_s = float(self.sent_s(np.array(num_pipelines))) / power
        slowest_s = np.maximum(self.work_s / power, self._whole_s(counts, self.work_s / power))
        chain_s = self.work_s / self.weights.max()
        reach = np.minimum(number, total)
        plain_s = number * slowest_s
        busy_s = np.maximum(plain_s, number * self.work_s / power + sent_s)
        for kind, chunks in _orders(options):
            stages = total * chunks
            if kind is ScheduleKind.GPIPE:
                bound_s = np.maximum(busy_s, chain_s + (number - 1) * slowest_s)
                waits = total - 1.0
            elif kind is ScheduleKind.ONE_F_ONE_B:
                more = number - reach + self.greater_share * (reach - 1)
                bound_s = np.maximum(busy_s, chain_s + more * slowest_s)
                bound_s = np.maximum(bound_s, self._in_turn_s(counts, number))
                waits = total - 1.0
            else:  # where stages share a submesh, what most of them send is sent while others are busy
                bound_s = plain_s if kind is ScheduleKind.INTERLEAVED else busy_s
                waits = (total - 1.0) / (3 if kind is ScheduleKind.ZERO_BUBBLE else chunks)
            again, is_held = self._memory(counts, num_owners or num_pipelines, number, kind, chunks)
            guess_s = slowest_s * (number + waits) * np.where(again, 1 + self.least_head, 1.0) + sent_s / chunks
            is_wanted = (bound_s < below_s) & (stages <= num_layers) & is_held
            if options.num_stages is not None:
                is_wanted &= stages == options.num_stages
            if self.context.asked is not None:
                is_wanted &= [self._may_hold(row, chunks) for row in counts]
            if kind is ScheduleKind.INTERLEAVED or kind is ScheduleKind.ZERO_BUBBLE:
                is_wanted &= total > 1
            wanted = np.flatnonzero(is_wanted)
            if len(wanted) > most:
                wanted = wanted[np.argsort(guess_s[wanted], kind="stable")]
                rest_s = min(rest_s, float(bound_s[wanted[most:]].min()))
            for k in wanted[:most]:
                found.append(
                    Candidate(
                        self.options,
                        tuple(int(c) for c in counts[k]),
                        self.micro_batch_size,
                        number,
                        num_pipelines,
                        kind,
                        chunks,
                        float(bound_s[k]),
                        float(guess_s[k]),
                        float(slowest_s[k]),
                    )
                )
        return found, rest_s

    def _may_hold(self, counts: np.ndarray, chunks: int) -> bool:
        """Whether every stage is on a slice that it may be on, with so many submeshes of each part."""
        stages = np.repeat([self._slice(o) for o in self.options], counts).tolist() * chunks
        asked = self.context.asked
        if asked is None or len(stages) != len(asked.slices):
            return True
        return all(self.context.may_hold(stage, index) for stage, index in enumerate(stages))

    def _memory(
        self, counts: np.ndarray, num_owners: int, number: int, kind: ScheduleKind, chunks: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which candidates have to compute something again, and which could have room for all layers of the main kind.

        Of interleaved ones as many micro-batches are in flight as if all stages of a submesh were equal: (v - 1) P + 1
        of a v-th of it each, or more.
        """
        behind, total = np.arange(1, int(counts.sum(axis=1).max()) + 1), counts.sum(axis=1)
        held = np.full_like(behind, number) if kind is ScheduleKind.GPIPE else np.minimum(behind, number)
        if kind is not ScheduleKind.INTERLEAVED:
            plain = self._main_layers(counts, num_owners, held, plain=True)
            return plain < self.num_main, self._main_layers(counts, num_owners, held, plain=False) >= self.num_main
        flying = np.minimum(number, ((chunks - 1) * total + 1) / chunks)[:, None]
        need = (self._main_fixed + self._main_state / num_owners)[None, :]
        room = self._room[None, :]
        with np.errstate(divide="ignore", invalid="ignore"):
            plain = counts * room / (need + flying * self._main_residual[None, :])
            most = (
                counts * np.maximum(0.0, room - (flying - 1) * self._least_held) / (need + self._main_residual / chunks)
            )
        return np.nan_to_num(plain).sum(axis=1) < self.num_main, np.nan_to_num(most).sum(axis=1) >= self.num_main

    def _whole_s(self, counts: np.ndarray, from_s: np.ndarray) -> np.ndarray:
        """Least time of the slowest submesh that has only whole layers of the main kind."""
        slowest_s = from_s.astype(float).copy()
        for _ in range(ROUNDS):
            with np.errstate(invalid="ignore"):
                held = np.floor(slowest_s[:, None] / self.main_s[None, :] * (1 + 1e-9))
            held = np.where(np.isfinite(self.main_s)[None, :], held, 0.0)
            lacks = (counts * held).sum(axis=1) < self.num_main
            if not lacks.any():
                break
            with np.errstate(invalid="ignore"):
                next_s = np.where(np.isfinite(self.main_s)[None, :], (held + 1) * self.main_s[None, :], np.inf).min(
                    axis=1
                )
            slowest_s = np.where(lacks, next_s, slowest_s)
        return slowest_s

    def _in_turn_s(self, counts: np.ndarray, most: int) -> np.ndarray:
        """1F1B: with t[s] <= (V - X) / more[s], the least V: by linear programming, some of the fastest parts work."""
        total = counts.sum(axis=1)
        top = int(total.max())
        held = np.minimum(most, np.arange(1, top + 1))  # K of the last stage, the last but one, ...
        more = most - held + self.greater_share * (held - 1)
        ahead = np.concatenate([[0.0], np.cumsum(1 / np.maximum(more, 1e-9))])
        stops = np.cumsum(counts, axis=1)
        room = ahead[total[:, None] - stops + counts] - ahead[total[:, None] - stops]
        best = np.full(len(counts), np.inf)
        order = np.argsort(-self.weights)
        for k in range(1, len(order) + 1):
            part = order[:k]
            y = self.work_s / (room[:, part] @ self.weights[part])
            best = np.minimum(best, y * (1 + room[:, part].sum(axis=1)))
        return best


def _orders(options: StageOptions) -> list[tuple[ScheduleKind, int]]:
    found = []
    for kind in options.schedule_kinds:
        chunks = [c for c in CHUNKS if c <= options.most_chunks] if kind is ScheduleKind.INTERLEAVED else [1]
        found += [(kind, c) for c in chunks]
    return found


def _grid(ranges: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack([axis.ravel() for axis in np.meshgrid(*ranges, indexing="ij")], axis=1)

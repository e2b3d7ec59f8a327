"""A bound on pipelines whose submeshes wait for each other, whatever the cut: which time a candidate cannot reach.

The bounds of `candidates` divide the work as if every submesh were busy from the beginning to the end of a step. In a
pipeline none is but the first. With f, b, w the times of a layer's phases (w in b where a schedule does not part them),
a = f + b + w, P submeshes, S = v P stages (v > 1: interleaved), M micro-batches, and t[p] the sum of a over the layers
of submesh p, each schedule being an order that every submesh keeps to (`schedule/orders.py`):

    fill, drain     The first task of submesh p is on stage p, behind the forward tasks of stages 0 ... p - 1 for the
                    first micro-batch. Its last backward task is on stage p too, before those of stages p - 1 ... 0 for
                    the last one. Only weight tasks put off, `late` of them (ZB-H1: min(M, p + 1)), may come later.

                        T >= sum over q < p of (f + b)[stage q] + M t[p] - late w[p]
                        T >= sum over q < p of f[stage q] + M t[p]

    turning round   Before its first backward task, submesh p runs H forward tasks, and the first micro-batch runs all
                    forward tasks and the backward tasks of all stages behind. From then on the submesh has left to do
                    M t[p] without these H tasks, and then comes the drain:

                        T >= F + sum over stages behind of b + M t[p] - (H forward tasks of p) + sum over q < p of b[q]

                    1F1B and ZB-H1: H = min(M, P - p). GPipe: H = M. Interleaved: of stage c of the submesh the first
                    h[c] micro-batches (`memory_bounds`), so that with the greatest, h, these tasks take
                    h f[p] - sum over c of (h - h[c]) f[stage c].

    copies          T >= weights[p] + M t[p] + gradients[p] where a submesh has one stage, with what replicas send to
                    each other of its layers; and what stage 0 sends comes before its first and behind its last task.

A cut is bounded by what holds for any: stage s has at least one of the layers s ... s + N - S, so its f is at least the
least of these; F is at least the sum over layers of the least f on any mesh of the candidate. Every bound then has the
form T >= fixed[p] + sum over the layers of p of each[p], where `each` is not negative, as M is at least the number of
times that a task is taken off. The first layer is on submesh 0 in any cut, and the last one on submesh P - 1. With n
further layers, out of those that take longest, the memory of a submesh makes it compute y[p](n) of them again at least
(`memory_bounds`), which is part of M t[p], so that

    T >= fixed[p] + each[p] n + M y[p](n) f

for all these bounds. In time T a submesh has room for the most n for which they hold. If the submeshes together have
not room for all of those layers, no cut takes T or less. Neither does one if there is not room for all work, layers
divided as one likes: with weights v[k] for the mesh options as in `candidates`, the first bounds add up to

    sum over p of v[p] max(0, T - fixed[p]) >= sum over all layers of min over k of v[k] (M a[k] - late w[k])
"""

import dataclasses
import functools

import numpy as np

from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.candidate import Candidate
from autoshard.pipelines.search.memory_bounds import MemoryBounds, held_micro_batches
from autoshard.pipelines.search.replica_group import SearchContext

ROUNDING = 1e-9
"""Sums of seconds made in different orders differ by this share at most."""
HALVINGS = 16
"""Steps in which the least time that is not ruled out is found."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Phases:
    """Times of the phases of layers; `weight_s` is 0 where it is part of `backward_s`."""

    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_s: np.ndarray

    @property
    def total_s(self) -> np.ndarray:
        """Of all phases."""
        return self.forward_s + self.backward_s + self.weight_s


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _LayerTimes(_Phases):
    """Times of each layer on one mesh option: arrays [layers].

    Attributes:
      weights_s, gradients_s: Of what is sent to and from replicas.
    """

    weights_s: np.ndarray
    gradients_s: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _OnSubmeshes(_Phases):
    """What the bounds need of a candidate, whatever its number of micro-batches.

    Attributes:
      part: [submeshes]: which of the candidate's options each is of.
      forward_s, backward_s, weight_s, sent_s: [options, layers].
      stage_forward_s: [stages]: at least that of any stage.
      ahead_s: [submeshes]: forward and backward tasks of the stages before stage p, at least; `fill_s`, `drain_s`:
        either alone.
      behind_s: [submeshes]: backward tasks of the stages behind the last one of p, at least.
      first_s: Copies and gradients of the first layer; `start_s`: its copies.
      weights: [submeshes]: v[k] of each. work_s, late_s: [options, layers]: a and w of every layer, times v[k].
    """

    part: np.ndarray
    sent_s: np.ndarray
    stage_forward_s: np.ndarray
    ahead_s: np.ndarray
    fill_s: np.ndarray
    drain_s: np.ndarray
    behind_s: np.ndarray
    first_s: float
    start_s: float
    weights: np.ndarray
    work_s: np.ndarray
    late_s: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Line:
    """T >= fixed_s[p] + the sum of each_s[p, l] over the layers l of submesh p: arrays [submeshes], [., layers]."""

    fixed_s: np.ndarray
    each_s: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Rooms:
    """What is known of a candidate with a number of micro-batches: it cannot take a time if something has no room.

    Attributes:
      least_s: [submeshes, n]: time that a submesh with n of the layers takes at least; inf if that does not fit.
      num_main: Layers for which there must be room.
      weights: [submeshes]: v[k] of each. before_s, work_s: [bounds, submeshes] and [bounds]: when a submesh begins, and
        what all of them have to do, where the work is divided as one likes.
    """

    least_s: np.ndarray
    num_main: int
    weights: np.ndarray
    before_s: np.ndarray
    work_s: np.ndarray

    def has_room(self, time_s: float) -> bool:
        """Whether nothing rules out that a step takes no more than a time."""
        open_s = np.maximum(time_s - self.before_s, 0.0)
        if ((open_s @ self.weights) * (1 + ROUNDING) < self.work_s).any():
            return False
        rooms = (self.least_s <= time_s * (1 + ROUNDING)).sum(axis=1) - 1
        return bool((rooms >= 0).all() and rooms.sum() >= self.num_main)


class WaitingBounds:
    """The bounds of a search, which keeps the times and bytes of its layers."""

    def __init__(self, context: SearchContext):
        self.context = context
        self.memory = MemoryBounds(context)
        self._times = functools.cache(self._layer_times)
        self._mains = functools.cache(self._main_layers)

    def least_s(self, candidate: Candidate, from_s: float, to_s: float) -> float:
        """A time between two that no cut of a candidate is below; `to_s` if it surely takes as long."""
        number, replicas = candidate.num_micro_batches, candidate.num_pipelines
        costs = self._on_submeshes(candidate, replicas)
        if costs is None or not np.isfinite(to_s):
            return from_s
        rooms = self._rooms(candidate, costs, replicas, number)
        if not rooms.has_room(to_s):
            return to_s
        low, high = from_s, to_s
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if rooms.has_room(middle) else (middle, high)
        return low

    def most_micro_batches(self, candidate: Candidate, time_s: float, least: int, most: int, num_owners: int) -> int:
        """The most micro-batches of a pipeline that are not ruled out in a time, whatever other replicas do.

        Args:
          candidate: Whose pipelines; not their number, nor that of their micro-batches.
          time_s: For the step. least, most: Between which the answer is sought; less than `least` is answered by 0.
          num_owners: Replicas that share the optimizer's state, at most.
        """
        costs = self._on_submeshes(candidate, 1)
        if costs is None:
            return most

        def has_room(number: int) -> bool:
            return self._rooms(candidate, costs, num_owners, number).has_room(time_s)

        if least > most or not has_room(max(1, least)):
            return 0
        low, high = max(1, least), most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if has_room(middle) else (low, middle - 1)
        return low

    def _rooms(self, candidate: Candidate, costs: _OnSubmeshes, num_owners: int, number: int) -> _Rooms:
        main = self._mains(candidate.options, candidate.micro_batch_size)
        place = np.arange(len(costs.part))
        is_split = candidate.schedule is ScheduleKind.ZERO_BUBBLE
        late = np.minimum(number, place + 1) if is_split else np.zeros_like(place)
        whole_s = number * costs.total_s[costs.part]
        before_s = np.stack([costs.ahead_s + costs.first_s, costs.fill_s + costs.start_s])
        lines = [
            _Line(before_s[0], whole_s - late[:, None] * costs.weight_s[costs.part]),
            _Line(before_s[1], whole_s),
        ]
        if candidate.chunks == 1:
            lines.append(_Line(np.zeros(len(place)), whole_s + costs.sent_s[costs.part]))
            lines.append(_turning(candidate.schedule, costs, number, late))
        else:
            lines.append(_turning_interleaved(candidate.chunks, costs, number))
        again = self.memory.least_again(candidate, main, num_owners, number)
        again_s = number * costs.forward_s[:, main].min(axis=1)[costs.part]
        ns = np.arange(again.shape[1])
        last = costs.forward_s.shape[1] - 1
        least_s = np.zeros_like(again)
        for line in lines:
            fixed_s = line.fixed_s.copy()
            for submesh, layer in {(0, 0), (len(place) - 1, last)}:  # on which they are in any cut
                if layer not in main:
                    fixed_s[submesh] += line.each_s[submesh, layer]
            each_s = line.each_s[:, main].min(axis=1)
            least_s = np.maximum(least_s, fixed_s[:, None] + each_s[:, None] * ns)
        least_s = least_s + np.where(again > 0, again * again_s[:, None], 0.0)
        work_s = [(number * costs.work_s - of_late * costs.late_s).min(axis=0).sum() for of_late in (late.max(), 0)]
        return _Rooms(least_s, len(main), costs.weights, before_s, np.array(work_s))

    def _main_layers(self, options: tuple[int, ...], size: int) -> np.ndarray:
        """Those that are counted whole: the layers that take longest, as many as make number times least time most."""
        each = np.array([self._times(o, size, False, 1).total_s for o in options]).min(axis=0)
        order = np.argsort(-each, kind="stable")
        number = int(np.argmax(each[order] * np.arange(1, len(each) + 1))) + 1
        return np.sort(order[:number])

    def _layer_times(self, option: int, size: int, is_split: bool, num_pipelines: int) -> _LayerTimes:
        """Layers that an option does not have take for ever."""
        costs, topology = self.context.intervals.layer_costs(option, size), self.context.topology
        runs = self.context.intervals.costs(option, size)
        num = len(costs)
        at = np.arange(num), np.arange(1, num + 1)
        sent = runs.sent_weight_bytes[at]
        seconds = np.array([[c.forward_s, c.backward_s, c.weight_s] if c else [np.inf] * 3 for c in costs]).T
        near = topology.near_s_per_byte(option)
        s_per_byte = float(near[min(num_pipelines, len(near)) - 1]) / num_pipelines
        device = topology.table.options[option].mesh.device_type
        added = 3 * (num_pipelines - 1) / num_pipelines / device.memory_bytes_per_s
        totals = np.array([c.weight_total_bytes if c else 0.0 for c in costs])
        new = np.divide(sent, totals, out=np.ones(num), where=totals > 0)  # the rest is owned with an earlier layer
        gradients_s = runs.sent_gradient_bytes[at] * s_per_byte + new * runs.gradient_bytes[at] * added
        forward_s, backward_s, weight_s = seconds
        if not is_split:
            backward_s, weight_s = backward_s + weight_s, np.zeros(num)
        return _LayerTimes(forward_s, backward_s, weight_s, sent * s_per_byte, gradients_s)

    def _on_submeshes(self, candidate: Candidate, num_pipelines: int) -> _OnSubmeshes | None:
        """None where some option lacks layers, which is not bounded here."""
        size, is_split = candidate.micro_batch_size, candidate.schedule is ScheduleKind.ZERO_BUBBLE
        times = [self._times(o, size, is_split, num_pipelines) for o in candidate.options]
        if not all(np.isfinite(t.total_s).all() for t in times):
            return None
        part = np.repeat(np.arange(len(times)), candidate.counts)
        num_submeshes, num_stages = len(part), candidate.num_stages
        width = self.context.intervals.layers.num_layers - num_stages + 1
        of_stage = np.tile(part, candidate.chunks)

        def least(rows: np.ndarray) -> np.ndarray:
            """[stages]: the least of the layers that each could have."""
            windows = np.lib.stride_tricks.sliding_window_view(rows, width, axis=1).min(axis=2)
            return windows[of_stage, np.arange(num_stages)]

        forward, backward = np.array([t.forward_s for t in times]), np.array([t.backward_s for t in times])
        stage_forward_s, stage_backward_s = least(forward), least(backward)
        stage_both_s = least(forward + backward)
        speeds = np.array([1 / t.total_s.sum() for t in times])
        weights = speeds / speeds.max()
        first = lambda row: (np.cumsum(row) - row)[:num_submeshes]
        behind_s = np.cumsum(stage_backward_s[::-1])[::-1] - stage_backward_s
        return _OnSubmeshes(
            part=part,
            forward_s=forward,
            backward_s=backward,
            weight_s=np.array([t.weight_s for t in times]),
            sent_s=np.array([t.weights_s + t.gradients_s for t in times]),
            stage_forward_s=stage_forward_s,
            ahead_s=first(stage_both_s),
            fill_s=first(stage_forward_s),
            drain_s=first(stage_backward_s),
            behind_s=behind_s[num_stages - num_submeshes :],
            first_s=float(times[0].weights_s[0] + times[0].gradients_s[0]),
            start_s=float(times[0].weights_s[0]),
            weights=weights[part],
            work_s=weights[:, None] * np.array([t.total_s for t in times]),
            late_s=weights[:, None] * np.array([t.weight_s for t in times]),
        )


def _turning(kind: ScheduleKind, costs: _OnSubmeshes, number: int, late: np.ndarray) -> _Line:
    """The bound for the turning round of a submesh that has one stage.

    F and the backward tasks of other stages are all tasks but the backward task of p. The own layers of p among them
    take their own time, all others that of the best mesh.
    """
    num_submeshes = len(costs.part)
    if kind is ScheduleKind.GPIPE:
        ahead = np.full(num_submeshes, number)
    else:
        ahead = np.minimum(number, num_submeshes - np.arange(num_submeshes))
    each_s = number * costs.total_s[costs.part] - (ahead - 1)[:, None] * costs.forward_s[costs.part]
    each_s = each_s - late[:, None] * costs.weight_s[costs.part]
    least_s = costs.forward_s.min(axis=0) + costs.backward_s.min(axis=0)
    return _Line(np.full(num_submeshes, least_s.sum() + costs.first_s), each_s - least_s)


def _turning_interleaved(chunks: int, costs: _OnSubmeshes, number: int) -> _Line:
    """The same for the interleaved schedule."""
    num_submeshes = len(costs.part)
    held = held_micro_batches(ScheduleKind.INTERLEAVED, num_submeshes, chunks, number)
    most = held.max(axis=1)
    least_s = costs.forward_s.min(axis=0)
    fewer_s = ((most[:, None] - held) * costs.stage_forward_s.reshape(chunks, num_submeshes).T).sum(axis=1)
    fixed_s = least_s.sum() + costs.behind_s + costs.drain_s + costs.first_s + fewer_s
    each_s = number * costs.total_s[costs.part] - (most - 1)[:, None] * costs.forward_s[costs.part]
    return _Line(fixed_s, each_s - least_s)

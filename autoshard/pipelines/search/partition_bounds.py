"""Bounds on the time of a cut, and the cuts that are best by them.

The simulator gives the time of one cut; what makes the search fast is a bound on it. A micro-batch passes all stages
and comes back, so a step takes at least X = the sum over stages of forward, backward and transfer times; and with t, f,
b the times of one stage and K the micro-batches that it holds at most, at least

    GPipe   X + (M - 1) t                          M - 1 more pass the stage, forward and backward one after the other
    1F1B    X + (M - K) t + (K - 1) max(f, b)      before its first backward task it runs K forward tasks, which takes
                                                   (K - 1) f beyond the first; after its last forward task it runs K
                                                   backward tasks; between the two it is busy with M - K of each
    any     w + M t + g + u                        it gets weights, is busy, sends gradients, updates

X and the first two begin after the first stage has its weights, and end before its gradients are sent. For a bound y on
what is added to X, a dynamic program over (stage, layers so far) gives the least X, every stage within its memory with
the micro-batches that it holds at its position. X falls and y grows: the least X + y over a grid of y is a cut that is
the best by this bound, and each interval of the grid gives a bound for all cuts in it. ZB-H1 and interleaved pipelines
are cut by the same program, with a weaker bound.
"""

import math

import numpy as np

from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.replica_group import ReplicaGroup
from autoshard.pipelines.search.stage_bounds import StageBounds

CLOSE = 1e-9
"""Times nearer than this to each other, relatively, count as equal."""
GRID = 12
"""Bounds y that are tried between the least possible and the greatest that could pay."""


def good_partitions(positions: list[StageBounds], group: ReplicaGroup) -> tuple[list[tuple[int, ...]], float]:
    """Cuts that are good by their bounds, and a bound for all cuts."""
    chains = [np.where(p.is_allowed, p.chain_s, np.inf) for p in positions]
    mores = [np.where(p.is_allowed, p.more_s, np.inf) for p in positions]
    floors = [np.where(p.is_allowed, p.floor_s, np.inf) for p in positions]
    least_more_s = _least_greatest(mores)
    if not np.isfinite(least_more_s):
        return [], math.inf
    ys = np.array([least_more_s * (1 + CLOSE), np.inf])
    sums, cuts = _least_sums(chains, mores, ys)
    least_chain_s = sums[1]
    best_s = sums[0] + least_more_s
    is_additive = group.schedule in (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)
    floor_s = max(float(least_chain_s), _least_greatest(floors))
    found = list(cuts[:1])
    if best_s - least_chain_s > least_more_s * 1.001:
        grid = np.linspace(least_more_s, best_s - least_chain_s, GRID)[1:]
        more_sums, more_cuts = _least_sums(chains, mores, grid)
        found += more_cuts
        starts = np.concatenate([[least_more_s], grid])
        stops = np.concatenate([more_sums, [least_chain_s]])
        additive_s = float(np.min(starts + stops))
    else:
        additive_s = float(least_chain_s + least_more_s)
    together = [np.maximum(m, f - least_chain_s) for m, f in zip(mores, floors, strict=True)]
    least_together_s = _least_greatest(together)
    found += _least_sums(chains, together, np.array([least_together_s * (1 + CLOSE)]))[1]
    if is_additive:
        return found, max(floor_s, additive_s, least_chain_s + least_together_s)
    return found, floor_s


def _least_greatest(keys: list[np.ndarray]) -> float:
    """Least greatest key over all cuts."""
    best = np.full(len(keys[0]), np.inf)
    best[0] = -np.inf
    for key in keys:
        best = np.maximum(best[:, None], key).min(axis=0)
    return float(best[-1])


def _least_sums(
    costs: list[np.ndarray], keys: list[np.ndarray], ys: np.ndarray
) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """For each y, the least sum of costs over cuts whose keys are all at most y; and these cuts, if any."""
    size = len(costs[0])
    best = np.full((len(ys), size), np.inf)
    best[:, 0] = 0.0
    came_from = []
    for cost, key in zip(costs, keys, strict=True):
        step = np.where(key[None] <= ys[:, None, None], cost[None], np.inf) + best[:, :, None]
        came_from.append(step.argmin(axis=1))
        best = np.take_along_axis(step, came_from[-1][:, None, :], axis=1)[:, 0, :]
    cuts = []
    for k in range(len(ys)):
        if np.isfinite(best[k, -1]):
            cut = [size - 1]
            for origin in reversed(came_from):
                cut.append(int(origin[k, cut[-1]]))
            cuts.append(tuple(s + offset for s, offset in enumerate(reversed(cut))))
    return best[:, -1], cuts


def partition_bounds_s(positions: list[StageBounds], group: ReplicaGroup, cuts: np.ndarray) -> np.ndarray:
    """The bound of each cut; inf if it does not fit."""
    if not len(cuts):
        return np.zeros(0)

    def of(name: str) -> np.ndarray:
        found = [getattr(p, name)[cuts[:, s] - s, cuts[:, s + 1] - s - 1] for s, p in enumerate(positions)]
        return np.stack(found, axis=1)

    chain_s, busy_s = of("chain_s"), of("busy_s")
    bounds_s = np.maximum(chain_s.sum(axis=1), of("floor_s").max(axis=1))
    num_submeshes = len(group.submeshes[0])
    if group.schedule in (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B):
        bounds_s = np.maximum(bounds_s, chain_s.sum(axis=1) + of("more_s").max(axis=1))
    else:  # before its first task a submesh waits for those of the submeshes before it, and then is busy
        on_submesh = sum(busy_s[:, c : c + num_submeshes] for c in range(0, group.num_stages, num_submeshes))
        heads = of("head_s")[:, :num_submeshes]
        before = np.cumsum(heads, axis=1) - heads
        bounds_s = np.maximum(bounds_s, (before + group.num_micro_batches[0] * on_submesh).max(axis=1))
    return np.where(of("is_allowed").all(axis=1), bounds_s, np.inf)

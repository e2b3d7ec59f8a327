"""The best cut of the layers over given submeshes, with a bound on how good any cut could be.

The cuts that are best by their bounds (`cut_bounds`) go through the simulator. Where there are few cuts, all are looked
at, in the order of their bounds, until no bound is below the best time: then the best is exact.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from autoshard.pipelines.search.arrangement import Arrangement, Stage
from autoshard.pipelines.search.options import PartitionEffort
from autoshard.pipelines.search.partition_bounds import CLOSE, good_partitions, partition_bounds_s
from autoshard.pipelines.search.rematerialised import rematerialised_stages
from autoshard.pipelines.search.replica_group import ReplicaGroup, SearchContext, arrangement_step_s
from autoshard.pipelines.search.stage_bounds import stage_bounds

MOST_REPLICAS = 4
"""Of more equal replicas the simulator sees the first and the last."""


@dataclasses.dataclass(frozen=True, slots=True)
class StagePartition:
    """A group's best cut.

    Attributes:
      arrangement: The group alone. stages: What each of its pipelines runs.
      step_s: Its step time. bound_s: No cut of this group is faster.
    """

    arrangement: Arrangement
    stages: tuple[Stage, ...]
    step_s: float
    bound_s: float


def best_partition(
    context: SearchContext,
    group: ReplicaGroup,
    effort: PartitionEffort | None = None,
    suggestions: Sequence[Sequence[int]] = (),
    cutoff_s: float = math.inf,
) -> tuple[StagePartition | None, float]:
    """Cuts the layers over the submeshes of a group.

    Args:
      context: Costs, cluster, memory.
      group: The replicas and their submeshes.
      effort: How long to look.
      suggestions: Other cuts to look at, as the first layer of each stage and the number of layers.
      cutoff_s: Only cuts that are faster are of interest.

    Returns:
      The best cut, None if no cut of interest fits the memory; and a bound for all cuts, inf if none fits.
    """
    effort = effort or PartitionEffort()
    num_layers, num_stages = context.intervals.layers.num_layers, group.num_stages
    if num_stages > num_layers:
        return None, math.inf
    num_cuts = math.comb(num_layers - 1, num_stages - 1)
    is_complete = num_cuts <= effort.most_enumerated
    positions = stage_bounds(context, group, shares_memory=False)
    if is_complete:
        inner = itertools.combinations(range(1, num_layers), num_stages - 1)
        cuts = np.array([(0, *c, num_layers) for c in inner], dtype=int).reshape(num_cuts, num_stages + 1)
        bound_s = -math.inf
    else:
        found, bound_s = good_partitions(positions, group)
        if num_stages > len(group.submeshes[0]):  # what stages of a submesh need together is known when they are cut
            found += good_partitions(stage_bounds(context, group, shares_memory=True), group)[0]
        cuts = np.array([*found, *suggestions], dtype=int).reshape(-1, num_stages + 1)
    bounds_s = partition_bounds_s(positions, group, cuts)
    order = [k for k in np.argsort(bounds_s, kind="stable") if np.isfinite(bounds_s[k])]
    best: StagePartition | None = None
    num_simulated, rest_s = 0, math.inf
    seen = set()
    for k in order:
        limit_s = cutoff_s if best is None else min(cutoff_s, best.step_s)
        if bounds_s[k] >= limit_s * (1 - CLOSE) or num_simulated >= effort.most_simulated:
            rest_s = float(bounds_s[k])
            break
        key = tuple(cuts[k])
        if key in seen:
            continue
        seen.add(key)
        fitting = rematerialised_stages(context, group, positions, [int(c) for c in key])
        num_simulated += bool(fitting)
        for stages in fitting:
            arrangement = Arrangement(group.pipelines(stages))
            step_s = arrangement_step_s(context, arrangement, MOST_REPLICAS)
            if best is None or step_s < best.step_s * (1 - CLOSE):
                best = StagePartition(arrangement, stages, step_s, 0.0)
    if is_complete:
        bound_s = rest_s
    if best is None:
        return None, bound_s
    bound_s = min(best.step_s, max(bound_s, 0.0))
    return dataclasses.replace(best, bound_s=bound_s), bound_s

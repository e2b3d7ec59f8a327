"""Every decision tried: the oracle for small problems."""

import itertools
import math

from autoshard.share.allocation.problem import AllocationProblem, value_of


def best_value(problem: AllocationProblem) -> float:
    """The greatest value of any decision whose jobs fit; -inf if there is none.

    Whether jobs fit is tried part by part on every node, without classes, sums or patterns.
    """
    best = -math.inf
    for chosen in itertools.product(*(range(len(job.choices)) for job in problem.jobs)):
        value = value_of(problem, chosen)
        if value > best and _fits_now(problem, chosen) and _fits_later(problem, chosen):
            best = value
    return best


def _fits_now(problem: AllocationProblem, chosen: tuple[int, ...]) -> bool:
    free = {node.number: node.num_devices for node in problem.nodes}
    group = {node.number: node.group for node in problem.nodes}
    parts: list[tuple[str, int]] = []
    for job, number in zip(problem.jobs, chosen, strict=True):
        choice = job.choices[number]
        if choice.footprint is None or choice.first_period > 0:
            continue
        if choice.is_kept and job.placement is not None:
            for taken in job.placement.taken:
                if taken.node not in free:
                    return False
                free[taken.node] -= taken.num_devices
        else:
            parts += [(p.group, p.devices_per_node) for p in choice.footprint.parts for _ in range(p.num_nodes)]
    if min(free.values(), default=0) < 0:
        return False
    return _fit(sorted(parts, key=lambda part: -part[1]), free, group)


def _fit(parts: list[tuple[str, int]], free: dict[int, int], group: dict[int, str]) -> bool:
    if not parts:
        return True
    name, size = parts[0]
    for node, left in free.items():
        if group[node] == name and left >= size:
            free[node] -= size
            if _fit(parts[1:], free, group):
                free[node] += size
                return True
            free[node] += size
    return False


def _fits_later(problem: AllocationProblem, chosen: tuple[int, ...]) -> bool:
    for period in range(1, problem.num_periods):
        left: dict[str, int] = {}
        for node in problem.nodes:
            left[node.group] = left.get(node.group, 0) + node.num_devices
        for job, number in zip(problem.jobs, chosen, strict=True):
            choice = job.choices[number]
            if choice.footprint is not None and choice.first_period <= period < choice.end_period:
                for part in choice.footprint.parts:
                    left[part.group] = left.get(part.group, 0) - part.num_devices
        if min(left.values()) < 0:
            return False
    return True

"""The allocation as an integer program, solved by OR-Tools' CP-SAT.

Sets: jobs j; choices c of a job, each with a footprint f(j, c), periods [a, e) and a value v; node groups g with part
sizes d; classes k of nodes that are alike, with m_k nodes of D_k devices; periods p, of which 0 is now.

Variables:

    x[j,c]  in {0, 1}   job j gets its choice c
    y[k,d]  in N        parts of d devices that begin now on nodes of class k
    q[k,t]  in N        nodes of class k that are filled by pattern t (only where sums do not suffice)
    z       >= 0        the greatest severity

    maximise    sum_jc v[j,c] x[j,c]  -  M z

    subject to  sum_c x[j,c] = 1                                            one choice for each job                  (1)
                sum_{k in g} y[k,d]  =  sum_jc n(g,d; j,c) x[j,c]           parts that begin now are on some node    (2)
                sum_d d y[k,d]  <=  m_k D_k - m_k sum_{j on k} d_j x[j,kept]  they fit beside what stays             (3)
                sum_jc [a <= p < e] d(g; j,c) x[j,c]  <=  D_g               devices of a group in a later period p   (4)
                z >= s[j,c] x[j,c]                                          the worst job                            (5)

n(g,d; j,c) counts the parts of d devices on nodes of g that choice c begins now, and d(g; j,c) its devices of g. (3) is
exact for one node. For several it is exact if each size divides the next and the largest the node (`packs_by_sum`);
else patterns stand in its place: sum_t q[k,t] <= m_k - m_k x[j,kept], y[k,d] <= sum_t (parts of d in t) q[k,t], as in
the cutting-stock problem (Gilmore and Gomory 1961). Parts of one job may come to lie on the same node, which is nearer
together than it asked for.

CP-SAT takes integers: values and severities are scaled so that the greatest is `_RESOLUTION`, and the bound is widened
by what rounding can hide. The rest of the model is exact.

Large problems are first relaxed (`relaxation.py`). Only the choices that look best then enter the program above, and
the bound is that of the relaxation, or of the program where the relaxation proves that nothing better was left out.
"""

import collections
import dataclasses
import math
import time
from collections.abc import Sequence

from ortools.sat.python import cp_model

from autoshard.errors import ShareError
from autoshard.share.allocation.node_classes import NodeClass, node_classes, packs_by_sum, patterns
from autoshard.share.allocation.problem import AllocationProblem, AllocationSolution, Choice, value_of
from autoshard.share.allocation.relaxation import relax
from autoshard.share.footprint import Footprint, Part
from autoshard.share.pool import Placement, Taken

_RESOLUTION = 10**7
_LEAST_S = 0.5
"""Time of a search whose problem took all the time to write down: enough for the decision that nobody moves."""


@dataclasses.dataclass(frozen=True, slots=True)
class SolveLimits:
    """When the search ends.

    Attributes:
        time_limit_s: longest time.
        gap: relative distance from the bound that is good enough.
        num_workers: threads; one makes the answer repeatable as long as the time limit is not met.
        seed: of the search.
        most_choices: problems with more choices are solved over those that look best by their relaxation, whose bound
            holds for all.
    """

    time_limit_s: float = 10.0
    gap: float = 0.001
    num_workers: int = 1
    seed: int = 0
    most_choices: int = 1500


def solve_allocation(
    problem: AllocationProblem, limits: SolveLimits, started_s: float | None = None
) -> AllocationSolution:
    """Decides who gets which devices.

    Args:
        problem: jobs with their choices, and nodes.
        limits: when to end.
        started_s: value of `time.perf_counter` from which the time limit counts; None for now.

    Returns:
        The best decision that was found, with its bound.

    Raises:
        ShareError: the jobs cannot all have one of their choices, or the time did not suffice for any decision.
    """
    started_s = time.perf_counter() if started_s is None else started_s
    if sum(len(job.choices) for job in problem.jobs) <= limits.most_choices:
        solution = _solve(problem, limits, started_s)
    else:
        solution = _solve_near_relaxation(problem, limits, started_s)
    return dataclasses.replace(solution, solved_in_s=time.perf_counter() - started_s)


def _solve_near_relaxation(problem: AllocationProblem, limits: SolveLimits, started_s: float) -> AllocationSolution:
    """Solves the problem of the choices that look best by the relaxation, whose bound holds for all."""
    relaxed = relax(problem)
    each = max(limits.most_choices // len(problem.jobs), 2)
    kept = tuple(
        _promising(job.choices, costs, each) for job, costs in zip(problem.jobs, relaxed.reduced_costs, strict=True)
    )
    fewer = _of_choices(problem, kept)
    solution = _solve(fewer, limits, started_s, relaxed.bound)
    chosen = tuple(own[number] for own, number in zip(kept, solution.chosen, strict=True))
    bound = relaxed.bound
    room = relaxed.bound - solution.value
    if all(
        cost > room or number in own
        for own, costs in zip(kept, relaxed.reduced_costs, strict=True)
        for number, cost in enumerate(costs)
    ):  # what was left out is in no better solution
        bound = min(bound, max(solution.bound, solution.value))
    return dataclasses.replace(solution, chosen=chosen, bound=max(bound, solution.value))


def _promising(choices: Sequence[Choice], costs: Sequence[float], count: int) -> tuple[int, ...]:
    """The numbers of the choices with least reduced cost, and of staying and waiting."""
    order = sorted(range(len(choices)), key=lambda number: costs[number])
    own = {number for number, choice in enumerate(choices) if choice.is_kept or choice.footprint is None}
    return tuple(sorted(own | set(order[:count])))


def _of_choices(problem: AllocationProblem, kept: Sequence[Sequence[int]]) -> AllocationProblem:
    jobs = tuple(
        dataclasses.replace(job, choices=tuple(job.choices[number] for number in own))
        for job, own in zip(problem.jobs, kept, strict=True)
    )
    return dataclasses.replace(problem, jobs=jobs)


def _solve(
    problem: AllocationProblem, limits: SolveLimits, started_s: float, bound: float | None = None
) -> AllocationSolution:
    """Solves the program as it is; a search that reaches a `bound` known from elsewhere, within the gap, ends."""
    model = _Model(problem, bound)
    solver = _solver()
    solver.parameters.max_time_in_seconds = max(limits.time_limit_s - (time.perf_counter() - started_s), _LEAST_S)
    solver.parameters.relative_gap_limit = limits.gap
    solver.parameters.num_workers = limits.num_workers
    solver.parameters.random_seed = limits.seed
    solver.parameters.linearization_level = 2
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        must = [job.name for job in problem.jobs if all(choice.footprint is not None for choice in job.choices)]
        raise ShareError(
            f"Every job must have one of its choices; for {len(problem.jobs)} jobs on {len(problem.nodes)} nodes there "
            f"is {'no such decision' if status == cp_model.INFEASIBLE else 'none after the time limit'}. Jobs that may "
            f"not wait: {', '.join(must) or 'none'}. Make some of them preemptible, or give more time."
        )
    return model.solution(solver)


def _solver() -> cp_model.CpSolver:
    """A solver that leaves Ctrl-C to the program.

    CP-SAT takes the signal for itself while it solves, and puts the system's own action in place of the handler that
    was there: the next Ctrl-C would end a driver at once, and leave its jobs to themselves.
    """
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False
    return solver


class _Model:
    def __init__(self, problem: AllocationProblem, bound: float | None):
        self._problem, self._classes = problem, node_classes(problem)
        self.model = cp_model.CpModel()
        values = [abs(choice.value) for job in problem.jobs for choice in job.choices]
        worst = [problem.worst_weight * max(choice.severity, 0.0) for job in problem.jobs for choice in job.choices]
        self._scale = _RESOLUTION / max([*values, *worst, 1e-300])
        self._x = [[self.model.new_bool_var("") for _ in job.choices] for job in problem.jobs]
        for row in self._x:
            self.model.add_exactly_one(row)
        self._place_now()
        for period in range(1, problem.num_periods):
            self._count_later(period)
        self._maximise(bound)
        self._hint()

    def _choices(self) -> Sequence[tuple[int, Choice, cp_model.IntVar]]:
        return [
            (number, choice, variable)
            for number, (job, row) in enumerate(zip(self._problem.jobs, self._x, strict=True))
            for choice, variable in zip(job.choices, row, strict=True)
        ]

    def _place_now(self) -> None:
        """(2) and (3)."""
        begun: dict[tuple[str, int], list[tuple[int, cp_model.IntVar]]] = collections.defaultdict(list)
        kept: dict[int, cp_model.IntVar] = {}
        for number, choice, variable in self._choices():
            if choice.footprint is None or choice.first_period > 0:
                continue
            if choice.is_kept:
                kept[number] = variable
                continue
            for part in choice.footprint.parts:
                begun[part.group, part.devices_per_node].append((part.num_nodes, variable))
        sizes: dict[str, list[int]] = collections.defaultdict(list)
        for group, size in begun:
            sizes[group].append(size)
        self._y: dict[tuple[int, int], cp_model.IntVar] = {}
        self._begun: list[cp_model.IntVar] = []
        for index, own in enumerate(self._classes):
            self._fit(index, own, [size for size in sizes[own.group] if size <= own.num_devices], kept)
        for (group, size), parts in begun.items():
            places = [y for (k, d), y in self._y.items() if d == size and self._classes[k].group == group]
            self.model.add(sum(places) == cp_model.LinearExpr.weighted_sum(*_transposed(parts)))

    def _fit(self, index: int, own: NodeClass, sizes: Sequence[int], kept: dict[int, cp_model.IntVar]) -> None:
        count = len(own.nodes)
        for size in sizes:
            self._y[index, size] = self.model.new_int_var(0, count * (own.num_devices // size), "")
            self._begun.append(self._y[index, size])
        stays = [(devices, kept[job]) for job, devices in own.occupants]
        filled = sum(size * self._y[index, size] for size in sizes) + sum(count * d * x for d, x in stays)
        self.model.add(filled <= count * own.num_devices)
        if count == 1 or not sizes or packs_by_sum(own.num_devices, sizes):
            return
        ways = patterns(own.num_devices, sizes)
        filled_by = [self.model.new_int_var(0, count, "") for _ in ways]
        self._begun += filled_by
        self.model.add(sum(filled_by) + sum(count * x for _, x in stays) <= count)
        for size in sizes:
            room = sum(way.get(size, 0) * q for way, q in zip(ways, filled_by, strict=True))
            self.model.add(self._y[index, size] <= room)

    def _count_later(self, period: int) -> None:
        """(4)."""
        devices: dict[str, int] = collections.Counter()
        for node in self._problem.nodes:
            devices[node.group] += node.num_devices
        used: dict[str, list[tuple[int, cp_model.IntVar]]] = collections.defaultdict(list)
        for _, choice, variable in self._choices():
            if choice.footprint is not None and choice.first_period <= period < choice.end_period:
                for part in choice.footprint.parts:
                    used[part.group].append((part.num_devices, variable))
        for group, parts in used.items():
            self.model.add(cp_model.LinearExpr.weighted_sum(*_transposed(parts)) <= devices[group])

    def _maximise(self, bound: float | None) -> None:
        """(5) and the objective, which does not exceed a bound known from elsewhere."""
        weights, variables = [], []
        for _, choice, variable in self._choices():
            weights.append(round(choice.value * self._scale))
            variables.append(variable)
        objective = cp_model.LinearExpr.weighted_sum(variables, weights)
        price = self._problem.worst_weight * self._scale
        if price:
            severities = [round(price * max(choice.severity, 0.0)) for _, choice, _ in self._choices()]
            worst = self.model.new_int_var(0, max(severities), "")
            for row, job in zip(self._x, self._problem.jobs, strict=True):
                own = [round(price * max(choice.severity, 0.0)) for choice in job.choices]
                self.model.add(worst >= cp_model.LinearExpr.weighted_sum(row, own))
            objective -= worst
        if bound is not None:
            self.model.add(objective <= math.ceil(bound * self._scale) + len(self._x) + 1)
        self.model.maximize(objective)

    def _hint(self) -> None:
        """Everybody stays or waits."""
        for job, row in zip(self._problem.jobs, self._x, strict=True):
            own = next((n for n, c in enumerate(job.choices) if c.is_kept), None)
            if own is None:
                own = next((n for n, c in enumerate(job.choices) if c.footprint is None), None)
            for number, variable in enumerate(row):
                self.model.add_hint(variable, number == own)
        for variable in self._begun:
            self.model.add_hint(variable, 0)

    def solution(self, solver: cp_model.CpSolver) -> AllocationSolution:
        """What was found, with a node for every part."""
        chosen = tuple(next(n for n, x in enumerate(row) if solver.boolean_value(x)) for row in self._x)
        rounding = (len(self._x) + 1) / self._scale
        value = value_of(self._problem, chosen)
        bound = max(solver.best_objective_bound / self._scale + rounding, value)
        placements = self._placements(solver, chosen)
        return AllocationSolution(chosen, placements, value, bound, 0.0)

    def _placements(self, solver: cp_model.CpSolver, chosen: Sequence[int]) -> tuple[Placement | None, ...]:
        places = self._places(solver, chosen)
        result: list[Placement | None] = []
        for job, number in zip(self._problem.jobs, chosen, strict=True):
            choice = job.choices[number]
            if choice.footprint is None or choice.first_period > 0:
                result.append(None)
            elif choice.is_kept:
                result.append(job.placement)
            else:
                result.append(_placed(choice.footprint, places))
        return tuple(result)

    def _places(self, solver: cp_model.CpSolver, chosen: Sequence[int]) -> dict[tuple[str, int], list[int]]:
        """For each group and size of part, the nodes that have a place for one, as often as they do."""
        stays = {n for n, job in enumerate(self._problem.jobs) if job.choices[chosen[n]].is_kept}
        places: dict[tuple[str, int], list[int]] = collections.defaultdict(list)
        for index, own in enumerate(self._classes):
            sizes = sorted((d for k, d in self._y if k == index), reverse=True)
            counts = {size: solver.value(self._y[index, size]) for size in sizes}
            room = own.num_devices - sum(devices for job, devices in own.occupants if job in stays)
            for node, parts in zip(own.nodes, _packed(len(own.nodes), room, counts), strict=False):
                for size in parts:
                    places[own.group, size].append(node)
        return places


def _packed(num_nodes: int, room: int, counts: dict[int, int]) -> list[list[int]]:
    """The parts of each node: largest first, which is enough where sums suffice; else by search."""
    parts = [size for size in sorted(counts, reverse=True) for _ in range(counts[size])]
    nodes: list[list[int]] = []
    for size in parts:
        target = next((own for own in nodes if sum(own) + size <= room), None)
        if target is None:
            nodes.append([size])
        else:
            target.append(size)
    if len(nodes) <= num_nodes:
        return nodes
    return _packed_by_patterns(num_nodes, room, counts)


def _packed_by_patterns(num_nodes: int, room: int, counts: dict[int, int]) -> list[list[int]]:
    """The same where largest first fails: which patterns, as a small program of its own."""
    model = cp_model.CpModel()
    ways = patterns(room, [size for size, count in counts.items() if count])
    filled_by = [model.new_int_var(0, num_nodes, "") for _ in ways]
    model.add(sum(filled_by) <= num_nodes)
    for size, count in counts.items():
        model.add(sum(way.get(size, 0) * q for way, q in zip(ways, filled_by, strict=True)) >= count)
    solver = _solver()
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ShareError(
            f"Parts {counts} do not fit on {num_nodes} nodes of {room} devices: this is a fault of autoshard."
        )
    left, nodes = dict(counts), []
    for way, q in zip(ways, filled_by, strict=True):
        for _ in range(solver.value(q)):
            own = [size for size, most in way.items() for _ in range(min(most, left[size]))]
            for size in own:
                left[size] -= 1
            nodes.append(own)
    return nodes


def _placed(footprint: Footprint, places: dict[tuple[str, int], list[int]]) -> Placement:
    taken: dict[int, int] = collections.Counter()
    for part in footprint.parts:
        for node in _taken_places(part, places[part.group, part.devices_per_node]):
            taken[node] += part.devices_per_node
    return Placement(footprint, tuple(Taken(node, devices) for node, devices in taken.items()))


def _taken_places(part: Part, free: list[int]) -> list[int]:
    """Takes the places of one part, on different nodes where there are enough."""
    own = list(dict.fromkeys(free))[: part.num_nodes]
    for node in own:
        free.remove(node)
    while len(own) < part.num_nodes:
        own.append(free.pop())
    return own


def _transposed(parts: Sequence[tuple[int, cp_model.IntVar]]) -> tuple[list[cp_model.IntVar], list[int]]:
    return [variable for _, variable in parts], [weight for weight, _ in parts]

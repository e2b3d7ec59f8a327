"""The linear relaxation of an allocation: a bound in a fraction of a second, and the choices that can matter.

Of the integer program (`cp_sat.py`) it keeps one choice for each job (1), now in shares x in [0, 1]; devices of each
group in every period, the first one included, without nodes (4); and the worst job (5):

    B = max sum v x - M z   subject to   sum_c x[j,c] = 1,  sum d(g) x <= D_g in each period,  sum_c s[j,c] x[j,c] <= z.

Whatever fits on nodes fits in sums, so that B is an upper bound. There are few rows beside one for each job, so that
few jobs are cut into shares, and the bound is near. With the prices of devices at hand, a choice has the reduced cost

    r[j,c] = u_j + sum_g,p lambda[g,p] d(g) + w_j s[j,c] - v[j,c]  >=  0,

by which every solution that takes it stays below B. So once a solution of the value V is known, no choice with
r > B - V is in any better one (reduced-cost fixing).
"""

import dataclasses

import numpy as np
import scipy.optimize
import scipy.sparse

from autoshard.errors import ShareError
from autoshard.share.allocation.problem import AllocationProblem


@dataclasses.dataclass(frozen=True, slots=True)
class Relaxation:
    """The solution of the relaxation.

    Attributes:
        bound: no solution has a greater value.
        reduced_costs: for each job and choice, what the bound falls by if it is taken; at least 0.
    """

    bound: float
    reduced_costs: tuple[tuple[float, ...], ...]


def relax(problem: AllocationProblem) -> Relaxation:
    """Solves the relaxation, by HiGHS.

    Raises:
        ShareError: it has no solution, and so the problem has none.
    """
    columns = [(j, choice) for j, job in enumerate(problem.jobs) for choice in job.choices]
    groups = sorted({node.group for node in problem.nodes})
    devices = [sum(n.num_devices for n in problem.nodes if n.group == group) for group in groups]
    place = {group: number for number, group in enumerate(groups)}
    num_jobs, num_groups, num_periods = len(problem.jobs), len(groups), problem.num_periods
    absent = num_groups * num_periods
    rows, cols, weights = [], [], []
    upper = np.full(len(columns), np.inf)
    for column, (job, choice) in enumerate(columns):
        for part in () if choice.footprint is None else choice.footprint.parts:
            if part.group not in place:
                upper[column] = 0.0
                continue
            for period in range(choice.first_period, min(choice.end_period, num_periods)):
                rows.append(place[part.group] * num_periods + period)
                cols.append(column)
                weights.append(float(part.num_devices))
        if problem.worst_weight and choice.severity > 0:
            rows.append(absent + job)
            cols.append(column)
            weights.append(choice.severity)
    if problem.worst_weight:  # the last column is the greatest severity
        rows += range(absent, absent + num_jobs)
        cols += [len(columns)] * num_jobs
        weights += [-1.0] * num_jobs
    size = len(columns) + 1
    at_most = scipy.sparse.csr_array((weights, (rows, cols)), shape=(absent + num_jobs, size))
    limits = np.concatenate([np.repeat(np.array(devices, float), num_periods), np.zeros(num_jobs)])
    one = scipy.sparse.csr_array(
        (np.ones(len(columns)), ([job for job, _ in columns], range(len(columns)))), shape=(num_jobs, size)
    )
    cost = np.array([*(-choice.value for _, choice in columns), problem.worst_weight])
    solved = scipy.optimize.linprog(
        cost, A_ub=at_most, b_ub=limits, A_eq=one, b_eq=np.ones(num_jobs), bounds=[(0, u) for u in (*upper, np.inf)]
    )
    if solved.status != 0:
        raise ShareError(f"The relaxation of the allocation has no solution: {solved.message} Let jobs wait.")
    reduced = cost - at_most.T @ solved.ineqlin.marginals - one.T @ solved.eqlin.marginals
    split = np.cumsum([len(job.choices) for job in problem.jobs])[:-1]
    costs = tuple(tuple(own) for own in np.split(np.maximum(reduced[:-1], 0.0), split))
    return Relaxation(-float(solved.fun), costs)

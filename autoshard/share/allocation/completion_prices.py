"""What progress of a job is worth where the mean completion time counts: prices after heSRPT.

Take m jobs on one divisible resource, each of which runs at the rate s(a) = a^p on a share a of it. heSRPT (Berg,
Vesilo and Harchol-Balter, "heSRPT: Parallel scheduling to minimize mean slowdown", Performance Evaluation 144, 2020)
gives the shares that minimise sum_i w_i C_i. With jobs ordered by size, the largest first, and W_i = w_1 + ... + w_i,

    a_i = (W_i / W_m)^q - (W_{i-1} / W_m)^q,    q = 1 / (1 - p).

(It is proved for weights that do not fall as sizes do, as equal ones and w_i = 1 / size; for other weights it is a
heuristic.) A decision on whole devices, kinds and nodes cannot take shares. But the same shares maximise

    sum_i c_i a_i^p  subject to  sum_i a_i <= 1     where     c_i = a_i^(1 - p),

since the derivatives p c_i a_i^(p-1) = p are then equal. So c_i is the price of progress of job i, measured in its rate
on one device, and an integer program with these prices decides as heSRPT does where heSRPT applies. For p -> 1,
c_i -> W_i / W_m: the shortest job first. The smaller p, the more equal the prices.
"""

import math
from collections.abc import Sequence


def completion_prices(sizes: Sequence[float], weights: Sequence[float], exponent: float) -> tuple[float, ...]:
    """The price of each job's progress.

    Args:
        sizes: what is left of each job, in any unit that is the same for all, such as seconds on one device.
        weights: how much each counts, more than 0.
        exponent: the p of the speed-up, in (0, 1).

    Returns:
        c_i of each job, in the order of the arguments; between 0 and 1.
    """
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    total, before = math.fsum(weights), 0.0
    prices = [0.0] * len(sizes)
    q = 1.0 / (1.0 - exponent)
    for i in order:
        reached = before + weights[i]
        # (W_i^q - W_{i-1}^q)^(1/q) = W_i (1 - (W_{i-1} / W_i)^q)^(1/q), which does not underflow
        prices[i] = reached / total * (-math.expm1(q * math.log(before / reached)) if before else 1.0) ** (1.0 / q)
        before = reached
    return tuple(prices)

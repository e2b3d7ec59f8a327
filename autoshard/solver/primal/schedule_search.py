"""Simulated annealing over what parts of a program do, by the time of its schedule: loops of `plans/part_search.py`.

A schedule has kernels one after another, and beside them transfers, one at a time (`cost/exposure.py`): those of a
window can run from one end on and are waited for at another. Between two ends kernels count together.
"""

import heapq

import numpy as np

from autoshard.solver.kernels import inner, kernel


@kernel()
def waited_s(
    amounts: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    by_start: np.ndarray,
    num_ends: int,
    share: float,
    limit_s: float,
) -> float:
    """What kernels wait in all; if that is more than `limit_s`, a part of it that is more.

    Args:
      amounts: float64 [num_ends + windows]; the kernels after each end, then what is sent in each window.
      starts, stops: int64 [windows]; their ends, ascending by stop. by_start: The windows by rising start.
      share: What transfers make use of, of a kernel's time.
    """
    waited, following = 0.0, 0
    left = amounts[num_ends:].copy()
    known = [0]  # a heap
    known.pop()
    for k in range(num_ends + 1):
        while following < len(by_start) and starts[by_start[following]] <= k:
            if left[by_start[following]] > 0:
                heapq.heappush(known, by_start[following])
            following += 1
        while len(known) > 0 and stops[known[0]] <= k:
            waited += left[heapq.heappop(known)]
        if waited > limit_s or k == num_ends:
            break
        room = share * amounts[k]
        while room > 0 and len(known) > 0:
            first = known[0]
            if left[first] > room:
                left[first] -= room
                break
            room -= left[first]
            heapq.heappop(known)
    return waited


@kernel()
def anneal(
    least_s: np.ndarray,
    entry: np.ndarray,
    place: np.ndarray,
    amount: np.ndarray,
    used: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    by_start: np.ndarray,
    num_ends: int,
    share: float,
    penalty: float,
    start: np.ndarray,
    parts: np.ndarray,
    options: np.ndarray,
    patience: np.ndarray,
) -> np.ndarray:
    """The option of each part in the best schedule that was found; int64 [parts].

    Args:
      least_s, entry, place, amount, used: As in `PartOptions`.
      starts, stops, by_start, num_ends, share: As for `waited_s`.
      penalty: What exceeding the budget costs: the share of it, in steps. start: Where the search begins.
      parts, options, patience: Moves: the part, its option, and by which share of the step it may be longer.
    """
    taken, num_instants, shared = start.copy(), used.shape[1], len(least_s) - 1
    amounts, used_now = np.zeros(num_ends + len(starts)), np.zeros(num_instants)
    total_s = 0.0
    for n in range(-1, len(taken)):
        option = shared if n < 0 else taken[n]
        total_s += least_s[option]
        for i in range(num_instants):
            used_now[i] += used[option, i]
        for e in range(entry[option], entry[option + 1]):
            amounts[place[e]] += amount[e]
    unit_s, excess = total_s, 0.0
    for i in range(num_instants):
        excess = max(excess, used_now[i] - 1.0)
    now_s = total_s + penalty * unit_s * excess
    now_s += waited_s(amounts, starts, stops, by_start, num_ends, share, np.inf)
    best, best_s = taken.copy(), now_s
    for n in range(len(parts)):
        old, new = taken[parts[n]], options[n]
        if new == old:
            continue
        limit_s, excess = now_s + patience[n] * unit_s, 0.0
        for i in range(num_instants):
            excess = max(excess, used_now[i] + used[new, i] - used[old, i] - 1.0)
        own_s = total_s + least_s[new] - least_s[old] + penalty * unit_s * excess
        if own_s > limit_s:
            continue
        _replace(amounts, entry, place, amount, old, new)
        own_s += waited_s(amounts, starts, stops, by_start, num_ends, share, limit_s - own_s)
        if own_s > limit_s:
            _replace(amounts, entry, place, amount, new, old)
            continue
        taken[parts[n]] = new
        for i in range(num_instants):
            used_now[i] += used[new, i] - used[old, i]
        total_s += least_s[new] - least_s[old]
        now_s = own_s
        if now_s < best_s:
            best_s = now_s
            for p in range(len(taken)):
                best[p] = taken[p]
    return best


@inner()
def _replace(amounts: np.ndarray, entry: np.ndarray, place: np.ndarray, amount: np.ndarray, old: int, new: int) -> None:
    """Lets a part take another option."""
    for e in range(entry[old], entry[old + 1]):
        amounts[place[e]] -= amount[e]
    for e in range(entry[new], entry[new + 1]):
        amounts[place[e]] += amount[e]

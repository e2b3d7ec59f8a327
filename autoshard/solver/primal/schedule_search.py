"""Simulated annealing over what parts of a program do, by the time of its schedule: loops of `plans/part_search.py`.

A schedule has kernels one after another, and beside them transfers, one at a time (`cost/exposure.py`): those of a
window can run from one end on and are waited for at another. Between two ends kernels count together.

A move changes a few places of a schedule with thousands. So the schedule is cut into intervals
(`schedule_intervals.py`), and known at each cut by the windows of which something is left there. From the first
interval that a move reaches it is run until what is left is what it was before; then the rest is as before too, until
the next place that the move reaches. What only the end of the schedule waits for goes last, so that nothing depends on
it: of a sum L of it an interval leaves max(L + drift, rest), whatever else it does (Lindley, The theory of queues with
a single server, 1952).
"""

import heapq

import numpy as np

from autoshard.solver.kernels import inner, kernel

_SAME = 1e-13
"""What is left may differ by so much, in seconds, from what it was."""


@kernel()
def anneal(
    least_s: np.ndarray,
    entry: np.ndarray,
    place: np.ndarray,
    amount: np.ndarray,
    used: np.ndarray,
    reach_entry: np.ndarray,
    reached: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    by_start: np.ndarray,
    come: np.ndarray,
    first: np.ndarray,
    num_ends: int,
    every: int,
    share: float,
    penalty: float,
    start: np.ndarray,
    parts: np.ndarray,
    options: np.ndarray,
    patience: np.ndarray,
) -> tuple[np.ndarray, float]:
    """The option of each part in the best schedule that was found; int64 [parts]. What it costs, with the penalty.

    Args:
      least_s, entry, place, amount, used: As in `PartOptions`.
      reach_entry, reached: int64 [options + 2], int64; the intervals that each option's entries reach, ascending.
      starts, stops: int64 [windows]; their ends, ascending by stop.
      by_start, come, first, every: As in `Intervals`. num_ends: How many ends there are.
      share: What transfers make use of, of a kernel's time.
      penalty: What exceeding the budget costs: the share of it, in steps. start: Where the search begins.
      parts, options, patience: Moves: the part, its option, and by which share of the step it may be longer.
    """
    taken, num_instants, shared, count = start.copy(), used.shape[1], len(least_s) - 1, len(come) - 1
    amounts, used_now = np.zeros(num_ends + len(starts)), np.zeros(num_instants)
    total_s = 0.0
    for n in range(-1, len(taken)):
        option = shared if n < 0 else taken[n]
        total_s += least_s[option]
        for i in range(num_instants):
            used_now[i] += used[option, i]
        for e in range(entry[option], entry[option + 1]):
            amounts[place[e]] += amount[e]
    # of the schedule as it is, then of a move: at each cut, how many windows have something left, from `first` on which
    # and how much; and what is waited for, drift and rest of intervals
    num_open = first[-1]
    number, number_moved = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    some_at, some_moved = np.zeros(num_open, np.int64), np.zeros(num_open, np.int64)
    left_at, left_moved = np.zeros(num_open), np.zeros(num_open)
    of, of_moved = np.zeros((count, 3)), np.zeros((count, 3))
    left, known, ran = np.zeros(len(starts)), [0], np.zeros(count, np.int64)
    known.pop()  # a heap
    for c in range(count):
        _run(amounts, starts, stops, by_start, come[c], num_ends, share, c * every, every, left, known, of[c])
        number[c + 1] = _keep(known, left, first[c + 1], some_at, left_at)
    _forget(known, left)
    # what is waited for before each interval, what the end waits for by then; drift and rest of all from it on
    waited, late, drift, rest = np.zeros(count + 1), np.zeros(count + 1), np.zeros(count + 1), np.zeros(count + 1)
    _sum(of, 0, count - 1, waited, late, drift, rest)
    unit_s, excess = total_s, 0.0
    for i in range(num_instants):
        excess = max(excess, used_now[i] - 1.0)
    now_s = total_s + penalty * unit_s * excess + waited[count] + late[count]
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
        at_old, at_new, c, runs, more_s, late_s = reach_entry[old], reach_entry[new], 0, 0, 0.0, 0.0
        is_same = True  # as before the move, up to the interval c
        while own_s + waited[c] + more_s <= limit_s:
            while at_old < reach_entry[old + 1] and reached[at_old] < c:
                at_old += 1
            while at_new < reach_entry[new + 1] and reached[at_new] < c:
                at_new += 1
            if is_same:
                following = count
                if at_old < reach_entry[old + 1]:
                    following = reached[at_old]
                if at_new < reach_entry[new + 1]:
                    following = min(following, reached[at_new])
                if following == count:
                    break
                if runs == 0:
                    late_s = late[following]
                else:
                    for k in range(c, following):
                        late_s = max(late_s + of[k, 1], of[k, 2])
                c = following
                for a in range(first[c], first[c] + number[c]):
                    left[some_at[a]] = left_at[a]
                    known.append(some_at[a])
            _run(amounts, starts, stops, by_start, come[c], num_ends, share, c * every, every, left, known, of_moved[c])
            ran[runs] = c
            runs += 1
            more_s += of_moved[c, 0] - of[c, 0]
            late_s = max(late_s + of_moved[c, 1], of_moved[c, 2])
            c += 1
            number_moved[c] = _keep(known, left, first[c], some_moved, left_moved)
            is_same = number_moved[c] == number[c]
            for a in range(first[c], first[c] + number[c]):
                is_same = is_same and abs(left[some_at[a]] - left_at[a]) <= _SAME
            if is_same:
                _forget(known, left)
            if c == count:
                break
        _forget(known, left)
        own_s += waited[count] + more_s + max(late_s + drift[c], rest[c]) if c == count or is_same else np.inf
        if own_s > limit_s:
            _replace(amounts, entry, place, amount, new, old)
            continue
        for r in range(runs):
            c = ran[r]
            of[c] = of_moved[c]
            number[c + 1] = number_moved[c + 1]
            for a in range(first[c + 1], first[c + 1] + number[c + 1]):
                some_at[a], left_at[a] = some_moved[a], left_moved[a]
        if runs > 0:
            _sum(of, ran[0], ran[runs - 1], waited, late, drift, rest)
        taken[parts[n]] = new
        for i in range(num_instants):
            used_now[i] += used[new, i] - used[old, i]
        total_s += least_s[new] - least_s[old]
        now_s = own_s
        if now_s < best_s:
            best_s = now_s
            for p in range(len(taken)):
                best[p] = taken[p]
    return best, float(best_s)


@inner()
def _keep(known: list[int], left: np.ndarray, begin: int, some: np.ndarray, amounts: np.ndarray) -> int:
    """Writes the windows of which something is left, and how much, from `begin` on; returns how many there are."""
    for n in range(len(known)):
        some[begin + n], amounts[begin + n] = known[n], left[known[n]]
    return len(known)


@inner()
def _forget(known: list[int], left: np.ndarray) -> None:
    """Leaves nothing of any window."""
    for n in range(len(known)):
        left[known[n]] = 0.0
    known.clear()


@inner()
def _run(
    amounts: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    by_start: np.ndarray,
    following: int,
    num_ends: int,
    share: float,
    begin: int,
    every: int,
    left: np.ndarray,
    known: list[int],
    result: np.ndarray,
) -> None:
    """Runs an interval.

    Args:
      amounts: float64 [num_ends + windows]; the kernels after each end, then what is sent in each window.
      following: How many windows, by rising start, have come before. begin: Its first end.
      left: Of each window; 0 of those that have not come. known: A heap of those of which something is left. Both are
        brought up to date.
      result: Takes what is waited for, drift and rest.
    """
    waited, drift, rest = 0.0, 0.0, 0.0
    for k in range(begin, min(begin + every, num_ends)):
        added = 0.0
        while following < len(by_start) and starts[by_start[following]] <= k:
            window = by_start[following]
            if stops[window] == num_ends:
                added += amounts[num_ends + window]
            else:
                left[window] = amounts[num_ends + window]
                if left[window] > 0:
                    heapq.heappush(known, window)
            following += 1
        while len(known) > 0 and stops[known[0]] <= k:
            window = heapq.heappop(known)
            waited += left[window]
            left[window] = 0.0
        room = share * amounts[k]
        while room > 0 and len(known) > 0:
            window = known[0]
            if left[window] > room:
                left[window] -= room
                room = 0.0
                break
            room -= left[window]
            left[window] = 0.0
            heapq.heappop(known)
        drift += added - room
        rest = max(rest + added - room, 0.0)
    result[0], result[1], result[2] = waited, drift, rest


@inner()
def _sum(
    of: np.ndarray,
    lowest: int,
    highest: int,
    waited: np.ndarray,
    late: np.ndarray,
    drift: np.ndarray,
    rest: np.ndarray,
) -> None:
    """Brings sums over intervals up to date, after those from `lowest` to `highest` have changed."""
    for c in range(lowest, len(of)):
        waited[c + 1] = waited[c] + of[c, 0]
        late[c + 1] = max(late[c] + of[c, 1], of[c, 2])
    for c in range(highest, -1, -1):
        drift[c] = of[c, 1] + drift[c + 1]
        rest[c] = max(of[c, 2] + drift[c + 1], rest[c + 1])


@inner()
def _replace(amounts: np.ndarray, entry: np.ndarray, place: np.ndarray, amount: np.ndarray, old: int, new: int) -> None:
    """Lets a part take another option."""
    for e in range(entry[old], entry[old + 1]):
        amounts[place[e]] -= amount[e]
    for e in range(entry[new], entry[new + 1]):
        amounts[place[e]] += amount[e]

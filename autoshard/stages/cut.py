"""The best cut of the layers over given places, with a bound on how good any cut could be.

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
are cut by the same program, with a weaker bound. Where there are few cuts, all are looked at, in the order of their
bounds, until no bound is below the best time: then the best is exact.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from autoshard.schedule.orders import make_schedule
from autoshard.schedule.tasks import ScheduleKind
from autoshard.stages.arrangement import Arrangement, Place, Stage
from autoshard.stages.durations import stage_durations
from autoshard.stages.memory import TOLERANCE, InFlight, fits, most_in_flight, run_peak_bytes
from autoshard.stages.runs import RunCosts
from autoshard.stages.team import Scene, Team, arrangement_step_s

MOST_REPLICAS = 4
"""Of more equal replicas the simulator sees the first and the last."""
GRID = 12
"""Bounds y that are tried between the least possible and the greatest that could pay."""
MOST_REMATS = 64
"""Where stages share places, ways to choose those computed again that are simulated; of more, one is."""
MOST_MOVED = 16
"""Neighbouring boundaries that are moved at once."""
CLOSE = 1e-9
"""Times nearer than this to each other, relatively, count as equal."""


@dataclasses.dataclass(frozen=True, slots=True)
class CutEffort:
    """How long to look.

    Attributes:
      most_enumerated: Look at all cuts if there are no more than this.
      most_simulated: Cuts to run through the simulator at most.
    """

    most_enumerated: int = 20_000
    most_simulated: int = 1_000


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """A team's best cut.

    Attributes:
      arrangement: The team alone. stages: What each of its pipelines runs.
      step_s: Its step time. bound_s: No cut of this team is faster.
    """

    arrangement: Arrangement
    stages: tuple[Stage, ...]
    step_s: float
    bound_s: float


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Position:
    """A stage's place in the pipeline, for every run of layers it could have.

    As every stage before and after has a layer, stage s begins with one of the layers s ... s + N, N = layers - stages.
    Entry [i, j] of every array, of N + 1 rows and columns, is for the layers s + i <= l < s + j + 1.

    Attributes:
      is_allowed: Possible, and within memory. needs_remat: Only if it is computed again.
      chain_s: What it adds to X. more_s: What it adds to X if it is the slowest. floor_s: The bound that holds for any.
      busy_s: Time of all tasks of one micro-batch. head_s: Forward and its transfer.
    """

    is_allowed: np.ndarray
    needs_remat: np.ndarray
    chain_s: np.ndarray
    more_s: np.ndarray
    floor_s: np.ndarray
    busy_s: np.ndarray
    head_s: np.ndarray


def bounded_cut(
    scene: Scene,
    team: Team,
    effort: CutEffort | None = None,
    suggestions: Sequence[Sequence[int]] = (),
    cutoff_s: float = math.inf,
) -> tuple[Cut | None, float]:
    """Cuts the layers over the places of a team.

    Args:
      scene: Costs, cluster, memory.
      team: The replicas and their places.
      effort: How long to look.
      suggestions: Other cuts to look at, as the first layer of each stage and the number of layers.
      cutoff_s: Only cuts that are faster are of interest.

    Returns:
      The best cut, None if no cut of interest fits the memory; and a bound for all cuts, inf if none fits.
    """
    effort = effort or CutEffort()
    num_layers, num_stages = scene.runs.layers.num_layers, team.num_stages
    if num_stages > num_layers:
        return None, math.inf
    num_cuts = math.comb(num_layers - 1, num_stages - 1)
    is_complete = num_cuts <= effort.most_enumerated
    positions = _positions(scene, team, shares_memory=False)
    if is_complete:
        inner = itertools.combinations(range(1, num_layers), num_stages - 1)
        cuts = np.array([(0, *c, num_layers) for c in inner], dtype=int).reshape(num_cuts, num_stages + 1)
        bound_s = -math.inf
    else:
        found, bound_s = _program(positions, team)
        if num_stages > len(team.places[0]):
            positions = _positions(scene, team, shares_memory=True)
            found, _ = _program(positions, team)
        cuts = np.array([*found, *suggestions], dtype=int).reshape(-1, num_stages + 1)
    bounds_s = _bounds(positions, team, cuts)
    order = [k for k in np.argsort(bounds_s, kind="stable") if np.isfinite(bounds_s[k])]
    best: Cut | None = None
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
        num_simulated += 1
        for stages in _with_remat(scene, team, positions, [int(c) for c in key]):
            arrangement = Arrangement(team.pipelines(stages))
            step_s = arrangement_step_s(scene, arrangement, MOST_REPLICAS)
            if best is None or step_s < best.step_s * (1 - CLOSE):
                best = Cut(arrangement, stages, step_s, 0.0)
    if is_complete:
        bound_s = rest_s
    if best is None:
        return None, bound_s
    bound_s = min(best.step_s, max(bound_s, 0.0))
    return dataclasses.replace(best, bound_s=bound_s), bound_s


def improved_cut(
    scene: Scene, team: Team, cut: Cut, suggestions: Sequence[Sequence[int]] = (), most_simulated: int = 40
) -> Cut:
    """A cut after its boundaries were moved by single layers, as long as the simulator says that this helps.

    Neighbouring boundaries also move together, so that a stage can give a layer to any other.

    Args:
      scene: Costs, cluster, memory.
      team: The replicas and their places.
      cut: Where to begin. suggestions: Other cuts to look at first, as for `bounded_cut`.
      most_simulated: Cuts to run through the simulator at most.
    """
    positions = _positions(scene, team, shares_memory=team.num_stages > len(team.places[0]))
    best, seen = cut, {_starts(cut)}

    def look(cuts: Iterable[tuple[int, ...]]) -> bool:
        """Whether one of some cuts is better; simulates those that could be, by their bounds, until one is."""
        nonlocal best
        new = np.array([c for c in cuts if c not in seen], dtype=int).reshape(-1, team.num_stages + 1)
        bounds_s = _bounds(positions, team, new)
        before_s = best.step_s
        for k in np.argsort(bounds_s, kind="stable"):
            if bounds_s[k] >= before_s * (1 - CLOSE) or len(seen) > most_simulated:
                break
            starts = tuple(new[k].tolist())
            seen.add(starts)
            for stages in _with_remat(scene, team, positions, starts):
                arrangement = Arrangement(team.pipelines(stages))
                step_s = arrangement_step_s(scene, arrangement, MOST_REPLICAS)
                if step_s < best.step_s * (1 - CLOSE):
                    best = dataclasses.replace(best, arrangement=arrangement, stages=stages, step_s=step_s)
            if best.step_s < before_s:
                return True
        return False

    for suggestion in suggestions:
        look([tuple(suggestion)])
    while look(_moved(_starts(best))):
        pass
    return best


def _starts(cut: Cut) -> tuple[int, ...]:
    """The first layer of each stage, and the number of layers."""
    return (*(s.start for s in cut.stages), cut.stages[-1].stop)


def _moved(starts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Cuts with some neighbouring boundaries moved by one layer, each stage keeping one at least."""
    num_stages = len(starts) - 1
    found = []
    for first in range(1, num_stages):
        for stop in range(first + 1, min(num_stages, first + MOST_MOVED) + 1):
            for by in (-1, 1):
                moved = (*starts[:first], *(x + by for x in starts[first:stop]), *starts[stop:])
                if moved[first - 1] < moved[first] and moved[stop - 1] < moved[stop]:
                    found.append(moved)
    return found


def _positions(scene: Scene, team: Team, *, shares_memory: bool) -> list[_Position]:
    return [_position(scene, team, s, shares_memory) for s in range(team.num_stages)]


def _position(scene: Scene, team: Team, stage: int, shares_memory: bool) -> _Position:
    places, kind = team.places[0], team.schedule
    place = places[stage % len(places)]
    width = scene.runs.layers.num_layers - team.num_stages + 1
    rows, columns = slice(stage, stage + width), slice(stage + 1, stage + 1 + width)
    costs = scene.runs.costs(place.option, team.micro_batch_size).window(rows, columns)
    most = team.num_micro_batches[0]
    is_split = kind is ScheduleKind.ZERO_BUBBLE
    is_plain, is_allowed = _memory(scene, team, stage, costs, place, shares_memory)
    needs_remat = ~is_plain
    forward_s = costs.forward_s
    backward_s = costs.backward_s + np.where(needs_remat, forward_s, 0.0)
    busy_s = forward_s + backward_s + costs.weight_s
    if not is_split:
        backward_s = backward_s + costs.weight_s
    there_s, back_s = (times_s[rows] for times_s in _boundary_s(scene, team, stage))
    chain_s = forward_s + backward_s + (there_s + back_s)[:, None]
    weights_s, gradients_s = _copies_s(scene, team, stage, costs)
    update_s = costs.update_s / team.num_pipelines
    around_s = weights_s + gradients_s + update_s
    reach = min(most, team.num_stages - stage)
    if kind is ScheduleKind.GPIPE:
        more_s = (most - 1) * busy_s
    elif kind is ScheduleKind.ONE_F_ONE_B:
        more_s = (most - reach) * busy_s + (reach - 1) * np.maximum(forward_s, backward_s)
    else:
        more_s = (most * (team.num_stages // len(places)) - 1) * busy_s
    return _Position(
        is_allowed=is_allowed,
        needs_remat=needs_remat,
        chain_s=chain_s + (around_s if stage == 0 else 0.0),
        more_s=more_s,
        floor_s=most * busy_s + around_s,
        busy_s=busy_s,
        head_s=forward_s + there_s[:, None],
    )


def _memory(
    scene: Scene, team: Team, stage: int, costs: RunCosts, place: Place, shares_memory: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Which runs fit as they are, and which fit at all."""
    per_place = team.num_stages // len(team.places[0])
    limit = scene.limits_bytes[place.slice] * (1 + TOLERANCE)
    most = team.num_micro_batches[0]
    if per_place == 1:
        in_flight = most_in_flight(team.schedule, stage, team.num_stages, most)
    elif shares_memory:  # no more than an equal share of the place: what does not fit so is not found
        in_flight, limit = (InFlight(_interleaved_in_flight(team, stage)),), limit / per_place
    else:
        in_flight = (InFlight(1),)
    plain, again = (
        run_peak_bytes(costs, in_flight, team.num_pipelines, rematerialise=r) <= limit for r in (False, True)
    )
    is_plain = plain if per_place == 1 or shares_memory else plain | again
    return is_plain & costs.is_possible, (plain | again) & costs.is_possible


def _interleaved_in_flight(team: Team, stage: int) -> int:
    """Micro-batches whose forward task on a stage comes before the first backward task of its place (`orders`)."""
    num_places = len(team.places[0])
    chunk, place = divmod(stage, num_places)
    chunks = team.num_stages // num_places
    rounds, rest = divmod(2 * (num_places - place - 1) + (chunks - 1) * num_places + 1, chunks * num_places)
    held = rounds * num_places + min(max(rest - chunk * num_places, 0), num_places)
    return min(max(held, 1), team.num_micro_batches[0])


def _boundary_s(scene: Scene, team: Team, stage: int) -> tuple[np.ndarray, np.ndarray]:
    """For each first layer of a stage, the time of what surely is sent from the stage before, and comes back."""
    places, sizes = team.places[0], scene.runs.boundary_bytes(team.micro_batch_size)
    here, before = places[stage % len(places)], places[(stage - 1) % len(places)]
    if stage == 0 or here == before:
        return np.zeros(sizes.shape[1]), np.zeros(sizes.shape[1])
    speed, ground = scene.ground.speed(before, here), scene.ground
    num_senders = min(ground.num_devices(before), ground.num_devices(here))
    times_s = np.where(sizes > 0, speed.latency_s + sizes / (num_senders * speed.bandwidth_bytes_per_s), 0.0)
    return times_s[0], times_s[1]


def _copies_s(scene: Scene, team: Team, stage: int, costs: RunCosts) -> tuple[np.ndarray, np.ndarray]:
    """Times of copies of weights and of gradients between the replicas of the team; see `durations`."""
    num, ground = team.num_pipelines, scene.ground
    if num == 1:
        return np.zeros_like(costs.kept_bytes), np.zeros_like(costs.kept_bytes)
    index = stage % len(team.places[0])
    here = team.places[0][index]
    latency_s = seconds_per_byte = 0.0
    for other in team.places[1:]:
        speed = ground.speed(here, other[index])
        latency_s += speed.latency_s
        seconds_per_byte += 1 / (num * ground.num_devices(here) * speed.bandwidth_bytes_per_s)
    device = ground.table.options[here.option].mesh.device_type
    added_s = 3 * (num - 1) / num * costs.gradient_bytes / device.memory_bandwidth_bytes_per_s
    has_weights = costs.sent_weight_bytes > 0
    weights_s = has_weights * latency_s + costs.sent_weight_bytes * seconds_per_byte
    gradients_s = has_weights * latency_s + costs.sent_gradient_bytes * seconds_per_byte
    return weights_s, gradients_s + added_s


def _program(positions: list[_Position], team: Team) -> tuple[list[tuple[int, ...]], float]:
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
    is_additive = team.schedule in (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)
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


def _bounds(positions: list[_Position], team: Team, cuts: np.ndarray) -> np.ndarray:
    """The bound of each cut; inf if it does not fit."""
    if not len(cuts):
        return np.zeros(0)

    def of(name: str) -> np.ndarray:
        found = [getattr(p, name)[cuts[:, s] - s, cuts[:, s + 1] - s - 1] for s, p in enumerate(positions)]
        return np.stack(found, axis=1)

    chain_s, busy_s = of("chain_s"), of("busy_s")
    bounds_s = np.maximum(chain_s.sum(axis=1), of("floor_s").max(axis=1))
    num_places = len(team.places[0])
    if team.schedule in (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B):
        bounds_s = np.maximum(bounds_s, chain_s.sum(axis=1) + of("more_s").max(axis=1))
    else:  # before its first task a place waits for those of the places before it, and then is busy
        on_place = sum(busy_s[:, c : c + num_places] for c in range(0, team.num_stages, num_places))
        heads = of("head_s")[:, :num_places]
        before = np.cumsum(heads, axis=1) - heads
        bounds_s = np.maximum(bounds_s, (before + team.num_micro_batches[0] * on_place).max(axis=1))
    return np.where(of("is_allowed").all(axis=1), bounds_s, np.inf)


def _with_remat(scene: Scene, team: Team, positions: list[_Position], cut: Sequence[int]) -> list[tuple[Stage, ...]]:
    """The stages of a cut, those computed again that must be: all ways to choose them where stages share places."""
    runs = list(itertools.pairwise(cut))
    num_places = len(team.places[0])
    if team.num_stages == num_places:
        again = [
            bool(p.needs_remat[i - s, j - s - 1]) for s, ((i, j), p) in enumerate(zip(runs, positions, strict=True))
        ]
        return [tuple(Stage(*r, a) for r, a in zip(runs, again, strict=True))]
    limits = tuple(scene.limits_bytes[place.slice] for place in team.places[0])
    schedule = make_schedule(team.schedule, num_places, team.num_stages, team.num_micro_batches[0])
    chosen: list[list[tuple[bool, ...]]] = [[] for _ in range(num_places)]
    for option in sorted(itertools.product((False, True), repeat=team.num_stages // num_places), key=sum):
        stages = tuple(Stage(*r, option[s // num_places]) for s, r in enumerate(runs))
        pipeline = team.pipelines(stages)[0]
        parts = tuple(stage_durations(scene.runs, pipeline, s, team.num_pipelines) for s in range(team.num_stages))
        for place, fit in enumerate(fits(schedule, parts, limits)):
            if fit and not any(all(o >= k for o, k in zip(option, kept, strict=True)) for kept in chosen[place]):
                chosen[place].append(option)
    if math.prod(len(c) for c in chosen) > MOST_REMATS:
        chosen = [c[:1] for c in chosen]
    return [
        tuple(Stage(*r, ways[s % num_places][s // num_places]) for s, r in enumerate(runs))
        for ways in itertools.product(*chosen)
    ]

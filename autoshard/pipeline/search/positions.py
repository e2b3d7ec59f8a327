"""The stages of a pipeline, each for every run of layers that it could have: times, bounds, and memory.

The bounds are those of `cut_bounds`.
"""

import dataclasses

import numpy as np

from autoshard.pipeline.cost.runs import RunCosts
from autoshard.pipeline.schedule.tasks import ScheduleKind
from autoshard.pipeline.search.arrangement import Place
from autoshard.pipeline.search.stage_memory import TOLERANCE, InFlight, most_in_flight, run_peak_bytes
from autoshard.pipeline.search.team import Scene, Team


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Position:
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


def positions_of(scene: Scene, team: Team, *, shares_memory: bool) -> list[Position]:
    """The positions of all stages; `shares_memory`: stages of one place have equal shares of its memory."""
    return [_position(scene, team, s, shares_memory) for s in range(team.num_stages)]


def _position(scene: Scene, team: Team, stage: int, shares_memory: bool) -> Position:
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
    return Position(
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

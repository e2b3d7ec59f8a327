"""What a plan would make of slow devices: the step under each mode, predicted by the plan's own cost model.

A step is taken as runs of local work, each ended by a sum over the tensor axis at which all devices meet. Of a run, the
work on units follows the shares; the rest does not. The slowest device ends each run; collectives take what they take.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.balance.batch_shares import moved_parts
from autoshard.balance.options import Balance, Mode
from autoshard.balance.places import even_placing
from autoshard.balance.policy import Disturbance, Policy, act, along_axis
from autoshard.errors import ConfigError
from autoshard.graph.graph import Graph
from autoshard.plans.balanced import nothing_moves, rooms_for, units_of
from autoshard.plans.movable_work import busiest_axis, island_seconds, parts_of
from autoshard.plans.program_plan import ProgramPlan
from autoshard.printing import TextConsole, amount, seconds, table
from autoshard.uneven_step import UnevenStep

_LASTING = 10**9
"""Steps that a slowdown is taken to last, so that no move is too dear."""


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
    """The step under one mode.

    Attributes:
      mode: The mode. step_s: The predicted step.
      moved, dropped: Units that move, and that are left out, of `of` units. moved_bytes: What moves, once.
    """

    mode: Mode
    step_s: float
    moved: int
    dropped: int
    of: int
    moved_bytes: float


@dataclasses.dataclass(frozen=True, slots=True)
class Forecasts:
    """What slow devices make of a plan.

    Attributes:
      slow: How many times slower devices are, by number. axis: The mesh axis along which units move.
      healthy_s: The step without slow devices. ideal_s: The step if all that can move were divided at will.
      movable: The share of a device's work that can move.
      modes: The step under each mode.
    """

    slow: tuple[tuple[int, float], ...]
    axis: str
    healthy_s: float
    ideal_s: float
    movable: float
    modes: tuple[Forecast, ...]

    def __str__(self) -> str:
        console = TextConsole()
        told = " and ".join(f"device {d} {w:g} times slower" for d, w in self.slow)
        console.print(
            f"With {told}: {self.movable:.0%} of the computation can move along `{self.axis}`. Without a slow device a "
            f"step takes {seconds(self.healthy_s)}; if what can move were divided at will, {seconds(self.ideal_s)}."
        )
        columns = [("mode", "left"), ("step", "right"), ("longer", "right"), ("gain", "right")]
        rows = table("", [*columns, ("moved", "right"), ("once", "right"), ("left out", "right")])
        off_s = self.modes[0].step_s
        for f in self.modes:
            longer, gain = f"{f.step_s / self.healthy_s - 1:+.1%}", f"{off_s / f.step_s:.2f}x"
            moved = (f"{f.moved / f.of:.1%}", amount(f.moved_bytes)) if f.moved else ("-", "-")
            left = f"{f.dropped / f.of:.1%}" if f.dropped else "-"
            rows.add_row(f.mode, seconds(f.step_s), longer, gain, *moved, left)
        console.print(rows)
        return console.text


def forecasts(
    plan: ProgramPlan, graph: Graph, slow: Mapping[int, float], balance: Balance, platform: str = "cpu"
) -> Forecasts:
    """The step of a plan with slow devices, under each mode.

    Args:
      plan: The plan. graph: Its program. slow: How many times slower devices are, by their number in the mesh.
      balance: The options other than the mode, of which each is tried. platform: JAX's name of the kind of devices.

    Raises:
      ConfigError: A device is not there, or is not slower; or nothing in the plan can move, with the reason.
    """
    each = _slowness(plan, slow)
    dims = units_of(plan, graph)
    if not dims.found:
        raise ConfigError(nothing_moves(dims.refused, dict(plan.axes)))
    own_s = island_seconds(plan, graph, dims)
    axis, movable_s = busiest_axis(dims.found, own_s)
    slowness = along_axis(each, plan.axes, axis)
    compute_s, comm_s = plan.estimate.compute_s, plan.estimate.exposed_s
    found: list[Forecast] = []
    ideal_s = 0.0
    for mode in ("off", "resize", "migrate", "semi"):
        own = dataclasses.replace(balance, mode=mode)
        rooms = [r for r in rooms_for(dims, own, platform) if r.unit.axis == axis]
        on_units_s = [own_s[room.unit.index] for room in rooms]
        placed = [(room, even_placing(room)) for room in rooms]
        parts = parts_of(placed, on_units_s, compute_s - movable_s, math.inf)
        action = act(Policy(own), Disturbance(slowness, _LASTING), parts)
        moved_bytes = sum(d.moved * r.unit.bytes for d, r in zip(action.decisions, rooms, strict=True))
        found.append(Forecast(mode, action.after_s + comm_s, action.moved, action.dropped, action.of, moved_bytes))
        ideal_s = action.ideal_s + comm_s
    return Forecasts(tuple(slow.items()), axis, compute_s + comm_s, ideal_s, movable_s / compute_s, tuple(found))


def batch_forecasts(plan: ProgramPlan, graph: Graph, step: UnevenStep, slow: Mapping[int, float]) -> Forecasts:
    """The step of a plan whose replicas share a batch out, with slow devices: at even shares, and at those that suit.

    Args:
      plan: The plan. graph: Its program. step: What was planned.
      slow: How many times slower devices are, by their number in the mesh.

    Raises:
      ConfigError: A device is not there, or is not slower.
    """
    slowness = np.array(_slowness(plan, slow))
    regions = {o.equation for o in graph.operations if o.region is not None}
    compute_s, comm_s = plan.estimate.compute_s, plan.estimate.exposed_s
    on_parts_s = sum(c.compute_s for c in plan.estimate.compute if c.equation in regions)
    part_s, fixed_s = on_parts_s / step.mean_parts, compute_s - on_parts_s
    ends_s = lambda counts: float((slowness * (fixed_s + part_s * counts)).max())
    even, suited = step.even, step.shares(slowness.tolist())
    moved = moved_parts(even.tolist(), suited.tolist())
    modes = (
        Forecast("off", ends_s(even) + comm_s, 0, 0, step.num_parts, 0.0),
        Forecast("migrate", ends_s(suited) + comm_s, moved, 0, step.num_parts, 0.0),
    )
    at_will_s = (step.num_parts * part_s + step.replicas * fixed_s) / float((1 / slowness).sum())
    ideal_s = max(at_will_s, float(slowness.max()) * fixed_s) + comm_s
    return Forecasts(tuple(slow.items()), step.axis, compute_s + comm_s, ideal_s, on_parts_s / compute_s, modes)


def _slowness(plan: ProgramPlan, slow: Mapping[int, float]) -> list[float]:
    """How many times slower each device of a plan is.

    Raises:
      ConfigError: A device is not there, or is not slower.
    """
    for device, slowdown in slow.items():
        if not 0 <= device < plan.num_devices or slowdown < 1:
            raise ConfigError(
                f"Slow devices are numbers from 0 to {plan.num_devices - 1} with a slowdown of at least 1; received "
                f"{device}:{slowdown:g}. Write, for example, 0:2.0."
            )
    return [slow.get(d, 1.0) for d in range(plan.num_devices)]


def parse_slow(texts: Sequence[str]) -> dict[int, float]:
    """`["3:2.0", "0:8,1:6"]` as a mapping.

    Raises:
      ConfigError: It is not written so.
    """
    found: dict[int, float] = {}
    for item in ",".join(texts).split(","):
        device, _, slowdown = item.partition(":")
        try:
            found[int(device)] = float(slowdown)
        except ValueError:
            raise ConfigError(
                f"--slow: slow devices are written DEVICE:SLOWDOWN, separated by commas; received {item!r}. Try: 3:2.0."
            ) from None
    return found

"""The shares of a balanced step: `run.balance` shows and sets them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.balance.options import Balance
from autoshard.balance.places import Placing, Room, counts_of, even_placing, moved
from autoshard.balance.units import Refusal
from autoshard.errors import ConfigError
from autoshard.plans.balanced import BalancedFunction


class Shares:
    """What each device along a mesh axis (a *rank*) has and computes. `print` shows it; `set` changes it.

    A change counts from the next step on, which first moves the state. Nothing is compiled.
    """

    def __init__(self, function: Callable[[], BalancedFunction]):
        """`function` gives the step, once it is known."""
        self._function = function

    @property
    def options(self) -> Balance:
        """What was asked for."""
        return self._function().balance

    @property
    def rooms(self) -> tuple[Room, ...]:
        """What can move, each with its places."""
        return self._function().rooms

    @property
    def placings(self) -> tuple[Placing, ...]:
        """For each of `rooms`, where its units are."""
        return self._function().placings

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """Parameters that stay as the plan has them, and why."""
        return self._function().refused

    @property
    def axes(self) -> dict[str, int]:
        """The mesh axes along which units move, and the ranks along each."""
        return {room.unit.axis: room.unit.ways for room in self.rooms}

    def shares(self, axis: str | None = None) -> tuple[float, ...]:
        """Of all that can move along a mesh axis, the share that each rank computes, by floating-point operations."""
        axis = self._axis(axis)
        own = [(r.unit, p) for r, p in zip(self.rooms, self.placings, strict=True) if r.unit.axis == axis]
        total = sum(unit.flops for unit, _ in own)
        return tuple(
            sum(unit.flops * placing.active[rank] / unit.size for unit, placing in own) / total
            for rank in range(self.axes[axis])
        )

    def set(self, shares: Sequence[float], kept: Sequence[float] | None = None, axis: str | None = None) -> None:
        """Gives ranks shares of all units.

        Args:
          shares: For each rank, in proportion; a rank gets no more than it has places for.
          kept: For each rank, the part of its units that it computes in training, from 0 to 1, where some may be left
            out; None for all of them.
          axis: The mesh axis; None where there is only one.

        Raises:
          ConfigError: There is no such axis, or there are more or fewer ranks; or the mode forbids it.
        """
        axis, ways = self._axis(axis), self.axes[self._axis(axis)]
        for name, given in (("shares", shares), ("kept", kept)):
            if given is not None and (len(given) != ways or min(given) < 0):
                raise ConfigError(
                    f"run.balance.set: {name} has a number for each of the {ways} ranks of axis `{axis}`, none "
                    f"negative; received {list(given)}. Pass {ways} numbers."
                )
        placings = []
        for room, placing in zip(self.rooms, self.placings, strict=True):
            if room.unit.axis == axis:
                placing = moved(placing, counts_of(shares, room))
                if kept is not None and not room.computes_all:
                    active = (round(k * n) for k, n in zip(kept, placing.counts, strict=True))
                    placing = Placing(placing.units, tuple(active))
            placings.append(placing)
        self.place(placings)

    def place(self, placings: Sequence[Placing]) -> None:
        """From the next step on, units are where `placings` say, one for each of `rooms`.

        Raises:
          ConfigError: The mode forbids it.
        """
        options = self.options
        if not options.moves and any(set(p.counts) != {r.unit.size // r.unit.ways} for p, r in self._pairs(placings)):
            raise ConfigError(
                f"Units do not move in mode `{options.mode}`, so that every rank keeps an even share; received counts "
                f"{[p.counts for p in placings]}. Choose the mode `migrate` or `semi`, or leave units out instead."
            )
        if not options.most_left_out and any(p.dropped for p in placings):
            raise ConfigError(
                f"No unit may be left out in mode `{options.mode}` with max_loss_share={options.max_loss_share}, as "
                f"results would change; received {sum(p.dropped for p in placings)} that nobody computes. Choose the "
                "mode `resize` or `semi`, or set max_loss_share."
            )
        for placing, room in self._pairs(placings):
            if placing.dropped and room.computes_all:
                raise ConfigError(
                    f"No unit of `{room.unit.name}` may be left out: {room.computes_all}, for which a zero would be no "
                    "substitute. Leave units of other parts out, or move them."
                )
        self._function().place(placings)

    def even(self) -> None:
        """Gives all ranks the same share: the step runs as planned from the next one on."""
        self.place([even_placing(room) for room in self.rooms])

    def slow(self, times: Mapping[int, float], axis: str | None = None) -> None:
        """Makes ranks slower from the next step on, by real work, for tests and demonstrations.

        Args:
          times: For a rank, how many times what it computes is computed; 1 for ranks that are not named.
          axis: The mesh axis; None where there is only one.

        Raises:
          ConfigError: It was not asked for with `Balance(can_be_slowed=True)`.
        """
        function, axis = self._function(), self._axis(axis)
        if not self.options.can_be_slowed:
            raise ConfigError(
                "Ranks can be slowed down only if the step is compiled for it. Pass Balance(can_be_slowed=True)."
            )
        repeats = []
        for room, before in zip(self.rooms, function.repeats, strict=True):
            own = tuple(max(0, round(times.get(rank, 1.0)) - 1) for rank in range(room.unit.ways))
            repeats.append(own if room.unit.axis == axis else before)
        function.place(function.placings, repeats)

    def by_units(self, state: Any, argument: int = 0) -> Any:
        """A state that the step returned, as the planned function knows it: for evaluation and checkpoints.

        Args:
          state: The positional argument. argument: Which.
        """
        return self._function().by_units(state, argument)

    def _pairs(self, placings: Sequence[Placing]) -> list[tuple[Placing, Room]]:
        return list(zip(placings, self.rooms, strict=True))

    def _axis(self, axis: str | None) -> str:
        axes = self.axes
        if axis is None and len(axes) == 1:
            return next(iter(axes))
        if axis not in axes:
            raise ConfigError(f"Units move along {', '.join(f'`{a}`' for a in axes)}; received axis={axis!r}.")
        return axis

    def __str__(self) -> str:
        lines = []
        for axis, ways in self.axes.items():
            shares = " ".join(f"{s:6.1%}" for s in self.shares(axis))
            lines.append(f"axis `{axis}`, {ways} ranks: they compute {shares} of what can move")
            for placing, room in self._pairs(self.placings):
                if room.unit.axis == axis:
                    each = " ".join(
                        f"{a}" if a == n else f"{a}/{n}" for a, n in zip(placing.active, placing.counts, strict=True)
                    )
                    lines.append(f"  {room.unit.name}: {room.unit.size} units as {each}; at most {room.capacity}")
        return "\n".join(lines)

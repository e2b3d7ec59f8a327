"""What a plan can even out when one device is slow, as a plan keeps it."""

import dataclasses

from autoshard.printing import amount


@dataclasses.dataclass(frozen=True, slots=True)
class Slack:
    """How much of the work of a slow device others can take; `autoshard/plans/adaptivity.py` has the mathematics.

    Attributes:
      axis: The mesh axis along which units move. ranks: Devices along it.
      compute_s: Seconds that a device computes in a step. movable_s: Those on units that can move.
      exposed_s: Seconds of collectives that are waited for.
      free: The share of an even share that each device has free places for.
      places_bytes: What these take of a device's memory, at the peak and while shares are uneven.
    """

    axis: str
    ranks: int
    compute_s: float
    movable_s: float
    exposed_s: float
    free: float
    places_bytes: float

    def step_s(self, slowdown: float) -> float:
        """The step if one device is `slowdown` times slower, and gives away what makes all end together."""
        given = (slowdown - 1) * self.compute_s / (self.movable_s * (1 + slowdown * (self.ranks - 1)))
        taken = min(given, self.free, 1 / (self.ranks - 1))
        slow_s = slowdown * (self.compute_s - (self.ranks - 1) * taken * self.movable_s)
        return max(slow_s, self.compute_s + taken * self.movable_s) + self.exposed_s

    @property
    def absorbed(self) -> float:
        """The slowdown of one device from which on the places, or what can move, do not suffice to end together."""
        taken = min(self.free, 1 / (self.ranks - 1))
        left_s = self.compute_s - (self.ranks - 1) * taken * self.movable_s
        return float("inf") if left_s <= 0 else (self.compute_s + taken * self.movable_s) / left_s

    def __str__(self) -> str:
        now = self.compute_s + self.exposed_s
        told = [
            f"{s:g} times slower makes the step {self.step_s(s) / now:.2f} times as long, not "
            f"{(s * self.compute_s + self.exposed_s) / now:.2f}"
            for s in (1.5, 2.0, 4.0)
        ]
        movable = f"{self.movable_s / self.compute_s:.0%}"
        return (
            f"{movable} of the computation can move along `{self.axis}` ({self.ranks} ranks), which evens out one "
            f"device up to {self.absorbed:.3g} times slower; one that is {'; '.join(told)}; "
            f"{amount(self.places_bytes)} per device for that"
        )

"""What a caller may ask of a step whose devices have shares."""

import dataclasses
from typing import Literal, get_args

from autoshard.balance.selection import Priority
from autoshard.errors import ConfigError

Mode = Literal["off", "resize", "migrate", "semi", "auto"]
"""Nothing changes; a slow device leaves units out; units move; both; what is best, lossless unless told."""
Sizes = Literal["loop", "switch"]
"""A device computes as many units as it has in a loop over chunks of them, or by one of several compiled programs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Balance:
    """How the devices of a planned step may get unequal shares of its work: `plan.jit(step, balance=Balance(...))`.

    Attributes:
      mode: What may be done about a slow device. "migrate": units (hidden units, attention heads, experts) move to
        others, and results stay what they are. "resize": it leaves some of its own out, which changes results. "semi":
        both. "auto": as "semi", as far as `max_loss_share` allows. "off": nothing; the step is the planned one.
      absorbs: The slowdown of one device that moving units evens out. Each device has places for so many units more,
        which take memory while shares are unequal; all of this where nothing moves, as in "resize", is left away.
      sizes: How a device computes as many units as it has. "loop": a chunk of them at a time, which needs little
        memory for what is made in between and is compiled once. "switch": all at once, by one of several compiled
        programs, which suits GPUs, where each round of a loop whose length is data waits for the host (XLA:GPU,
        while_thunk.cc). None: a loop on CPUs, and a switch elsewhere.
      most_buckets: Roughly how many amounts of work a device can be given by "switch", each of which is compiled. By
        "loop" an even share has up to twice as many chunks.
      tile: Units that the hardware computes together: amounts are multiples of it where there are many units. None: 128
        on GPUs and TPUs, 8 on CPUs.
      max_loss_share: The most units that a device may leave out, as a share of an even share (the gamma of Wang et al.
        2024, arXiv:2401.11469). None: half in the modes "resize" and "semi", nothing in "auto".
      unbiased: Whether what is left of a device's units counts for those left out: sums over its units are multiplied
        by 1 / (1 - gamma), where gamma is the share that it leaves out.
      priority: What stays when units are left out: "random"; "change", those whose weights changed most lately;
        "gradient", those with the largest gradients lately.
      can_be_slowed: Whether devices can be slowed down (`run.balance.slow`), for tests and demonstrations.

    Raises:
      ConfigError: A value is not among those above.
    """

    mode: Mode = "auto"
    absorbs: float = 4.0
    sizes: Sizes | None = None
    most_buckets: int = 8
    tile: int | None = None
    max_loss_share: float | None = None
    unbiased: bool = False
    priority: Priority = "random"
    can_be_slowed: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("mode", get_args(Mode)),
            ("priority", get_args(Priority)),
            ("sizes", (None, *get_args(Sizes))),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"Balance: {name} is one of {', '.join(map(str, allowed))}; received {getattr(self, name)!r}."
                )
        for name, is_right, rule in (
            ("absorbs", self.absorbs >= 1, "a slowdown, at least 1"),
            ("most_buckets", self.most_buckets >= 2, "at least 2"),
            ("tile", self.tile is None or self.tile >= 1, "at least 1, or None"),
            ("max_loss_share", 0 <= (self.max_loss_share or 0.0) <= 1, "a share from 0 to 1, or None"),
        ):
            if not is_right:
                raise ConfigError(f"Balance: {name} is {rule}; received {getattr(self, name)!r}.")

    @property
    def moves(self) -> bool:
        """Whether units may move."""
        return self.mode in ("migrate", "semi", "auto")

    @property
    def most_left_out(self) -> float:
        """The share of an even share that a device may leave out."""
        if self.mode in ("off", "migrate"):
            return 0.0
        if self.max_loss_share is None:
            return 0.0 if self.mode == "auto" else 0.5
        return self.max_loss_share

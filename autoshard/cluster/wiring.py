"""Parts of a hardware level: what joins those peers of it that lie at equal distances.

A level of `n` peers can be shared out among several mesh axes: one axis takes neighbours (stride 1), the next one every
k-th peer, and so on. Behind a switch all parts are alike. Along an axis of a torus they are not: peers `stride` apart
send through the wires between them, which they share with `stride` - 1 other groups, and only a part that goes all the
way round has two ways to go. With `w` the rate of a ring along the whole closed axis, which uses two wires of a chip:

    whole way round, stride s    w / s
    anything else, stride s      w / (2 s)        one wire each way

(Jouppi et al., TPU v4: An Optically Reconfigurable Supercomputer for Machine Learning, 2023, for the wires of a chip.)
"""

import dataclasses

from autoshard.cluster.checks import require_whole
from autoshard.cluster.device import Link, Wires
from autoshard.cluster.mesh import AxisLevel
from autoshard.errors import ClusterError


@dataclasses.dataclass(frozen=True, slots=True)
class Torus:
    """A grid of chips that are wired to their neighbours.

    Attributes:
      shape: Chips along each axis of the grid, major to minor: chip (x, y, z) has the number (x * Y + y) * Z + z.
      wraps: For each axis, whether its last chip is a neighbour of its first one. Two chips have one wire anyway.
    """

    shape: tuple[int, ...]
    wraps: tuple[bool, ...]

    def __post_init__(self) -> None:
        sizes = tuple(require_whole("torus", "a size of shape", size) for size in self.shape)
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "wraps", tuple(self.wraps))
        if not sizes or len(sizes) != len(self.wraps):
            raise ClusterError(
                f"a torus must have a size and a `wraps` for each axis; received {self.shape} and {self.wraps}."
            )

    def levels(self, link: Link) -> tuple[AxisLevel, ...]:
        """The axes as hardware levels, innermost first; `link`: a ring along an axis that closes."""
        axes = [
            (size, Wires.CLOSED if wraps and size > 2 else Wires.OPEN)
            for size, wraps in zip(self.shape, self.wraps, strict=True)
        ]
        return tuple(AxisLevel(size, _wired(link, wires)) for size, wires in reversed(axes) if size > 1)


def _wired(link: Link, wires: Wires) -> Link:
    """A ring along a whole axis of a torus; figures of collectives that were measured over all of it do not hold."""
    halved = link.bandwidth_bytes_per_s / (2 if wires is Wires.OPEN else 1)
    return dataclasses.replace(link, bandwidth_bytes_per_s=halved, wires=wires, collectives=())


def part_of_level(level: AxisLevel, stride: int, size: int) -> AxisLevel:
    """`size` peers of a level that lie `stride` apart, while all other such parts of it are as busy.

    `stride` x `size` divides the size of the level.
    """
    link = level.link
    if link.wires is Wires.SWITCHED or size == level.size:
        return AxisLevel(size, link)
    goes_round = link.wires is Wires.CLOSED and size * stride == level.size and size > 2
    slower = stride * (2 if link.wires is Wires.CLOSED and not goes_round else 1)
    return AxisLevel(
        size,
        dataclasses.replace(
            link,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / slower,
            wires=Wires.CLOSED if goes_round else Wires.OPEN,
        ),
    )

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
from collections.abc import Sequence

from autoshard.cluster.checks import require_whole
from autoshard.cluster.device import Link, Wires
from autoshard.cluster.mesh import AxisLevel, TorusPart
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
        return tuple(
            _whole_axis(number, *axes[number], link) for number in reversed(range(len(axes))) if axes[number][0] > 1
        )


def _whole_axis(number: int, size: int, wires: Wires, link: Link) -> AxisLevel:
    ring = _wired(link, wires)
    return AxisLevel(size, ring, TorusPart(number, size, 1, ring))


def _wired(link: Link, wires: Wires) -> Link:
    """A ring along a whole axis of a torus; figures of collectives that were measured over all of it do not hold."""
    halved = link.bandwidth_bytes_per_s / (2 if wires is Wires.OPEN else 1)
    return dataclasses.replace(link, bandwidth_bytes_per_s=halved, wires=wires, collectives=())


def part_of_level(level: AxisLevel, stride: int, size: int) -> AxisLevel:
    """`size` peers of a level that lie `stride` apart, while all other such parts of it are as busy.

    `stride` x `size` divides the size of the level.
    """
    if level.torus is None or (stride == 1 and size == level.size):
        return AxisLevel(size, level.link, level.torus)
    whole, ring = level.torus, level.torus.ring
    stride *= whole.stride
    if stride == 1 and size == whole.axis_size:
        return AxisLevel(size, ring, dataclasses.replace(whole, stride=1))
    goes_round = ring.wires is Wires.CLOSED and size * stride == whole.axis_size and size > 2
    slower = stride * (2 if ring.wires is Wires.CLOSED and not goes_round else 1)
    link = dataclasses.replace(
        ring,
        bandwidth_bytes_per_s=ring.bandwidth_bytes_per_s / slower,
        wires=Wires.CLOSED if goes_round else Wires.OPEN,
    )
    return AxisLevel(size, link, dataclasses.replace(whole, stride=stride))


def joined_parts(levels: Sequence[AxisLevel]) -> list[AxisLevel]:
    """Levels of which parts of one axis of a torus are one where the next one goes on from where the last one stops:
    together they have the wires that the whole of them has.
    """
    joined = [level for level in levels if level.torus is None]
    parts = [(level.torus, level) for level in levels if level.torus is not None]
    parts.sort(key=lambda part: (part[0].axis, part[0].stride))
    last: TorusPart | None = None
    for part, level in parts:
        if last is not None and last.axis == part.axis and joined[-1].size * last.stride == part.stride:
            whole = AxisLevel(part.axis_size, part.ring, dataclasses.replace(part, stride=1))
            joined[-1] = part_of_level(whole, last.stride, joined[-1].size * level.size)
        else:
            joined.append(level)
            last = part
    return joined

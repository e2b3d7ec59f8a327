"""Round units for axes: all of a figure in one unit that keeps its numbers short."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A unit and its size in seconds or bytes."""

    name: str
    size: float


def time_unit(most_s: float) -> Unit:
    """Of an axis that ends at `most_s` seconds."""
    for name, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if most_s >= 2 * size:
            return Unit(name, size)
    return Unit("ns", 1e-9)


def byte_unit(most_bytes: float) -> Unit:
    """Of an axis that ends at `most_bytes` bytes."""
    for name, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if most_bytes >= 2 * size:
            return Unit(name, size)
    return Unit("B", 1.0)

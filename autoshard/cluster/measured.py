"""What calibration measured of a device type and of a link, in the form in which the cost model uses it.

Nothing here measures; `autoshard.calibrate` does. Where a figure was not measured, the vendor's serves.
"""

import dataclasses
import datetime
import enum
import math
from collections.abc import Iterable

from autoshard.cluster.checks import require_number, require_text, require_whole
from autoshard.errors import ClusterError


class CollectiveKind(enum.Enum):
    """The collectives that autoshard predicts, by their XLA names."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    PERMUTE = "collective-permute"


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """A figure that depends on a size: measured points, and between them a straight line in log-log coordinates.

    Below the first point and above the last the figure is theirs.

    Attributes:
      points: (size, figure) pairs with rising sizes, all above zero.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        points = tuple(
            (require_number("curve", "size", size), require_number("curve", "figure", figure))
            for size, figure in self.points
        )
        sizes = [size for size, _ in points]
        if not points or any(a >= b for a, b in zip(sizes, sizes[1:], strict=False)):
            raise ClusterError(
                f"a measured curve must have at least one point, and its sizes must rise; received {self.points!r:.99}."
            )
        object.__setattr__(self, "points", points)

    def at(self, size: float) -> float:
        """The figure for `size`."""
        (below, figure), *rest = self.points
        if size <= below:
            return figure
        for above, higher in rest:
            if size <= above:
                share = math.log(size / below) / math.log(above / below)
                return figure * (higher / figure) ** share
            below, figure = above, higher
        return figure


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration:
    """When, with what and how well something was measured.

    Attributes:
      date: ISO date. jax: Version of JAX. device_kind: What the device calls itself.
      spread: Typical spread of repeated timings: the median over all probes of the range between their quartiles, as a
        share of the time.
    """

    date: str
    jax: str
    device_kind: str
    spread: float

    def __post_init__(self) -> None:
        for field in ("date", "jax", "device_kind"):
            require_text("calibration", field, getattr(self, field))
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError as error:
            raise ClusterError(
                f"calibration: date must be an ISO date, as in 2026-01-31; received {self.date!r:.60}."
            ) from error
        spread = require_number("calibration", "spread", self.spread, zero_allowed=True)
        object.__setattr__(self, "spread", spread)


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Rates that one device reaches while all others are as busy.

    Attributes:
      calibration: When and how well they were measured.
      product_flops_per_s: For each dtype, the rate of matrix products by their floating-point operations.
      narrow_share: Which share of that rate is left to products by their least dimension; never above 1.
      memory_bytes_per_s: Rate of elementwise kernels by the bytes that one reads and writes.
      elementwise_per_s: Additions, multiplications and the like, where memory is not what binds.
      function_per_s: Exponentials, logarithms, roots, hyperbolic functions and the like.
      hidden_share: Which share of the lesser of a kernel's arithmetic and memory time hides behind the greater: 1 is
        the roofline, 0 where they take turns.
      transposed_bytes_per_s: Rate at which an array is put into another order of dimensions, by its bytes, on top of
        what it takes to copy it; None where that takes nothing or was not measured.
    """

    calibration: Calibration
    product_flops_per_s: tuple[tuple[str, Curve], ...]
    narrow_share: Curve
    memory_bytes_per_s: Curve
    elementwise_per_s: float
    function_per_s: float
    hidden_share: float = 1.0
    transposed_bytes_per_s: Curve | None = None

    def __post_init__(self) -> None:
        products = dict(self.product_flops_per_s)
        if "float32" not in products or len(products) != len(self.product_flops_per_s):
            raise ClusterError(
                "measured rates: product_flops_per_s must have float32, which other dtypes fall back to, and each "
                f"dtype once; received {[dtype for dtype, _ in self.product_flops_per_s]}."
            )
        object.__setattr__(self, "product_flops_per_s", tuple(sorted(products.items())))
        if any(share > 1 for _, share in self.narrow_share.points):
            raise ClusterError("measured rates: shares of narrow_share must not be above 1.")
        for field in ("elementwise_per_s", "function_per_s"):
            object.__setattr__(self, field, require_number("measured rates", field, getattr(self, field)))

        hidden = require_number("measured rates", "hidden_share", self.hidden_share, zero_allowed=True)
        if hidden > 1:
            raise ClusterError(f"measured rates: hidden_share must be in [0, 1]; received {self.hidden_share!r}.")
        object.__setattr__(self, "hidden_share", hidden)

    def product_rate(self, dtype: str, flops: float, least_dim: float) -> float:
        """Operations per second of one product of `flops` whose least dimension is `least_dim`."""
        curves = dict(self.product_flops_per_s)
        return curves.get(dtype, curves["float32"]).at(flops) * self.narrow_share.at(least_dim)


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """What one kind of collective takes among `size` devices of a link, all other devices being as busy.

    The two figures are those of the ring formula (`autoshard.cost.collectives`) that gives the measured times: of one
    hop, and of the bytes that a ring would send. So they can be held against the link's own.

    Attributes:
      kind: Which collective. size: Devices that take part.
      latency_s: Time of one hop, for a message of no bytes.
      bandwidth_bytes_per_s: One-way bandwidth of one device.
      separate_share: Which share of the latency each of many independent collectives pays by itself: 0 where the
        compiler makes one of them, 1 where they run one after another.
      inner_bytes_per_s: Rate at which the bytes of the larger side are put in order where the collective runs along a
        dimension that others are in front of, so that pieces are not whole blocks of memory; None where that takes
        nothing or was not measured.
    """

    kind: CollectiveKind
    size: int
    latency_s: float
    bandwidth_bytes_per_s: float
    separate_share: float = 0.0
    inner_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        owner = f"measured {self.kind.value}"
        object.__setattr__(self, "size", require_whole(owner, "size", self.size, least=2))
        latency_s = require_number(owner, "latency_s", self.latency_s, zero_allowed=True)
        object.__setattr__(self, "latency_s", latency_s)
        bandwidth = require_number(owner, "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)
        object.__setattr__(self, "bandwidth_bytes_per_s", bandwidth)
        share = require_number(owner, "separate_share", self.separate_share, zero_allowed=True)
        if share > 1:
            raise ClusterError(f"{owner}: separate_share must be in [0, 1]; received {self.separate_share!r}.")
        object.__setattr__(self, "separate_share", share)
        if self.inner_bytes_per_s is not None:
            rate = require_number(owner, "inner_bytes_per_s", self.inner_bytes_per_s)
            object.__setattr__(self, "inner_bytes_per_s", rate)


def interpolated(measured: Iterable[MeasuredCollective], kind: CollectiveKind, size: int) -> MeasuredCollective | None:
    """The figures of `kind` among `size` devices, linear in log(size) between those measured; None if there are none.

    Outside the sizes that were measured, the nearest one's figures hold: they are per hop and per byte sent.
    """
    own = sorted((m for m in measured if m.kind is kind), key=lambda m: m.size)
    if not own:
        return None
    below = max((m for m in own if m.size <= size), key=lambda m: m.size, default=own[0])
    above = min((m for m in own if m.size >= size), key=lambda m: m.size, default=own[-1])
    if below.size >= above.size:
        return below
    share = math.log(size / below.size) / math.log(above.size / below.size)
    between = lambda a, b: a + share * (b - a)
    inner_s = between(*(0.0 if m.inner_bytes_per_s is None else 1 / m.inner_bytes_per_s for m in (below, above)))
    return MeasuredCollective(
        kind,
        size,
        between(below.latency_s, above.latency_s),
        1 / between(1 / below.bandwidth_bytes_per_s, 1 / above.bandwidth_bytes_per_s),
        between(below.separate_share, above.separate_share),
        1 / inner_s if inner_s else None,
    )

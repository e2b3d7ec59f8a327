"""Device types and links as they stand in files: the schema that cluster files and the catalogue share."""

from collections.abc import Mapping
from typing import Annotated, Any

import pydantic

from autoshard.cluster.device import DeviceType, Link
from autoshard.cluster.kernel_forms import KernelForms
from autoshard.cluster.measured import Calibration, CollectiveKind, Curve, MeasuredCollective, MeasuredRates
from autoshard.cluster.schema import Number, Schema, Text, Whole, broken_rule


def _as_points(value: object) -> object:
    return [list(point) for point in value.points] if isinstance(value, Curve) else value


def _check_point(value: object) -> object:
    if not isinstance(value, list) or len(value) != 2:
        raise broken_rule(f"must be a list of a size and a figure; received {value!r:.60}.")
    return value


def _as_mapping(value: object) -> object:
    return value if isinstance(value, Mapping) or not isinstance(value, tuple) else dict(value)


Points = Annotated[
    list[Annotated[list[Number], pydantic.BeforeValidator(_check_point)]], pydantic.BeforeValidator(_as_points)
]
"""[size, figure] pairs of a `Curve`, with rising sizes."""


class CalibrationSchema(Schema):
    """When and how well a device was measured."""

    date: Text
    """ISO date, as in 2026-01-31."""
    jax: Text
    """Version of JAX."""
    device_kind: Text
    """What the device calls itself."""
    spread: Number
    """Of repeated timings, as a share of the time."""


class RatesSchema(Schema):
    """Rates of one device while all others are as busy, as `autoshard calibrate` measures them."""

    calibration: CalibrationSchema = pydantic.Field(alias="calibrated")
    product_flops_per_s: Annotated[dict[str, Points], pydantic.BeforeValidator(_as_mapping)]
    """Matrix products: [flops of one product, rate], for each dtype; float32 must be there."""
    narrow_share: Points
    """[least dimension of a product, share of that rate]."""
    memory_bytes_per_s: Points
    """[bytes that a kernel moves, rate]."""
    elementwise_per_s: Number
    """Additions and the like, where memory does not bind."""
    function_per_s: Number
    """Exponentials and the like."""
    hidden_share: Number = 1.0
    """Of the lesser of arithmetic and memory time, what hides behind the greater."""
    transposed_bytes_per_s: Points | None = None
    """[bytes of an array, rate of putting its dimensions into another order]; without it, that takes no time."""

    def rates(self) -> MeasuredRates:
        """The measured rates."""
        own, transposed = dict(self), self.transposed_bytes_per_s
        for field in ("narrow_share", "memory_bytes_per_s"):
            own[field] = _curve(own[field])
        own["calibration"] = Calibration(**dict(self.calibration))
        own["product_flops_per_s"] = tuple((dtype, _curve(p)) for dtype, p in self.product_flops_per_s.items())
        own["transposed_bytes_per_s"] = None if transposed is None else _curve(transposed)
        return MeasuredRates(**own)


class CollectiveSchema(Schema):
    """The ring that takes as long as one kind of collective among some devices of a link."""

    kind: CollectiveKind
    size: Whole
    """Number of devices."""
    latency_s: Number
    """Of one hop."""
    bandwidth_bytes_per_s: Number
    separate_share: Number = 0.0
    """The share of hops that is paid even where many collectives could be joined."""
    inner_bytes_per_s: Number | None = None
    """How fast pieces along inner dimensions are put in order; without it, that takes no time."""


class LinkSchema(Schema):
    """A link."""

    latency_s: Number
    bandwidth_bytes_per_s: Number
    source: Text
    """Where the figures come from."""
    collectives: list[CollectiveSchema] = []
    """What was measured, in files of version 2; for other collectives the figures above serve."""

    def link(self, level: int) -> Link:
        """The link, at the given level."""
        measured = tuple(MeasuredCollective(**dict(c)) for c in self.collectives)
        return Link(self.latency_s, self.bandwidth_bytes_per_s, level, self.source, measured)


class KernelFormsSchema(Schema):
    """How much longer kernels of some forms take than their bytes and arithmetic tell, as in `KernelForms`."""

    row_pass_factor: Number
    """Of a softmax over long rows, for each reduction of these."""
    column_step_s: Number
    """Of a sum of columns, a step down the rows."""
    stored_column_step_s: Number
    """The same, where something is stored for each element."""
    window_step_s: Number
    """An addition of a windowed sum within a step."""
    row_pass_bytes: Number | None = None
    """Bytes of a softmax up to which the factor holds; of larger ones it is less."""
    unaligned_factor: Number = 1.0
    """Of a product without batches, one of whose matrices has rows that do not begin at multiples of 16 bytes."""
    unaligned_sum_factor: Number = 1.0
    """The same, where it sums along such rows."""
    short_rows_factor: Number = 1.0
    """Of a kernel that stores rows of few elements of what lies in another order of dimensions."""


class DeviceTypeSchema(Schema):
    """A device type; the key that it stands under is its name."""

    peak_flops_per_s: Annotated[dict[str, Number], pydantic.BeforeValidator(_as_mapping)]
    """Dense peak for each dtype; float32 must be there."""
    memory_bytes: Whole
    memory_bandwidth_bytes_per_s: Number
    launch_overhead_s: Number
    matmul_efficiency: Number = 1.0
    memory_efficiency: Number = 1.0
    convolution_efficiency: Number | None = None
    kernel_forms: KernelFormsSchema | None = None
    product_workspace_bytes: Whole = 0
    source: Text
    """Where the figures come from."""
    measured: RatesSchema | None = None
    """What was measured, in files of version 2."""

    def device_type(self, name: str) -> DeviceType:
        """The device type."""
        own: dict[str, Any] = {field: getattr(self, field) for field in DeviceTypeSchema.model_fields}
        own["kernel_forms"] = None if self.kernel_forms is None else KernelForms(**dict(self.kernel_forms))
        own["measured"] = None if self.measured is None else self.measured.rates()
        return DeviceType(name, **own)


def _curve(points: list[list[float]]) -> Curve:
    return Curve(tuple((size, figure) for size, figure in points))

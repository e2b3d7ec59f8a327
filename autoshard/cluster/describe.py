"""Device types and links as plain data, and back: the parts that cluster files and the catalogue share."""

from autoshard.cluster.describe_measured import (
    collective_from_fields,
    collective_to_dict,
    rates_from_fields,
    rates_to_dict,
)
from autoshard.cluster.device import DeviceType, Link
from autoshard.cluster.fields import Fields

DEVICE_TYPE_KEYS = (
    "peak_flops_per_s",
    "memory_bytes",
    "memory_bandwidth_bytes_per_s",
    "launch_overhead_s",
    "matmul_efficiency",
    "product_workspace_bytes",
    "source",
    "measured",
)
LINK_KEYS = ("latency_s", "bandwidth_bytes_per_s", "source", "collectives")


def device_type_from_fields(name: str, fields: Fields) -> DeviceType:
    """Builds a device type from the keys `DEVICE_TYPE_KEYS`.

    Raises:
      FileFormatError: If a key is missing or has a value of the wrong type.
      ClusterError: If a value is out of range.
    """
    peaks = fields.fields("peak_flops_per_s")
    return DeviceType(
        name=name,
        peak_flops_per_s=tuple((dtype, peaks.number(dtype)) for dtype in peaks.values),
        memory_bytes=fields.whole("memory_bytes"),
        memory_bandwidth_bytes_per_s=fields.number("memory_bandwidth_bytes_per_s"),
        launch_overhead_s=fields.number("launch_overhead_s"),
        source=fields.text("source"),
        matmul_efficiency=fields.number("matmul_efficiency", 1.0),
        product_workspace_bytes=fields.whole("product_workspace_bytes", 0),
        measured=rates_from_fields(fields.fields("measured")) if "measured" in fields.values else None,
    )


def device_type_to_dict(device_type: DeviceType) -> dict[str, object]:
    """The inverse of `device_type_from_fields`, without the name."""
    result: dict[str, object] = {
        "peak_flops_per_s": dict(device_type.peak_flops_per_s),
        "memory_bytes": device_type.memory_bytes,
        "memory_bandwidth_bytes_per_s": device_type.memory_bandwidth_bytes_per_s,
        "launch_overhead_s": device_type.launch_overhead_s,
        "matmul_efficiency": device_type.matmul_efficiency,
        "product_workspace_bytes": device_type.product_workspace_bytes,
        "source": device_type.source,
    }
    if device_type.measured is not None:
        result["measured"] = rates_to_dict(device_type.measured)
    return result


def link_from_fields(fields: Fields, level: int) -> Link:
    """Builds a link of the given level from the keys `LINK_KEYS`.

    Raises:
      FileFormatError: If a key is missing or has a value of the wrong type.
      ClusterError: If a value is out of range.
    """
    return Link(
        latency_s=fields.number("latency_s"),
        bandwidth_bytes_per_s=fields.number("bandwidth_bytes_per_s"),
        level=level,
        source=fields.text("source"),
        collectives=tuple(
            collective_from_fields(Fields.of(f"{fields.place}.collectives[{index}]", item))
            for index, item in enumerate(fields.items("collectives"))
        ),
    )


def link_to_dict(link: Link) -> dict[str, object]:
    """The inverse of `link_from_fields`, with the level."""
    result: dict[str, object] = {
        "latency_s": link.latency_s,
        "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
        "level": link.level,
        "source": link.source,
    }
    if link.collectives:
        result["collectives"] = [collective_to_dict(measured) for measured in link.collectives]
    return result

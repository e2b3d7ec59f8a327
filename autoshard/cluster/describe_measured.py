"""Measured figures as plain data, and back; `autoshard/cluster/load.py` tells how they stand in a cluster file."""

from autoshard.cluster.fields import Fields, suggestion
from autoshard.cluster.measured import Calibration, CollectiveKind, Curve, MeasuredCollective, MeasuredRates
from autoshard.errors import FileFormatError

_CALIBRATION_KEYS = ("date", "jax", "device_kind", "spread")
_RATES_KEYS = (
    "calibrated",
    "product_flops_per_s",
    "narrow_share",
    "memory_bytes_per_s",
    "elementwise_per_s",
    "function_per_s",
    "hidden_share",
    "transposed_bytes_per_s",
)
_COLLECTIVE_KEYS = ("kind", "size", "latency_s", "bandwidth_bytes_per_s", "separate_share", "inner_bytes_per_s")


def rates_from_fields(fields: Fields) -> MeasuredRates:
    """Builds measured rates.

    Raises:
      FileFormatError: If a key is missing, unknown, or has a value of the wrong type.
      ClusterError: If a value is out of range.
    """
    fields.refuse_unknown(_RATES_KEYS)
    own = fields.fields("calibrated")
    own.refuse_unknown(_CALIBRATION_KEYS)
    products = fields.fields("product_flops_per_s")
    return MeasuredRates(
        calibration=Calibration(own.text("date"), own.text("jax"), own.text("device_kind"), own.number("spread")),
        product_flops_per_s=tuple((dtype, _curve(products, dtype)) for dtype in products.values),
        narrow_share=_curve(fields, "narrow_share"),
        memory_bytes_per_s=_curve(fields, "memory_bytes_per_s"),
        elementwise_per_s=fields.number("elementwise_per_s"),
        function_per_s=fields.number("function_per_s"),
        hidden_share=fields.number("hidden_share", 1.0),
        transposed_bytes_per_s=(
            _curve(fields, "transposed_bytes_per_s") if "transposed_bytes_per_s" in fields.values else None
        ),
    )


def rates_to_dict(rates: MeasuredRates) -> dict[str, object]:
    """The inverse of `rates_from_fields`."""
    own, transposed = rates.calibration, rates.transposed_bytes_per_s
    return {
        "calibrated": {"date": own.date, "jax": own.jax, "device_kind": own.device_kind, "spread": own.spread},
        "product_flops_per_s": {dtype: _points(curve) for dtype, curve in rates.product_flops_per_s},
        "narrow_share": _points(rates.narrow_share),
        "memory_bytes_per_s": _points(rates.memory_bytes_per_s),
        "elementwise_per_s": rates.elementwise_per_s,
        "function_per_s": rates.function_per_s,
        "hidden_share": rates.hidden_share,
        **({} if transposed is None else {"transposed_bytes_per_s": _points(transposed)}),
    }


def collective_from_fields(fields: Fields) -> MeasuredCollective:
    """Builds the figures of one kind of collective. Errors are those of `rates_from_fields`."""
    fields.refuse_unknown(_COLLECTIVE_KEYS)
    kinds = {kind.value: kind for kind in CollectiveKind}
    name = fields.text("kind")
    if name not in kinds:
        raise FileFormatError(
            f"{fields.place}.kind must be one of {', '.join(kinds)}; received {name!r:.60}.{suggestion(name, kinds)}"
        )
    return MeasuredCollective(
        kinds[name],
        fields.whole("size"),
        fields.number("latency_s"),
        fields.number("bandwidth_bytes_per_s"),
        fields.number("separate_share", 0.0),
        fields.number("inner_bytes_per_s") if "inner_bytes_per_s" in fields.values else None,
    )


def collective_to_dict(measured: MeasuredCollective) -> dict[str, object]:
    """The inverse of `collective_from_fields`."""
    inner = {} if measured.inner_bytes_per_s is None else {"inner_bytes_per_s": measured.inner_bytes_per_s}
    return {
        "kind": measured.kind.value,
        "size": measured.size,
        "latency_s": measured.latency_s,
        "bandwidth_bytes_per_s": measured.bandwidth_bytes_per_s,
        "separate_share": measured.separate_share,
        **inner,
    }


def _curve(fields: Fields, key: str) -> Curve:
    fields.required(key)
    points = []
    for index, item in enumerate(fields.items(key)):
        if not isinstance(item, list) or len(item) != 2:
            raise FileFormatError(
                f"{fields.place}.{key}[{index}] must be a list of a size and a figure; received {item!r:.60}."
            )
        pair = Fields.of(f"{fields.place}.{key}[{index}]", {"size": item[0], "figure": item[1]})
        points.append((pair.number("size"), pair.number("figure")))
    return Curve(tuple(points))


def _points(curve: Curve) -> list[list[float]]:
    return [list(point) for point in curve.points]

"""What makes products slow on the matrix units of a GPU: rows that do not begin at multiples of 16 bytes."""

import dataclasses
import math
from collections.abc import Iterator

import jax.numpy as jnp

from autoshard.cluster import DeviceType
from autoshard.cost.compute import ALIGNMENT_BYTES, Work, flops_s, unaligned_factor
from autoshard.graph.graph import Graph, Operation
from autoshard.graph.product_rows import product_rows

_WORTH_A_WARNING = 0.02
"""Of what a step computes; less is not worth the padding."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Slow:
    """A product, the length of its rows that are not aligned, their type, and what it takes longer for them."""

    product: Operation
    row: int
    dtype: str
    extra_s: float


def unaligned(graph: Graph, device: DeviceType, num_devices: int, compute_s: float) -> tuple[str, ...]:
    """Warnings of lengths of rows that prolong products, one for each, where padding spares much of the step.

    Args:
      graph: The program. device, num_devices: What it runs on. compute_s: What a step computes on one of them.
    """
    if device.kernel_forms is None:
        return ()
    found: dict[tuple[int, str], list[_Slow]] = {}
    for slow in _slow_products(graph, device, num_devices):
        found.setdefault((slow.row, slow.dtype), []).append(slow)
    shares = ((products, math.fsum(p.extra_s for p in products) / compute_s) for products in found.values())
    return tuple(_warning(graph, device, products, share) for products, share in shares if share > _WORTH_A_WARNING)


def _slow_products(graph: Graph, device: DeviceType, num_devices: int) -> Iterator[_Slow]:
    """The products whose rows are not aligned even where they are whole."""
    for product in graph.operations:
        if product.name != "dot_general":
            continue
        dtype = next((graph.values[o].dtype for o in product.operands if o is not None), "float32")
        sizes = [f.size for f in product.rule.factors]
        rows = [(math.prod(sizes[f] for f in row), is_summed) for row, is_summed in product_rows(product.rule)]
        factors = {row: unaligned_factor(device, dtype, [row]) for row in rows}
        factor = max(factors.values(), default=1.0)
        if factor > 1:
            own_s = flops_s(device, product.rule.flops * product.trips, dtype, Work.PRODUCT) / num_devices
            length, _ = max(factors, key=lambda row: factors[row])
            yield _Slow(product, length, dtype, (factor - 1) * own_s)


def _warning(graph: Graph, device: DeviceType, products: list[_Slow], share: float) -> str:
    """The rule, the dimension that breaks it, the first line, and the next step."""
    first, multiple = products[0], ALIGNMENT_BYTES // jnp.dtype(products[0].dtype).itemsize
    having = [a for a in graph.arguments if first.row in graph.values[a.value].shape]
    largest = max(having, key=lambda a: graph.values[a.value].size_bytes, default=None)
    whose = f", as `{largest.name}` has," if largest else ""
    padded = -(-first.row // multiple) * multiple
    return (
        f"Rows of {first.row:,} {first.dtype}{whose} do not begin at multiples of {ALIGNMENT_BYTES} bytes, without "
        f"which the matrix units of {device.name} are slow: {share:.0%} of what a step computes is lost in "
        f"{len(products)} product{'s' if len(products) > 1 else ''}, the first at {first.product.source}. Pad that "
        f"dimension to a multiple of {multiple}, such as {padded:,}."
    )

"""The time of a matrix product in pieces, each beside the transfer of another (collective matmul).

Instead of gathering an operand over the N devices along a mesh axis before a product, or reduce-scattering its result
behind it, the product runs as N products, of one device's piece each, while pieces travel:

    gathered operand    a device multiplies the piece that it has while the next one arrives from its neighbour
    scattered sum       a device makes the part of another's piece while the part that it made before is on its way

    exposed = (N - 1) max(0, transfer - rho piece)       transfer: a permute of one piece; piece: one of the N products
    hidden  = (N - 1) transfer - exposed

The first product needs no transfer, and the last one hides the last transfer. What it costs: N launches, narrower
products, the operand that is not cut read N times, and what cuts operands and joins results.

(Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS
2023.) Parts of sums go straight to the device that adds them, all at the end: added on the way, from device to device,
they would be read and written N times, or make each product wait for the transfer before it.
"""

import dataclasses
from typing import Literal

from autoshard.cluster import DeviceType, MeshAxis
from autoshard.cost.collectives import Collective, launched, permute
from autoshard.cost.torus import is_torus

Decompose = Literal["never", "faster", "any"]
"""Which products may run in pieces: none, those that are faster so than behind or before a collective that is waited
for, or all that can.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class InPieces:
    """How products in pieces are offered.

    Attributes:
      decompose: Which. hidden_share: The share of a product's time that a transfer beside it makes use of; 0 where the
        compiler lets nothing run beside products.
    """

    decompose: Decompose = "never"
    hidden_share: float = 0.0


def may_run_in_pieces(axis: MeshAxis) -> bool:
    """Whether pieces may be sent along an axis; not along one of a torus, where they would cross each other's way."""
    return axis.size > 1 and not any(is_torus(level) for level in axis.levels if level.size > 1)


def transfers(
    axis: MeshAxis, device: DeviceType, piece_bytes: float, product_s: float, hidden_share: float
) -> Collective:
    """The transfers of all pieces of a product, as one collective whose `time_s` is what is exposed of them.

    Args:
      axis: The mesh axis along which they go. device: Whose launches count.
      piece_bytes: Of one piece. product_s: Of the product of one piece.
      hidden_share: The share of a product's time that a transfer beside it makes use of.
    """
    one, count = launched(permute([axis], piece_bytes), device), axis.size - 1
    exposed_s = max(0.0, one.time_s - hidden_share * product_s)
    return dataclasses.replace(
        one,
        wire_bytes=count * one.wire_bytes,
        time_s=count * exposed_s,
        fixed_s=count * min(one.fixed_s, exposed_s),
        count=count,
        beside_s=count * (one.time_s - exposed_s),
    )

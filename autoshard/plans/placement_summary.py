"""What the order of a plan's devices gains, as a plan keeps it."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class PlacementSummary:
    """The traffic of a plan under the order of its devices, and under others.

    Attributes:
      comm_s: Time of all collectives in a step, hidden or not, on the mesh as placed.
      listed_s: The same with the devices in the order in which the cluster lists them, row-major; None where the axes
        straddle nodes then.
      bound_s: No order takes less.
      is_exact: Whether every order that keeps parts of hardware levels together was compared.
    """

    comm_s: float
    listed_s: float | None
    bound_s: float
    is_exact: bool

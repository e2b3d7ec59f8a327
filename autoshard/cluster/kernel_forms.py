"""How much longer kernels of some forms take than their bytes and their arithmetic tell."""

import dataclasses

from autoshard.cluster.checks import require_number
from autoshard.errors import ClusterError


@dataclasses.dataclass(frozen=True, slots=True)
class KernelForms:
    """What was measured of kernels whose work is not spread over the device, or stops and goes.

    Attributes:
      row_pass_factor: By how much each reduction of long rows prolongs a kernel that takes exponentials of them and
        whose results wait for the reduction, as in a softmax; at least 1.
      row_pass_bytes: Bytes of such a kernel up to which that holds; None for any. What it adds to a larger one grows
        with the square root of its bytes: blocks that begin together drift apart, and some reduce while others fetch.
      column_step_s: Of a kernel that sums columns, a step of one thread down the rows, where only sums are stored.
      stored_column_step_s: The same, where it also stores something for each element.
      window_step_s: An addition of a windowed sum that is computed inside such a step.
      unaligned_factor: By how much a product is prolonged one of whose matrices has rows that do not begin at multiples
        of 16 bytes; at least 1. unaligned_sum_factor: The same, where the product sums along such rows.
      short_rows_factor: By how much a kernel is prolonged that stores rows of few elements of what lies in another
        order of dimensions; at least 1.
    """

    row_pass_factor: float
    column_step_s: float
    stored_column_step_s: float
    window_step_s: float
    row_pass_bytes: float | None = None
    unaligned_factor: float = 1.0
    unaligned_sum_factor: float = 1.0
    short_rows_factor: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "row_pass_bytes":
                continue
            value = require_number("kernel_forms", field.name, value, zero_allowed=True)
            object.__setattr__(self, field.name, value)
            if field.name.endswith("_factor") and value < 1:
                raise ClusterError(f"kernel_forms: {field.name} must be at least 1; received {value!r}.")

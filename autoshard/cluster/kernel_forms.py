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
      column_step_s: Of a kernel that sums columns, a step of one thread down the rows, where only sums are stored.
      stored_column_step_s: The same, where it also stores something for each element.
      window_step_s: An addition of a windowed sum that is computed inside such a step.
    """

    row_pass_factor: float
    column_step_s: float
    stored_column_step_s: float
    window_step_s: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = require_number("kernel_forms", field.name, getattr(self, field.name), zero_allowed=True)
            object.__setattr__(self, field.name, value)
        if self.row_pass_factor < 1:
            raise ClusterError(f"kernel_forms: row_pass_factor must be at least 1; received {self.row_pass_factor!r}.")

"""When a plan's own schedule sends what hides behind kernels: what orders by time follow (`ordering.py`)."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class TransferTimes:
    """When what hides is sent.

    Attributes:
      begins: For gathered copies, by (equation, operand slot) of the reader, the operation beside which each begins at
        the latest.
      ends: For products that make gradients, by equation, the operation before which all is sent of what each makes.
    """

    begins: Mapping[tuple[int, int], int]
    ends: Mapping[int, int]

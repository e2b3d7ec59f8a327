"""How fast a program computes and sums gradients, whatever its plan: by which a sum's products are counted.

Before a plan is made nobody knows how a product is split. Good plans have all devices busy, and sum over the slowest
links no more than they must; so a kernel is taken to be split as far as it can be, and a gradient to be summed and
scattered over the slowest links alone, split over the devices within.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """What kernels and sums take on one mesh.

    Attributes:
      before_s: For each operation, and one past the last, the time of all kernels before it in a step.
      sum_fixed_s: What any sum of a gradient takes. sum_byte_s: And for each byte of the whole gradient.
    """

    before_s: tuple[float, ...]
    sum_fixed_s: float
    sum_byte_s: float

    def sum_s(self, size_bytes: float) -> float:
        """The time of the sum of a gradient whose whole takes so many bytes."""
        return self.sum_fixed_s + self.sum_byte_s * size_bytes

"""What XLA:TPU must know to compile for a slice of TPUs that is not there."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class TpuTarget:
    """A kind of TPU; libtpu knows the rest.

    Attributes:
      name: Device type in autoshard's catalogue.
      aliases: What else `--target` calls it.
      generation: What stands before the colon of libtpu's topology names.
      num_dims: Dimensions of its torus.
      chip_config: How libtpu makes devices of a chip's cores; empty for its default.
      clock_ghz: To turn cycles into seconds; None where Google publishes nothing that tells it.
      source: Where `clock_ghz` comes from.
    """

    name: str
    aliases: tuple[str, ...]
    generation: str
    num_dims: int
    chip_config: str
    clock_ghz: float | None
    source: str

    def topology(self, num_devices: int) -> str:
        """The name of a slice as near to a square or cube as can be: `v5e:2x4` for eight chips.

        A torus of three dimensions is at least 2x2x1, or 1x1x1.
        """
        sides = [1] * self.num_dims
        for factor in sorted(_prime_factors(num_devices), reverse=True):
            sides[sides.index(min(sides))] *= factor
        order = sorted(sides, reverse=self.num_dims == 3)
        return f"{self.generation}:{'x'.join(map(str, order))}"


def _prime_factors(number: int) -> list[int]:
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found


V4 = TpuTarget(
    name="TPU-v4",
    aliases=("tpu-v4", "v4"),
    generation="v4",
    num_dims=3,
    chip_config="megacore",  # both cores of a chip are one device, as on Cloud TPUs
    clock_ghz=1.05,
    source="Jouppi et al., TPU v4, https://arxiv.org/abs/2304.01433: clock rate 1,050 MHz",
)
V5E = TpuTarget(
    name="TPU-v5e",
    aliases=("tpu-v5e", "v5e"),
    generation="v5e",
    num_dims=2,
    chip_config="",
    clock_ghz=1.5,
    source=(
        "197 TFLOP/s of bfloat16 by four matrix units of 128 x 128 (Google, Cloud TPU documentation, TPU v5e) are "
        "2 x 4 x 128 x 128 operations a cycle at 1.5 GHz"
    ),
)
V5P = TpuTarget(
    name="TPU-v5p",
    aliases=("tpu-v5p", "v5p"),
    generation="v5p",
    num_dims=3,
    chip_config="",
    clock_ghz=1.75,
    source=(
        "459 TFLOP/s of bfloat16 by eight matrix units of 128 x 128 on two cores (Google, Cloud TPU documentation, TPU "
        "v5p) are 2 x 8 x 128 x 128 operations a cycle at 1.75 GHz"
    ),
)
TPUS = (V4, V5E, V5P)

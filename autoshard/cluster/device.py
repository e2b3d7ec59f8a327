"""One device and one link: the smallest parts that a cluster is made of."""

import dataclasses
import enum
from collections.abc import Mapping

from autoshard.cluster.checks import require_number, require_text, require_whole
from autoshard.cluster.kernel_forms import KernelForms
from autoshard.cluster.measured import CollectiveKind, MeasuredCollective, MeasuredRates, interpolated
from autoshard.errors import ClusterError

UNMEASURED = "as stated in the catalogue or the cluster file, not calibrated"
_REDUCED_PRECISION_FAMILIES = ("float8", "float4")


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceType:
    """A kind of accelerator (or CPU), as its vendor describes it.

    Attributes:
      name: Catalogue name, e.g. `H100-SXM`.
      peak_flops_per_s: Dense peak rate for each dtype, as (dtype, floating-point operations per second) pairs
        sorted by dtype; a mapping is accepted. `float32` must be there. `tensorfloat32` is the rate of
        float32 matrix products at JAX's default precision on GPUs that have it.
      memory_bytes: Memory of one device.
      memory_bandwidth_bytes_per_s: Peak rate of reading or writing that memory.
      launch_overhead_s: Time from the start of a kernel that has hardly any work to the start of the next, when kernels
        are queued back to back.
      source: Where each of the figures above comes from.
      matmul_efficiency: Fraction of the peak that large matrix products reach; 1.0 where no source tells.
      memory_efficiency: Fraction of the memory's peak rate that large kernels reach; 1.0 where no source tells.
      convolution_efficiency: Fraction of the peak that large convolutions reach; None: that of matrix products.
      kernel_forms: What was measured of some forms of kernels; None for devices where nothing was.
      product_workspace_bytes: Memory that a matrix product needs beside its operands and result while it runs.
      measured: Rates by size, which take the place of peaks where there are any; None if nothing was measured.
    """

    name: str
    peak_flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    launch_overhead_s: float
    source: str
    matmul_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    convolution_efficiency: float | None = None
    kernel_forms: KernelForms | None = None
    product_workspace_bytes: int = 0
    measured: MeasuredRates | None = None

    def __post_init__(self) -> None:
        require_text("device type", "name", self.name)
        owner = f"device type {self.name!r}"
        require_text(owner, "source", self.source)
        given = self.peak_flops_per_s
        pairs = tuple(given.items()) if isinstance(given, Mapping) else tuple(given)
        peaks = {
            require_text(owner, "dtype", dtype): require_number(owner, f"peak_flops_per_s of {dtype}", rate)
            for dtype, rate in pairs
        }
        if len(peaks) != len(pairs):
            raise ClusterError(f"{owner}: peak_flops_per_s must name each dtype once; received {pairs!r}.")
        if "float32" not in peaks:
            raise ClusterError(
                f"{owner}: peak_flops_per_s must have float32, the rate that other dtypes fall back to; "
                f"received {sorted(peaks)}."
            )
        checked = {
            "peak_flops_per_s": tuple(sorted(peaks.items())),
            "memory_bytes": require_whole(owner, "memory_bytes", self.memory_bytes),
            "memory_bandwidth_bytes_per_s": require_number(
                owner, "memory_bandwidth_bytes_per_s", self.memory_bandwidth_bytes_per_s
            ),
            "launch_overhead_s": require_number(owner, "launch_overhead_s", self.launch_overhead_s, zero_allowed=True),
            **{
                field: _share(owner, field, getattr(self, field))
                for field in ("matmul_efficiency", "memory_efficiency")
            },
            "product_workspace_bytes": require_whole(
                owner, "product_workspace_bytes", self.product_workspace_bytes, least=0
            ),
        }
        if self.convolution_efficiency is not None:
            checked["convolution_efficiency"] = _share(owner, "convolution_efficiency", self.convolution_efficiency)
        for field, value in checked.items():
            object.__setattr__(self, field, value)

    @property
    def provenance(self) -> str:
        """Where the figures come from, in a few words."""
        if self.measured is None:
            return UNMEASURED
        return f"measured on {self.measured.calibration.date}"

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU: only products of GPUs have a workspace."""
        return self.product_workspace_bytes > 0

    @property
    def rounds_products(self) -> bool:
        """Whether float32 products at JAX's default precision are made of operands rounded to bfloat16, as on TPUs
        (JAX documentation, `jax.lax.Precision`): those whose peak for float32 is stated to be that for bfloat16.
        """
        peaks = dict(self.peak_flops_per_s)
        return peaks["float32"] == peaks.get("bfloat16")

    def flops_per_s(self, dtype: str) -> float:
        """Peak rate of arithmetic on `dtype`.

        Falls back, in this order: a dtype of the float8 or float4 family (`float8_e4m3fn`) to the family's
        entry (`float8`); everything else that has no entry to float32. The last holds for integers and
        booleans, whose arithmetic rarely bounds a training step, for complex numbers, for 16-bit floats on
        devices without fast 16-bit arithmetic, and for float64 where the source gives no rate (that last is
        optimistic).

        Args:
          dtype: NumPy-style name, e.g. `bfloat16`, or `tensorfloat32`.

        Returns:
          Floating-point operations per second, before any efficiency.
        """
        peaks = dict(self.peak_flops_per_s)
        if dtype in peaks:
            return peaks[dtype]
        for family in _REDUCED_PRECISION_FAMILIES:
            if dtype.startswith(family) and family in peaks:
                return peaks[family]
        return peaks["float32"]

    def matmul_flops_per_s(self, dtype: str) -> float:
        """Rate that large matrix products on `dtype` reach at JAX's default precision.

        At that precision GPUs that have TensorFloat-32 use it for float32 products (JAX documentation,
        `jax.lax.Precision.DEFAULT`).

        Args:
          dtype: NumPy-style name.

        Returns:
          Floating-point operations per second: the peak times `matmul_efficiency`.
        """
        return self._matrix_units_flops_per_s(dtype) * self.matmul_efficiency

    def convolution_flops_per_s(self, dtype: str) -> float:
        """Rate that large convolutions on `dtype` reach at JAX's default precision, as `matmul_flops_per_s`."""
        return self._matrix_units_flops_per_s(dtype) * (self.convolution_efficiency or self.matmul_efficiency)

    @property
    def memory_bytes_per_s(self) -> float:
        """Rate at which large kernels read or write the memory: the peak times `memory_efficiency`."""
        return self.memory_bandwidth_bytes_per_s * self.memory_efficiency

    def _matrix_units_flops_per_s(self, dtype: str) -> float:
        has_tensorfloat32 = any(own == "tensorfloat32" for own, _ in self.peak_flops_per_s)
        return self.flops_per_s("tensorfloat32" if dtype == "float32" and has_tensorfloat32 else dtype)


def _share(owner: str, field: str, value: float) -> float:
    share = require_number(owner, field, value)
    if share > 1:
        raise ClusterError(f"{owner}: {field} must be in (0, 1]; received {value!r}.")
    return share


class Wires(enum.Enum):
    """How the peers of a level are joined."""

    SWITCHED = "switched"
    """Each with all others."""
    CLOSED = "closed"
    """Each with its two neighbours on an axis of a torus that closes."""
    OPEN = "open"
    """Each with its neighbours on an axis that ends."""


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """What joins one device to its peers at one level of the hardware.

    Attributes:
      latency_s: Time of one hop, for a message of no bytes.
      bandwidth_bytes_per_s: One-way bandwidth of one device.
      level: 0 inside a node, 1 between nodes, 2 and above further out.
      source: Where the two figures come from.
      collectives: What was measured of single kinds of collectives; it takes the place of the two figures.
      wires: How the peers are joined. Along an axis of a torus the bandwidth is that of a ring along it, and a
        collective over several such axes uses the wires of all of them at once.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    level: int
    source: str
    collectives: tuple[MeasuredCollective, ...] = ()
    wires: Wires = Wires.SWITCHED

    def __post_init__(self) -> None:
        require_text("link", "source", self.source)
        owner = f"link of level {self.level!r:.20}"
        checked = {
            "latency_s": require_number(owner, "latency_s", self.latency_s, zero_allowed=True),
            "bandwidth_bytes_per_s": require_number(owner, "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s),
            "level": require_whole(owner, "level", self.level, least=0),
        }
        for field, value in checked.items():
            object.__setattr__(self, field, value)
        object.__setattr__(self, "collectives", tuple(self.collectives))
        measured = [(m.kind, m.size) for m in self.collectives]
        if len(set(measured)) != len(measured):
            raise ClusterError(f"{owner}: each kind of collective must be measured once for each number of devices.")

    def figures(self, kind: CollectiveKind, size: int) -> MeasuredCollective:
        """The ring of `size` devices that does what `kind` does here: as measured, or by the link's own figures."""
        own = interpolated(self.collectives, kind, size) if self.collectives else None
        return own or MeasuredCollective(kind, size, self.latency_s, self.bandwidth_bytes_per_s)

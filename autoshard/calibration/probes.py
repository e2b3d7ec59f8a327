"""What is measured: a list of small programs, each of which every device runs at the same time.

Sizes follow the catalogue's figures of the device at hand, so that the same list suits a CPU core and a GPU: from sizes
at which overheads are all, up to those that take about `LONGEST_S`.
"""

import dataclasses
import enum
import math

from autoshard.cluster import CollectiveKind, DeviceType, Slice

LONGEST_S = 20e-3
"""What a single run of the largest product may take by the catalogue's figures, and a tenth of it the largest kernel
that only moves bytes."""
LARGEST_SHARE = 1 / 64
"""Of a device's memory, the most that one array of a probe takes."""
COLD_SHARE = 1 / 256
"""Of a device's memory, what the probes of memory go through: more than caches hold."""
SMALLEST_BYTES = 4096
NARROW_DIMS = (4, 8, 16, 32, 64, 128)
"""Least dimensions of products. From 128 on, matrix units and vector registers are filled."""
NUM_INDEPENDENT = 8
"""Collectives that a probe of joining lets the compiler join."""
ORDERED = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)
"""Kinds whose pieces are put in order where they run along an inner dimension."""
FUNCTION_CHAIN, ELEMENTWISE_CHAIN = 4, 32
"""Operations on each element in one round of the probes of arithmetic."""
ARITHMETIC_ELEMENTS, GPU_ARITHMETIC = 1 << 14, (1 << 20, 8)
"""Elements of these probes, which the cache of a CPU core holds; and on a GPU, with rounds in one kernel. An H100 has
270,000 threads to fill (with 2^14 elements, exponentials came out 20 times as slow as its units are), 50 MB of cache,
and moves 8 MB in the time of one round. A CPU core would run more rounds one after another, and not beside each other
(half as fast for 8)."""


class Measures(enum.Enum):
    """What a probe measures the time of."""

    LAUNCH = "launch"  # a product of 8 x 8 matrices: a kernel that has hardly any work
    PRODUCT = "product"  # one matrix product of `shape` (rows, summed, columns)
    MEMORY = "memory"  # reading and writing an array that no cache holds
    BOTH = "both"  # the functions of `FUNCTION` on an array that no cache holds
    FUNCTION = "function"  # exponentials and the like, `FUNCTION_CHAIN` on each element
    COPY = "copy"  # reading an array and writing it elsewhere
    TRANSPOSED = "transposed"  # the same, with its two dimensions in the other order
    ELEMENTWISE = "elementwise"  # multiplications and additions, `ELEMENTWISE_CHAIN` of each on each element
    COLLECTIVE = "collective"  # one collective on `shape` bytes
    INNER = "inner"  # one collective on `shape` (rows, columns) float32, along the columns
    BESIDE = "beside"  # a square product of `shape[0]`, as it is in the next
    # `NUM_INDEPENDENT` collectives on `shape[0]` bytes each, none of which needs another, nor the square product beside
    # them, of `shape[1]`
    INDEPENDENT = "independent"


ROW_BY_ROW = frozenset({Measures.MEMORY, Measures.BOTH})
"""What is measured of a loop that makes one row of an array at a time, with no other kernel beside."""


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """One small program.

    Attributes:
      measures: What its time is the time of.
      shape: On one device: dimensions of a product, elements of an array, bytes of a collective's larger side; or its
        dimensions, where it runs along the second.
      dtype: Of the elements.
      collective: Which collective. level: Index of the hardware level that it runs over. size: Devices that take part.
      rounds: How often a probe of arithmetic does its operations, one after another in one kernel.
    """

    measures: Measures
    shape: tuple[int, ...]
    dtype: str = "float32"
    collective: CollectiveKind | None = None
    level: int = 0
    size: int = 1
    rounds: int = 1

    @property
    def name(self) -> str:
        """A name that no other probe has, such as `product float32 64x64x64` or `all-gather level 0 of 8 65536`."""
        dims = "x".join(map(str, self.shape))
        if self.collective is None:
            rounds = f" {self.rounds} rounds" if self.rounds > 1 else ""
            return f"{self.measures.value} {self.dtype} {dims}{rounds}"
        count = f"{NUM_INDEPENDENT} x " if self.measures is Measures.INDEPENDENT else ""
        return f"{count}{self.collective.value} level {self.level} of {self.size} {dims}"


def probes(hardware: Slice, dtypes: tuple[str, ...], quick: bool) -> tuple[Probe, ...]:
    """All probes for the devices of `hardware`; `quick` takes fewer sizes."""
    device = hardware.device_type
    return (
        Probe(Measures.LAUNCH, (8, 8, 8)),
        *_products(device, dtypes, quick),
        *_memory(device, quick),
        *_transposed(device, quick),
        *_arithmetic(device),
        *_collectives(hardware, quick),
    )


def wide_dim(device: DeviceType) -> int:
    """The other two dimensions of narrow products: those of a square one of about a twentieth of `LONGEST_S`."""
    return 1 << max(7, round(math.log2((device.matmul_flops_per_s("float32") * LONGEST_S / 20 / 2) ** (1 / 3))))


def _products(device: DeviceType, dtypes: tuple[str, ...], quick: bool) -> tuple[Probe, ...]:
    found = []
    for dtype in dtypes:
        largest = (device.matmul_flops_per_s(dtype) * LONGEST_S / 2) ** (1 / 3)
        step = 4 if quick else 2
        dims = [16 * step**k for k in range(20) if 16 * step**k <= max(largest, 64)]
        found += [Probe(Measures.PRODUCT, (n, n, n), dtype) for n in dims]
    wide = wide_dim(device)
    for n in NARROW_DIMS[1::2] if quick else NARROW_DIMS:
        found += [Probe(Measures.PRODUCT, s) for s in ((n, wide, wide), (wide, n, wide), (wide, wide, n))]
    found.append(Probe(Measures.PRODUCT, (wide, wide, wide)))
    return tuple(dict.fromkeys(found))


def _memory(device: DeviceType, quick: bool) -> tuple[Probe, ...]:
    most_bytes = min(
        device.memory_bandwidth_bytes_per_s * LONGEST_S / 10 / 2,  # read and written
        device.memory_bytes * LARGEST_SHARE,
    )
    elements = [size // 4 for size in _sizes(most_bytes, 8 if quick else 4)]
    both = Probe(Measures.BOTH, (elements[-2],))  # large enough that the launch is nothing
    return (*(Probe(Measures.MEMORY, (n,)) for n in elements), both)


def _transposed(device: DeviceType, quick: bool) -> tuple[Probe, ...]:
    most_bytes = min(device.memory_bandwidth_bytes_per_s * LONGEST_S / 20, device.memory_bytes * LARGEST_SHARE)
    dims = [128]
    while 4 * (2 * dims[-1]) ** 2 <= most_bytes:
        dims.append(2 * dims[-1])
    return tuple(
        Probe(measures, (n, n))
        for n in (dims[::2] if quick else dims)
        for measures in (Measures.COPY, Measures.TRANSPOSED)
    )


def _arithmetic(device: DeviceType) -> tuple[Probe, ...]:
    elements, rounds = GPU_ARITHMETIC if device.is_gpu else (ARITHMETIC_ELEMENTS, 1)
    return tuple(Probe(m, (elements,), rounds=rounds) for m in (Measures.FUNCTION, Measures.ELEMENTWISE))


def _collectives(hardware: Slice, quick: bool) -> tuple[Probe, ...]:
    wide = wide_dim(hardware.device_type)
    found = [Probe(Measures.BESIDE, (wide,))] if hardware.levels else []
    for index, level in enumerate(hardware.levels):
        most_bytes = min(
            level.link.bandwidth_bytes_per_s * LONGEST_S / 20, hardware.device_type.memory_bytes * LARGEST_SHARE
        )
        sizes = [n for n in range(2, level.size + 1) if level.size % n == 0]
        if quick and len(sizes) > 2:
            sizes = [sizes[0], sizes[-1]]
        for size in sizes:
            for kind in CollectiveKind:
                found += [
                    Probe(Measures.COLLECTIVE, (size_bytes,), collective=kind, level=index, size=size)
                    for size_bytes in _sizes(most_bytes, 16 if quick else 4, parts=size)
                ]
                least_bytes = _sizes(SMALLEST_BYTES, 4, parts=size)[0]
                if kind in ORDERED:
                    found += [
                        Probe(Measures.INNER, (n, n), collective=kind, level=index, size=size)
                        for n in _square_dims(most_bytes, quick, parts=size)
                    ]
                if kind is not CollectiveKind.ALL_REDUCE:  # those of the partitioner are joined on every platform
                    shape = least_bytes, wide
                    found.append(Probe(Measures.INDEPENDENT, shape, collective=kind, level=index, size=size))
    return tuple(found)


def _square_dims(most_bytes: float, quick: bool, parts: int) -> list[int]:
    """Dimensions of square float32 arrays of about `most_bytes` and of fewer, rounded up to multiples of `parts`."""
    largest = max(128, 2 ** math.floor(math.log2((most_bytes / 4) ** 0.5)))
    dims = [largest] if quick or largest == 128 else [largest // 4 if largest > 256 else 128, largest]
    return [math.ceil(n / parts) * parts for n in dims]


def _sizes(most_bytes: float, step: int, parts: int = 1) -> list[int]:
    """Bytes from `SMALLEST_BYTES` on, each `step` times the one before; rounded up to `parts` x 4 bytes."""
    steps = max(1, math.floor(math.log(max(most_bytes / SMALLEST_BYTES, 1.0), step)))
    unit = 4 * parts
    return [math.ceil(SMALLEST_BYTES * step**k / unit) * unit for k in range(steps + 1)]

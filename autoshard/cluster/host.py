"""What a node's devices are plugged into: its CPUs, its memory, and the links between that memory and each device."""

import dataclasses

from autoshard.cluster.checks import require_number, require_text, require_whole
from autoshard.cluster.device import Link


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """The host of one node.

    Attributes:
      num_cpus: Cores of all its processors.
      memory_bytes: Its memory.
      source: Where the figures come from.
      memory_bandwidth_bytes_per_s: Peak rate of reading or writing that memory, of all processors; None if not known.
      flops_per_s: Peak of all cores at float32; None if not known.
      to_device: The link between this memory and one device while all others are as busy, the same each way; None if
        not known.
    """

    num_cpus: int
    memory_bytes: int
    source: str
    memory_bandwidth_bytes_per_s: float | None = None
    flops_per_s: float | None = None
    to_device: Link | None = None

    def __post_init__(self) -> None:
        require_text("host", "source", self.source)
        object.__setattr__(self, "num_cpus", require_whole("host", "num_cpus", self.num_cpus))
        object.__setattr__(self, "memory_bytes", require_whole("host", "memory_bytes", self.memory_bytes))
        for name in ("memory_bandwidth_bytes_per_s", "flops_per_s"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, require_number("host", name, value))

    def __str__(self) -> str:
        return f"{self.num_cpus} CPUs, {self.memory_bytes / 1e9:.0f} GB"

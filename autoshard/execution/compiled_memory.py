"""What a compiler says of the memory of a program."""

import dataclasses
from typing import Any

_NO_PEAK = ("cpu", "tpu")
"""Platforms whose compilers tell no peak: XLA:TPU says 0, XLA:CPU leaves the temporaries out (tried on jax 0.10.2)."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledMemory:
    """What the compiler says of one device's memory, in bytes.

    Attributes:
      argument_bytes, output_bytes: Of the interface. alias_bytes: Of outputs that take the place of arguments.
      temporary_bytes: Everything else that it reserves. peak_bytes: The most in use at once, by its own account.
      host_bytes: Of arguments and temporaries in the memory of the host, which are in none of the others.
    """

    argument_bytes: float
    output_bytes: float
    alias_bytes: float
    temporary_bytes: float
    peak_bytes: float
    host_bytes: float = 0.0

    @classmethod
    def of(cls, compiled: Any, platform: str) -> "CompiledMemory":
        """The memory of what `.compile()` returned for devices of a `platform`, as JAX calls it."""
        stats = compiled.memory_analysis()
        host_bytes = float(getattr(stats, "host_argument_size_in_bytes", 0))
        host_temporary_bytes = float(getattr(stats, "host_temp_size_in_bytes", 0))
        memory = cls(
            float(stats.argument_size_in_bytes),
            float(stats.output_size_in_bytes),
            float(stats.alias_size_in_bytes),
            float(stats.temp_size_in_bytes),
            float(getattr(stats, "peak_memory_in_bytes", 0)) - host_bytes,  # XLA:GPU counts them in (jax 0.10.2)
            host_bytes + host_temporary_bytes,
        )
        return dataclasses.replace(memory, peak_bytes=memory.total_bytes) if platform in _NO_PEAK else memory

    @property
    def total_bytes(self) -> float:
        """What must be there for the program to run: arguments, outputs of their own, and temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes

"""Compiling a planned step ahead of time, for devices that need not be there."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental import topologies

from autoshard.plans.plan import Plan
from autoshard.verify.targets import GpuTarget


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledMemory:
    """What the compiler says of one device's memory, in bytes.

    Attributes:
      argument_bytes, output_bytes: Of the interface. alias_bytes: Of outputs that take the place of arguments.
      temporary_bytes: Everything else that it reserves. peak_bytes: The most in use at once, by its own account.
    """

    argument_bytes: float
    output_bytes: float
    alias_bytes: float
    temporary_bytes: float
    peak_bytes: float

    @property
    def total_bytes(self) -> float:
        """What must be there for the program to run: arguments, outputs of their own, and temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledStep:
    """The optimised program of one device, as text, and its memory."""

    text: str
    memory: CompiledMemory


def gpu_devices(target: GpuTarget, num_devices: int, devices_per_node: int) -> Sequence[Any]:
    """Devices of a kind that is not there, `devices_per_node` to a host."""
    nodes = num_devices // devices_per_node
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x{nodes}x{devices_per_node}", target_config=target.text
    )
    return topology.devices


def compile_step(
    plan: Plan, fn: Callable[..., Any], args: Sequence[Any], devices: Sequence[Any], options: dict[str, Any]
) -> CompiledStep:
    """Compiles `fn(*args)` as planned for `devices`; nothing runs."""
    compiled = plan.jit(fn, devices=devices).lower(*args).compile(compiler_options=options)
    stats = compiled.memory_analysis()
    memory = CompiledMemory(
        float(stats.argument_size_in_bytes),
        float(stats.output_size_in_bytes),
        float(stats.alias_size_in_bytes),
        float(stats.temp_size_in_bytes),
        float(stats.peak_memory_in_bytes),
    )
    return CompiledStep(compiled.as_text(), memory)

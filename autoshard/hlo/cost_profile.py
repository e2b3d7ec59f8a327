"""A cost profile for XLA:GPU's latency-hiding scheduler, from the cost model instead of a profiler.

XLA reads from a file what instructions cost, by the names that they have before they are scheduled
(`xla_gpu_pgle_profile_file_or_directory_path`; OpenXLA, `ProfiledInstructionsProto`). What the file leaves out costs
what XLA's own estimator says. Made of a compiled program by the formulas that price plans, it lets the scheduler of the
next compile work with the plan's cost model.
"""

import dataclasses
import re
from collections.abc import Mapping

from autoshard.cluster import LogicalMesh
from autoshard.hlo.instruction_pricing import InstructionPricing, collectives_s
from autoshard.hlo.module import HloModule, Instruction

_SCHEDULING_NAME = re.compile(r'scheduling_name="([^"]+)"')


@dataclasses.dataclass(frozen=True, slots=True)
class InstructionCost:
    """What one run of an instruction takes, by the name that the scheduler knows it by."""

    name: str
    time_s: float


def instruction_costs(
    module: HloModule, mesh: LogicalMesh, in_flight_s: Mapping[str, float] | None = None
) -> tuple[InstructionCost, ...]:
    """What each kernel, collective and loop of a program takes, those of nothing left out.

    Args:
      module: The compiled program of one device.
      mesh: The logical mesh that it was compiled for, whose links and devices price it.
      in_flight_s: What each collective is to be given between its begin and its end, by name; its own time if None.
    """
    pricing = InstructionPricing(module, mesh, collectives_s(module, mesh) if in_flight_s is None else in_flight_s)
    found = []
    for computation in module.scheduled():
        for instruction in computation.instructions.values():
            time_s = pricing.instruction_s(computation, instruction)
            if time_s:
                found.append(InstructionCost(scheduling_name(instruction), time_s))
    return tuple(found)


def cost_profile(costs: tuple[InstructionCost, ...]) -> str:
    """The costs as XLA reads them: a `ProfiledInstructionsProto` in text format."""
    return "".join(f'costs {{ name: "{c.name}" cost_us: {c.time_s * 1e6:.3f} }}\n' for c in costs)


def scheduling_name(instruction: Instruction) -> str:
    """The name that an instruction has when the scheduler sees it."""
    found = _SCHEDULING_NAME.search(instruction.attributes)
    return found.group(1) if found else instruction.name

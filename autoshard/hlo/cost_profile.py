"""A cost profile for XLA:GPU's latency-hiding scheduler, from the cost model instead of a profiler.

XLA reads from a file what instructions cost, by the names that they have before they are scheduled
(`xla_gpu_pgle_profile_file_or_directory_path`; OpenXLA, `ProfiledInstructionsProto`). What the file leaves out costs
what XLA's own estimator says. Made of a compiled program by the formulas that price plans, it lets the scheduler of the
next compile work with the plan's cost model.

Copies to and from hosts are left out while they take less than XLA takes for granted: the time that the file gives one
counts as that of a kernel as well, behind which others would seem to hide.
"""

import dataclasses
import math
import re

from autoshard.cluster import LogicalMesh
from autoshard.hlo.collectives import compiled_collectives
from autoshard.hlo.compiled_schedule import collective_in, collective_s, copied_s
from autoshard.hlo.kernel_cost import kernel_s
from autoshard.hlo.module import Computation, HloModule, Instruction

_XLA_COPY_S = 5e-3
"""What XLA:GPU's scheduler takes a copy to or from the host to take that the profile leaves out: it is ready to begin
5,000 units before it ends (log of `latency_hiding_scheduler`, jax 0.10.2). Of a GPT's 52 copies of 2.1 to 10.5 ms, 135
ms in all (width 4,096, 8 layers, 8 H100; a script that is not kept), replays waited for 6 ms so, for 15 with all left
out, and for 49 with none."""

_SCHEDULING_NAME = re.compile(r'scheduling_name="([^"]+)"')


@dataclasses.dataclass(frozen=True, slots=True)
class InstructionCost:
    """What one run of an instruction takes, by the name that the scheduler knows it by."""

    name: str
    time_s: float


def instruction_costs(module: HloModule, mesh: LogicalMesh, queueing: float = 1.0) -> tuple[InstructionCost, ...]:
    """What each kernel, collective and loop of a program takes, those of nothing left out.

    Args:
      module: The compiled program of one device.
      mesh: The logical mesh that it was compiled for, whose links and devices price it.
      queueing: How many times as long as by itself a collective takes, since others are on its link.
    """
    pricing = _Pricing(module, mesh, {name: queueing * s for name, s in _collectives_s(module, mesh).items()})
    runs = (r for r in module.runs() if r.caller is None or r.caller.instruction.opcode != "async-start")
    scheduled = dict.fromkeys(run.computation.name for run in runs)
    found = []
    for computation in map(module.computations.__getitem__, scheduled):
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


def _collectives_s(module: HloModule, mesh: LogicalMesh) -> dict[str, float]:
    axes = tuple((axis.name, axis.size) for axis in mesh.axes)
    return {c.name: collective_s(c, mesh) for c in compiled_collectives(module, axes)}


@dataclasses.dataclass(frozen=True, slots=True)
class _Pricing:
    """What instructions are priced by."""

    module: HloModule
    mesh: LogicalMesh
    collectives_s: dict[str, float]

    def instruction_s(self, computation: Computation, instruction: Instruction) -> float:
        """A collective counts at its begin, a loop as the kernels of all its iterations."""
        collective = collective_in(self.module, instruction, self.collectives_s)
        if collective is not None:
            return self.collectives_s[collective]
        match instruction.opcode:
            case "while":
                return self.module.trips(instruction) * self._kernels_s(instruction.called_as("body"))
            case "conditional":
                return math.fsum(map(self._kernels_s, instruction.called)) / len(instruction.called)
            case "call":
                return self._kernels_s(instruction.called[0])
            case "copy-start":
                time_s = copied_s(instruction, self.mesh)
                return time_s if time_s > _XLA_COPY_S else 0.0
            case opcode if opcode.endswith("-done"):
                return 0.0
        return kernel_s(self.mesh.device_type, self.module, computation, instruction)

    def _kernels_s(self, name: str) -> float:
        """Kernels of a computation, its collectives left out: they may run beside them."""
        computation = self.module.computations[name]
        return math.fsum(
            self.instruction_s(computation, instruction)
            for instruction in computation.instructions.values()
            if collective_in(self.module, instruction, self.collectives_s) is None
        )

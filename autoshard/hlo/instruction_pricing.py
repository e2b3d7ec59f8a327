"""What the instructions of a compiled program take by the cost model, as XLA:GPU's scheduler is to count them.

Copies to and from hosts are left out while they take less than XLA takes for granted: the time that a profile gives one
counts as that of a kernel as well, behind which others would seem to hide.
"""

import dataclasses
import math
from collections.abc import Mapping

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


def collectives_s(module: HloModule, mesh: LogicalMesh) -> dict[str, float]:
    """What one run of each collective of a program takes by itself, by name."""
    axes = tuple((axis.name, axis.size) for axis in mesh.axes)
    return {c.name: collective_s(c, mesh) for c in compiled_collectives(module, axes)}


@dataclasses.dataclass(frozen=True, slots=True)
class InstructionPricing:
    """What instructions of a program are priced by; `collectives_s`: what each collective takes, by name."""

    module: HloModule
    mesh: LogicalMesh
    collectives_s: Mapping[str, float]

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

"""What XLA:TPU expects its own kernels to take."""

import re

from autoshard.hlo.module import HloModule, Instruction

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def cycles_of(instruction: Instruction) -> float | None:
    """Cycles that XLA:TPU expects one run of a kernel to take; None where it tells none.

    It tells none of collectives and of copies that run beside the kernels.
    """
    found = _CYCLES.search(instruction.attributes)
    return float(found.group(1)) if found else None


def estimated_cycles(module: HloModule) -> float | None:
    """`cycles_of` all kernels of one step; None where the compiler tells none."""
    told = [(cycles_of(run.instruction), run.times) for run in module.runs()]
    found = [cycles * times for cycles, times in told if cycles is not None]
    return sum(found) if found else None

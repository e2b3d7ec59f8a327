"""What XLA:TPU expects its own kernels to take."""

import re

from autoshard.hlo.module import HloModule

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def estimated_cycles(module: HloModule) -> float | None:
    """Cycles that XLA:TPU expects its own kernels to take in one step; None where the compiler tells none.

    It tells none of collectives and of copies that run beside the kernels.
    """
    found = [
        (float(cycles.group(1)), run.times)
        for run in module.runs()
        if (cycles := _CYCLES.search(run.instruction.attributes)) is not None
    ]
    return sum(c * times for c, times in found) if found else None

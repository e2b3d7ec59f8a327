"""What kernels and sums of a program take on a mesh before anything is chosen: by which sums are given time to hide."""

import math
from collections.abc import Sequence

import numpy as np

from autoshard.cluster import LogicalMesh, MeshAxis
from autoshard.compiler.pace import Pace
from autoshard.cost.collectives import launched, reduce_scatter, rings
from autoshard.planner.choices import ChoiceTable
from autoshard.planner.program import Program

_SUMMED_BYTES = 2.0**30
"""Of the gradient by which all sums are timed: each takes longer evenly with its bytes."""


def pace_of(program: Program, tables: Sequence[ChoiceTable], mesh: LogicalMesh) -> Pace:
    """The pace of `program` on `mesh`; `tables` are those of its groups."""
    kernels_s = np.zeros(len(program.graph.operations))
    for group, table in zip(program.groups, tables, strict=True):
        kernels_s[program.analysis.kernel_of[group.index]] += group.trips * float(table.compute_s.min())
    before_s = np.concatenate([[0.0], np.cumsum(kernels_s)])
    levels = rings(mesh.axes)
    between = [level for level in levels if level.link.level == levels[-1].link.level]  # none on one device
    slowest = MeshAxis("slowest", math.prod(level.size for level in between), tuple(between))
    summed = launched(reduce_scatter([slowest], _SUMMED_BYTES * slowest.size / mesh.num_devices), mesh.device_type)
    return Pace(tuple(before_s.tolist()), summed.fixed_s, (summed.time_s - summed.fixed_s) / _SUMMED_BYTES)

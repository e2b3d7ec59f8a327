"""Programs with hand-made layouts, as the compiler is given them. Lets the tests of this folder import `planned`."""

import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence

import pytest

from autoshard.compiler.solved import Move, SolvedProgram
from autoshard.cost.collectives import Collective
from autoshard.graph.layout import Layout
from autoshard.planner.build import Formulation

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def _solved(
    f: Formulation,
    layouts: Mapping[int, Layout],
    targets: Sequence[Layout],
    sums: Sequence[Sequence[Collective]] | None = None,
    collectives: Sequence[Sequence[Collective]] | None = None,
) -> SolvedProgram:
    first_group = len(f.program.graph.arguments)
    moves = [
        Move(
            value=flow.value,
            group=None if flow.read is None else flow.target - first_group,
            read=flow.read,
            itemsize_bytes=flow.itemsize_bytes,
            trips=flow.trips,
            target=target,
            collectives=steps,
        )
        for flow, target, steps in zip(f.flows, targets, collectives or [()] * len(f.flows), strict=True)
    ]
    return SolvedProgram(
        analysis=f.program.analysis,
        mesh=f.mesh,
        layouts=layouts,
        sums=tuple(sums or [()] * len(f.program.groups)),
        moves=tuple(moves),
    )


@pytest.fixture(scope="session")
def solved() -> Callable[..., SolvedProgram]:
    """Makes a solved program: (f, layout of each value, target of each flow, collectives of groups and of flows)."""
    return _solved

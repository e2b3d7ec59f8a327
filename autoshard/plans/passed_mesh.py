"""What was found on a mesh that a walk passed by, without its problem, which is as large as the program."""

import dataclasses
from collections.abc import Mapping

from autoshard.cluster import LogicalMesh
from autoshard.planner.overlap import StretchWeights
from autoshard.plans.known_plan import Made
from autoshard.plans.program_plan import MeshCandidate
from autoshard.solver.problem import Solution


@dataclasses.dataclass(frozen=True, slots=True)
class PassedMesh:
    """The best plan that was found on a mesh.

    Attributes:
      mesh: The mesh. priced_with: Weights of stretches in its problem; None where nothing hides.
      solution: The plan. candidates: What became of the mesh.
      weights, prices, fits, others: As of `Found`.
    """

    mesh: LogicalMesh
    priced_with: StretchWeights | None
    solution: Solution
    candidates: tuple[MeshCandidate, ...]
    weights: StretchWeights | None
    prices: Mapping[int, float]
    fits: bool
    others: tuple[Made, ...]

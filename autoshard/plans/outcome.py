"""What a search found on a mesh, without its problem, which is as large as the program: what one process tells another,
and what is kept of meshes that are passed by."""

import dataclasses
from collections.abc import Mapping

from autoshard.cluster import LogicalMesh
from autoshard.planner.overlap import StretchWeights
from autoshard.plans.known_plan import Made
from autoshard.plans.program_plan import MeshCandidate
from autoshard.solver.problem import Solution


@dataclasses.dataclass(frozen=True, slots=True)
class Best:
    """The best plan on a mesh.

    Attributes:
      mesh: The mesh. priced_with: Weights of stretches in its problem; None where nothing hides.
      own_cost_s: What its choices cost in that problem but for moves, by which it is told from another.
      solution: The plan and its certificate. step_s: Its step, by which it is compared with others.
      All others as of `Found`.
    """

    mesh: LogicalMesh
    priced_with: StretchWeights | None
    own_cost_s: float
    solution: Solution
    step_s: float
    weights: StretchWeights | None
    prices: Mapping[int, float]
    fits: bool
    others: tuple[Made, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a search found on a mesh.

    Attributes:
      best: The plan; None if there is none. candidates, warnings: As of `Found`.
    """

    best: Best | None
    candidates: tuple[MeshCandidate, ...]
    warnings: tuple[str, ...]

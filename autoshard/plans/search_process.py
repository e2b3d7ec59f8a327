"""A process that searches meshes for another one, which starts it (`search_processes.py`) by this file's name."""

from autoshard.child_process import serve
from autoshard.interrupts import StopRequest
from autoshard.planner.mesh_prices import PricesOfMeshes
from autoshard.planner.program import Program
from autoshard.plans.outcome import Outcome
from autoshard.plans.search_processes import NewProgram
from autoshard.plans.side_by_side import Request, answered


class _Answers:
    """Answers one request after another; keeps the latest program, and what choices cost on each mesh."""

    def __init__(self) -> None:
        self._program: Program | None = None
        self._prices = PricesOfMeshes()

    def __call__(self, request: Request | NewProgram) -> Outcome | None:
        if isinstance(request, NewProgram):
            self._program = request.program
            return None
        assert self._program is not None
        return answered(request, self._program, self._prices, StopRequest())


if __name__ == "__main__":
    serve(_Answers())

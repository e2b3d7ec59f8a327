"""What the planner asks of a compiler.

A compiler is asked about one program at a time, before the solve under all choices of its groups at once, and after it
with all layouts known. It is told of graph, groups, values and layouts, and never of the solver's problem. What holds
whatever the mesh and the device is found once (`analysis.py`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.compiler.buffer_assignment import LiveBuffers
from autoshard.compiler.buffer_uses import BufferUse, Choices, OperandRead
from autoshard.compiler.emitted_collectives import EmittedCollectives
from autoshard.compiler.hiding_spans import HidingSpans
from autoshard.compiler.latency_hiding import Program
from autoshard.compiler.ordering import OrderingRules
from autoshard.compiler.pace import Pace
from autoshard.compiler.solved import SolvedProgram
from autoshard.compiler.transfer_times import TransferTimes
from autoshard.cost.exposure import Exposure
from autoshard.graph.graph import Graph


class Compiler(Protocol):
    """The laws of one compiler."""

    @property
    def hides_collectives(self) -> bool:
        """Whether collectives that nobody waits for run beside kernels."""
        ...

    @property
    def hides_sums(self) -> bool:
        """Whether sums are among these: all-reduces and reduce-scatters of gradients."""
        ...

    @property
    def hides_exchanged_sums(self) -> bool:
        """Whether, of sums, those are among these that are made by an exchange (`exchanged_sums.py`)."""
        ...

    @property
    def adds_before_scattering(self) -> bool:
        """Whether it makes one reduce-scatter of several whose results are added, behind the addition."""
        ...

    @property
    def least_hidden_bytes(self) -> float:
        """Of what is moved: smaller values are neither hidden nor joined with others."""
        ...

    # ---- before the solve: under all choices

    def paced(self, pace: Pace) -> "Compiler":
        """The same compiler, asked for a program of which is known what its kernels and sums take."""
        ...

    def spans(self, graph: Graph) -> HidingSpans | None:
        """When collectives run behind products, and how long what they move is there; None where they run in turn with
        kernels."""
        ...

    def moved_itemsize(self, analysis: ProgramAnalysis, value: int, read_by: Sequence[int]) -> int:
        """The bytes of an element of `value` as it is moved to the operations `read_by`."""
        ...

    def buffers(self, analysis: ProgramAnalysis, choices: Choices) -> Iterator[BufferUse]:
        """What is alive when, under every choice: stored values, partial sums, workspaces."""
        ...

    def operand_copies(
        self, analysis: ProgramAnalysis, reads: Iterable[tuple[int, OperandRead]]
    ) -> Iterator[BufferUse]:
        """When resharded copies are alive, of all that may read a value in another layout, each with its owner."""
        ...

    # ---- in the plan: what execution makes the compiler do

    @property
    def ordering(self) -> OrderingRules:
        """What must be ordered or kept (`ordering.py`)."""
        ...

    # ---- after the solve: with all layouts known

    def emitted(self, solved: SolvedProgram) -> EmittedCollectives:
        """The collectives that the program compiles to."""
        ...

    def live_buffers(
        self,
        solved: SolvedProgram,
        uses: Sequence[BufferUse],
        sizes_bytes: np.ndarray,
        times: TransferTimes | None,
        added: Mapping[int, int],
    ) -> LiveBuffers:
        """What is alive when: the buffers `uses`, which take `sizes_bytes` as counted, as long as they are needed.

        `times`: When what hides is sent by the plan's own schedule; None where nothing does.
        `added`: As of `EmittedCollectives`.
        """
        ...

    def reserved_bytes(self, solved: SolvedProgram, held: LiveBuffers) -> float:
        """The memory that the program needs once each of its buffers has a place."""
        ...

    def scheduled(self, program: Program, has_room: bool) -> Exposure | None:
        """What kernels wait for collectives in its own schedule; None where that is not told apart from the best.

        `has_room`: Whether there is memory for what would be gathered again.
        """
        ...

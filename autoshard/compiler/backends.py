"""The compilers that there are: XLA for GPUs, for TPUs and for CPUs, and which of them a device has.

Their laws were read off XLA:GPU's programs; what is said of no backend alone is taken to hold for all of them.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from autoshard.cluster import DeviceType
from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.compiler.buffer_assignment import LiveBuffers, live_buffers, reserved_bytes
from autoshard.compiler.buffer_uses import BufferKind, BufferUse, Choices, OperandRead
from autoshard.compiler.collective_dtypes import rounded_itemsize
from autoshard.compiler.emitted_collectives import EmittedCollectives, emitted
from autoshard.compiler.hiding_spans import UNTIMED_PRODUCTS, HidingSpans
from autoshard.compiler.kept_arguments import keeping_arguments, with_kept_argument
from autoshard.compiler.latency_hiding import Program, latency_hidden
from autoshard.compiler.live_buffers import shortened
from autoshard.compiler.made_first import made_first
from autoshard.compiler.normalized_rows import normalized_rows
from autoshard.compiler.operand_copies import operand_copies
from autoshard.compiler.ordering import OrderingRules
from autoshard.compiler.pace import Pace
from autoshard.compiler.partial_sums import partial_sums, until_added
from autoshard.compiler.protocol import Compiler
from autoshard.compiler.queued_gathers import queued
from autoshard.compiler.schedule import Schedule
from autoshard.compiler.softmax import stored_exponentials
from autoshard.compiler.solved import SolvedProgram
from autoshard.compiler.stored_values import stored_values
from autoshard.compiler.transfer_times import TransferTimes
from autoshard.compiler.widened import widened
from autoshard.compiler.workspaces import laid_out, own_workspaces, product_workspaces
from autoshard.cost.exposure import Exposure
from autoshard.graph.graph import Graph


@dataclasses.dataclass(frozen=True, slots=True)
class XlaCpu:
    """XLA:CPU, and what all of XLA's backends have in common."""

    @property
    def hides_collectives(self) -> bool:
        """See `Compiler`."""
        return False

    @property
    def hides_sums(self) -> bool:
        """See `Compiler`."""
        return self.hides_collectives

    @property
    def hides_exchanged_sums(self) -> bool:
        """See `Compiler`."""
        return False

    @property
    def adds_before_scattering(self) -> bool:
        """See `Compiler`: `ReduceScatterReassociate`."""
        return True

    @property
    def least_hidden_bytes(self) -> float:
        """See `Compiler`."""
        return 0.0

    @property
    def hidden_behind(self) -> int:
        """How many products it puts beside a gather (`hiding_spans.py`)."""
        return 1

    def paced(self, pace: Pace) -> "XlaCpu":
        """See `Compiler`: nothing depends on it."""
        return self

    def spans(self, graph: Graph) -> HidingSpans | None:
        """See `Compiler`."""
        if not self.hides_collectives:
            return None
        return HidingSpans(graph, self.hides_sums, self.hides_exchanged_sums, self.hidden_behind)

    @property
    def ordering(self) -> OrderingRules:
        """See `Compiler`."""
        return OrderingRules()

    def moved_itemsize(self, analysis: ProgramAnalysis, value: int, read_by: Sequence[int]) -> int:
        """See `Compiler`: what was widened is moved before."""
        return analysis.moved_itemsizes[value]

    def buffers(self, analysis: ProgramAnalysis, choices: Choices) -> Iterator[BufferUse]:
        """See `Compiler`."""
        yield from stored_values(analysis, choices)
        yield from partial_sums(analysis, choices)
        yield from own_workspaces(analysis, choices.groups)

    def operand_copies(
        self, analysis: ProgramAnalysis, reads: Iterable[tuple[int, OperandRead]]
    ) -> Iterator[BufferUse]:
        """See `Compiler`."""
        return operand_copies(analysis, reads)

    def emitted(self, solved: SolvedProgram) -> EmittedCollectives:
        """See `Compiler`."""
        return emitted(solved)

    def live_buffers(
        self,
        solved: SolvedProgram,
        uses: Sequence[BufferUse],
        sizes_bytes: np.ndarray,
        times: TransferTimes | None,
        added: Mapping[int, int],
    ) -> LiveBuffers:
        """See `Compiler`."""
        first, hides = made_first(solved, self.ordering), self.hides_collectives and self.hides_sums
        spans, sizes_bytes = shortened(solved, uses, sizes_bytes, first, hides)
        spans = until_added(uses, spans, added)
        if times is not None and self.hides_sums:
            spans = queued(solved, uses, spans, times)
        return live_buffers(uses, spans, sizes_bytes)

    def reserved_bytes(self, solved: SolvedProgram, held: LiveBuffers) -> float:
        """See `Compiler`."""
        return reserved_bytes(solved, held)

    def scheduled(self, program: Program, has_room: bool) -> Exposure | None:
        """See `Compiler`."""
        return None


_LEAST_HIDDEN_BYTES = 2.0**20
"""XLA:TPU has one gather in flight at a time, and joins none: that of a norm's scale had the last product of each layer
for itself (GPT of 8 layers, 16 TPU v5e). So kernels are taken to wait for what is smaller, and plans keep it whole."""


@dataclasses.dataclass(frozen=True, slots=True)
class XlaTpu(XlaCpu):
    """XLA:TPU: float32 products read bfloat16, and what they read is rounded before it is moved.

    It runs gathers and exchanges beside kernels, and makes kernels wait for sums (tried on libtpu 0.0.42.1), so that
    sums of gradients are exchanged.

    Attributes:
      schedule: Which of its schedules its program is ordered for.
    """

    schedule: Schedule = Schedule.LEAST_MEMORY

    @property
    def hides_collectives(self) -> bool:
        """See `Compiler`."""
        return self.schedule is Schedule.LATENCY_HIDING

    @property
    def hides_sums(self) -> bool:
        """See `Compiler`."""
        return False

    @property
    def hides_exchanged_sums(self) -> bool:
        """See `Compiler`."""
        return self.hides_collectives

    @property
    def adds_before_scattering(self) -> bool:
        """See `Compiler`: it gathered both terms, added them whole, and took a slice."""
        return False

    @property
    def least_hidden_bytes(self) -> float:
        """See `Compiler`."""
        return _LEAST_HIDDEN_BYTES if self.hides_collectives else 0.0

    @property
    def ordering(self) -> OrderingRules:
        """See `Compiler`."""
        exchanged = self.least_hidden_bytes if self.hides_exchanged_sums else None
        return OrderingRules(
            transposes_in_products=True,
            fuses_products=True,
            exchanges_from_bytes=exchanged,
            schedule=self.schedule,
        )

    def buffers(self, analysis: ProgramAnalysis, choices: Choices) -> Iterator[BufferUse]:
        """See `Compiler`."""
        yield from stored_values(analysis, choices)
        yield from partial_sums(analysis, choices, self.spans(analysis.graph))
        yield from own_workspaces(analysis, choices.groups)

    def operand_copies(
        self, analysis: ProgramAnalysis, reads: Iterable[tuple[int, OperandRead]]
    ) -> Iterator[BufferUse]:
        """See `Compiler`."""
        return operand_copies(analysis, reads, self.spans(analysis.graph))

    def moved_itemsize(self, analysis: ProgramAnalysis, value: int, read_by: Sequence[int]) -> int:
        """See `Compiler`."""
        return rounded_itemsize(analysis.graph, value, analysis.moved_itemsizes[value], analysis.rounding, read_by)


_HOPPER_WORKSPACE_BYTES = 32 * 2**20
"""What XLA:GPU gives a product from Hopper on, which is also from when it computes in bfloat16 (`widened.py`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class XlaGpu(XlaCpu):
    """XLA:GPU: cuBLAS's products have a workspace, and softmaxes are kernels of Triton's.

    Attributes:
      workspace_bytes: Of one product (`DeviceType.product_workspace_bytes`).
      schedule: Which of its schedules it is asked for.
      pace: What kernels and sums take on the mesh, by which sums are given time to hide; None if it is not known.
    """

    workspace_bytes: int
    schedule: Schedule = Schedule.LEAST_MEMORY
    pace: Pace | None = None

    @property
    def hides_collectives(self) -> bool:
        """See `Compiler`."""
        return self.schedule is Schedule.LATENCY_HIDING

    @property
    def is_hopper(self) -> bool:
        """Whether it compiles for Hopper or later."""
        return self.workspace_bytes >= _HOPPER_WORKSPACE_BYTES

    @property
    def hidden_behind(self) -> int:
        """See `XlaCpu`."""
        return 1 if self.is_hopper else UNTIMED_PRODUCTS

    def paced(self, pace: Pace) -> "XlaGpu":
        """See `Compiler`: it has sums wait as long as hides them."""
        return dataclasses.replace(self, pace=pace)

    def spans(self, graph: Graph) -> HidingSpans | None:
        """See `Compiler`."""
        return HidingSpans(graph, hidden_behind=self.hidden_behind, pace=self.pace) if self.hides_collectives else None

    @property
    def ordering(self) -> OrderingRules:
        """See `Compiler`."""
        return OrderingRules(
            float(self.workspace_bytes),
            turns_rows=True,
            turns_kernels=True,
            sums_by_block=True,
            schedule=self.schedule,
            pace=self.pace,
        )

    def buffers(self, analysis: ProgramAnalysis, choices: Choices) -> Iterator[BufferUse]:
        """See `Compiler`."""
        wide = frozenset() if self.is_hopper else widened(analysis)
        keeping = keeping_arguments(analysis) if self.is_hopper and not self.hides_collectives else frozenset()
        for use in stored_values(analysis, choices, self.hides_collectives):
            if use.value in wide:
                use = dataclasses.replace(use, size_bytes=2 * use.size_bytes)
            is_keeping = use.kind is BufferKind.VALUE and use.owner in keeping
            yield with_kept_argument(use) if is_keeping else use
        yield from stored_exponentials(analysis, choices)
        yield from normalized_rows(analysis, choices)
        yield from partial_sums(analysis, choices, self.spans(analysis.graph))
        yield from product_workspaces(analysis, choices.groups, self.workspace_bytes)
        yield from laid_out(analysis, choices.groups, choices.mesh_shape)
        yield from own_workspaces(analysis, choices.groups)

    def operand_copies(
        self, analysis: ProgramAnalysis, reads: Iterable[tuple[int, OperandRead]]
    ) -> Iterator[BufferUse]:
        """See `Compiler`."""
        return operand_copies(analysis, reads, self.spans(analysis.graph))

    def scheduled(self, program: Program, has_room: bool) -> Exposure | None:
        """See `Compiler`."""
        return latency_hidden(program, has_room) if self.hides_collectives else None


def schedules_of(device_type: DeviceType, num_devices: int) -> tuple[Schedule, ...]:
    """What the compiler of a kind of device is asked for if the user says nothing, the fastest first.

    One TPU sends nothing that could hide.
    """
    hides = device_type.is_gpu or device_type.rounds_products and num_devices > 1
    return (Schedule.LATENCY_HIDING, Schedule.LEAST_MEMORY) if hides else (Schedule.LEAST_MEMORY,)


def copies_from_hosts_in_turn(device_type: DeviceType) -> bool:
    """Whether its compiler copies from the host when it is ordered to (`host_state.py`). XLA:TPU does not: it drops the
    barriers, and has all such state on the device before the first update (libtpu of jax 0.10.2, TPU v5e).
    """
    return not device_type.rounds_products


def compiler_of(device_type: DeviceType, schedule: Schedule) -> Compiler:
    """The compiler of a kind of device; only products of TPUs are rounded.

    `schedule`: What it is asked for, if it has several.
    """
    if device_type.is_gpu:
        return XlaGpu(device_type.product_workspace_bytes, schedule)
    return XlaTpu(schedule) if device_type.rounds_products else XlaCpu()

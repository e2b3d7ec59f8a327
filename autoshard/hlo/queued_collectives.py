"""When the collectives of a scheduled program should begin, for the kernels in their order to wait little.

XLA:GPU's scheduler is built from the end: it begins a collective where what the profile has it take is over. What a
collective takes by itself is not enough where others are on the link: all would begin too late. So the program's
schedule is taken apart, the link is scheduled beside its kernels (`cost/link_queue.py`), and each collective is given
what lies between its begin there and what waits for it.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping

from autoshard.cluster import LogicalMesh
from autoshard.cost.link_queue import Queued, Queueing, link_queue
from autoshard.hlo.compiled_schedule import collective_in, start_of
from autoshard.hlo.instruction_pricing import InstructionPricing, collectives_s
from autoshard.hlo.module import Computation, HloModule, Instruction

_EARLIER = 0.5
"""Which share of the kernel that it is to begin before a collective need not have been in flight. The scheduler, which
comes from the end, has it begin before the first kernel at whose begin it has been long enough in flight: so it is that
one, even where small kernels have changed places meanwhile."""

_FEEDS = 0.1
"""Which share of the time of a collective a kernel takes at most that comes as early as the collective needs it."""

_LEAST_S = 1e-9
"""The least that a profile tells: what it does not tell, XLA estimates by itself."""


def queued_in_flight_s(module: HloModule, mesh: LogicalMesh, queueing: Queueing = Queueing.BUSY) -> dict[str, float]:
    """How long each collective of a program should be in flight, by name.

    Args:
      module: The compiled program of one device, its instructions in the order in which they run.
      mesh: The logical mesh that it was compiled for, whose links and devices price it.
      queueing: How the link is scheduled.
    """
    alone_s = collectives_s(module, mesh)
    pricing, found = InstructionPricing(module, mesh, alone_s), dict(alone_s)
    for computation in module.scheduled():
        found.update(_Taken(pricing, computation, alone_s).in_flight_s(queueing))
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """From which kernel on a value is there, and the results of which collectives it is made of beside that."""

    kernel: int = 0
    collectives: frozenset[int] = frozenset()


class _Taken:
    """The kernels and the asynchronous collectives of one computation."""

    def __init__(self, pricing: InstructionPricing, computation: Computation, known: Mapping[str, float]):
        self._pricing, self._computation, self._alone_s = pricing, computation, known
        self._feeders = self._found_feeders()
        self._kernels_s: list[float] = []
        self._kernel_of: dict[str, int] = {}
        self._names: list[str] = []  # of collectives
        self._number_of: dict[str, int] = {}  # by the instruction that begins one
        self._starts: list[_Known] = []
        made: dict[str, _Known] = {}
        for instruction in computation.instructions.values():
            sources = [made[o] for o in instruction.operands if o in made]
            there = _Known(
                max((s.kernel for s in sources), default=0), frozenset().union(*(s.collectives for s in sources))
            )
            made[instruction.name] = self._take(instruction, there)

    def _take(self, instruction: Instruction, there: _Known) -> _Known:
        """Adds an instruction whose operands are `there`; when its result is."""
        collective = collective_in(self._pricing.module, instruction, self._alone_s)
        if collective is not None and instruction.opcode.endswith("-start"):  # even if kernels wait for it at once now
            self._number_of[instruction.name] = len(self._names)
            self._names.append(collective)
            self._starts.append(there)
            return _Known(there.kernel)
        if instruction.opcode.endswith("-done"):
            number = self._number_of.get(start_of(self._computation, instruction))
            return there if number is None else _Known(0, frozenset({number}))
        if instruction.opcode == "copy-start":  # the link to the host is another
            return there
        time_s = self._pricing.instruction_s(self._computation, instruction)
        if not time_s:
            return there
        self._kernel_of[instruction.name] = len(self._kernels_s)
        self._kernels_s.append(time_s)
        return there if instruction.name in self._feeders else _Known(len(self._kernels_s))

    def _found_feeders(self) -> set[str]:
        """The short kernels that make what is sent, and nothing else, as those that round weights before they are
        gathered: wherever they are, they come as early as the collective needs them."""
        read_by: dict[str, list[Instruction]] = collections.defaultdict(list)
        for instruction in self._computation.instructions.values():
            for operand in instruction.operands:
                read_by[operand].append(instruction)
        sent_s: dict[str, float] = {}  # of what is only sent, the shortest collective
        for instruction in reversed(tuple(self._computation.instructions.values())):
            collective = collective_in(self._pricing.module, instruction, self._alone_s)
            if collective is not None:
                sent_s[instruction.name] = self._alone_s[collective]
                continue
            readers = read_by[instruction.name]
            if readers and all(reader.name in sent_s for reader in readers):
                least_s = min(sent_s[reader.name] for reader in readers)
                if self._pricing.instruction_s(self._computation, instruction) <= _FEEDS * least_s:
                    sent_s[instruction.name] = least_s
        return set(sent_s)

    def in_flight_s(self, queueing: Queueing) -> dict[str, float]:
        """What lies between the begin of each collective and what waits for it."""
        if not self._names:
            return {}
        stops, times_s = self._stops(), [self._alone_s[name] for name in self._names]
        queue = link_queue(
            self._kernels_s,
            [
                Queued(min(known.kernel, stop), stop, time_s, tuple(sorted(known.collectives)))
                for known, stop, time_s in zip(self._starts, stops, times_s, strict=True)
            ],
            queueing,
        )
        until = list(stops)
        for number, known in enumerate(self._starts):
            for earlier in known.collectives:
                until[earlier] = min(until[earlier], queue.begins[number])
        before_s, kernels_s = [0.0, *itertools.accumulate(self._kernels_s)], [*self._kernels_s, 0.0]
        return {
            name: max(before_s[stop] - before_s[begin] - _EARLIER * kernels_s[begin], _LEAST_S)
            for name, begin, stop in zip(self._names, queue.begins, until, strict=True)
        }

    def _stops(self) -> list[int]:
        """For each collective, the first kernel that reads what is made of its result; their number if none does."""
        first: dict[str, float] = collections.defaultdict(lambda: math.inf)
        stops = [len(self._kernels_s)] * len(self._names)
        for instruction in reversed(tuple(self._computation.instructions.values())):
            reads = self._kernel_of.get(instruction.name, first[instruction.name])
            if instruction.opcode.endswith("-done"):
                number = self._number_of.get(start_of(self._computation, instruction))
                if number is not None:
                    stops[number] = int(min(stops[number], reads))
                    continue
            if instruction.name in self._number_of:  # waits by itself for the results that it sends
                continue
            for operand in instruction.operands:
                first[operand] = min(first[operand], reads)
        return stops

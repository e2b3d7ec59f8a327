"""What a step takes as the compiler scheduled it: a compiled program replayed on two streams.

XLA:GPU runs the instructions of a scheduled program in the order in which its text lists them, kernels on one stream
and collectives on another. A collective begins at its `-start`, once the kernels before it are done and the collective
before it is through; its `-done` makes the kernels wait. What they wait is exposed, the rest of its time is hidden.

    kernel       launch + max(FLOPs / product rate, bytes / memory rate)      (roofline, `cost/compute.py`)
    collective   launch + hierarchical rings over the levels of its mesh axes (`cost/collectives.py`)
    host copy    latency + bytes / bandwidth of the link to the host, one at a time (`cost/host_copies.py`)

Copies between a device and its host (`copy-start`) have a stream of their own; kernels wait for them at `copy-done`.

Rates are those by which plans are priced: of the mesh's links and of its kind of device. XLA:TPU tells the cycles that
it expects of its kernels, which are taken instead (`cycles.py`); what it tells none of takes nothing. It runs
collectives inside fusions (`carried_collectives.py`), whose steps these issue: beside any other kernel such a
collective stands still.

A loop repeats its body; all but its first iterations take what the last simulated one took. These are facts about
schedules, not about silicon: kernels are not slowed by collectives that run beside them.
"""

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence, Set

from autoshard.cluster import LogicalMesh
from autoshard.cost.collectives import all_gather, all_reduce, all_to_all, launched, permute, reduce_scatter
from autoshard.cost.host_copies import host_copy_s
from autoshard.hlo import kernel_cost
from autoshard.hlo.carried_collectives import Carried, carried_collectives
from autoshard.hlo.collectives import CompiledCollective, compiled_collectives
from autoshard.hlo.cycles import cycles_of
from autoshard.hlo.module import Computation, HloModule, Instruction

_SIMULATED_ITERATIONS = 4
"""Of a loop; its first iterations differ from the others by what is in flight when it begins."""

_ROUNDING = 1e-9
"""Share of a collective's time by which sums of times may be off."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledCollective:
    """A collective in the schedule: its time in a step, with all repetitions, and the part that kernels wait for."""

    collective: CompiledCollective
    time_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        """The time that runs behind kernels."""
        return self.time_s - self.exposed_s


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step as scheduled: `step_s` is `kernel_s`, what is exposed of `collective_s`, and `host_s`.

    `collectives`: Those that are exposed most come first. `host_s`: What kernels wait for copies from and to the host.
    """

    step_s: float
    kernel_s: float
    collectives: tuple[ScheduledCollective, ...]
    host_s: float = 0.0

    @property
    def collective_s(self) -> float:
        """Time of all collectives."""
        return sum(c.time_s for c in self.collectives)

    @property
    def exposed_s(self) -> float:
        """Time of collectives that kernels wait for."""
        return sum(c.exposed_s for c in self.collectives)


def replay(module: HloModule, mesh: LogicalMesh, clock_ghz: float | None = None) -> ScheduledStep:
    """Replays a scheduled program.

    Args:
      module: The optimised program of one device, its instructions in the order in which they run.
      mesh: The logical mesh that it was compiled for, whose links price collectives and whose devices price kernels.
      clock_ghz: To take kernels by the cycles that XLA:TPU expects of them; None for the roofline.
    """
    axes = tuple((axis.name, axis.size) for axis in mesh.axes)
    replaying = _Replay(module, mesh, {c.name: c for c in compiled_collectives(module, axes)}, clock_ghz)
    replaying.run(module.computations[module.entry])
    known, sent_s, exposed_s = replaying.known, replaying.sent_s, replaying.exposed_s
    priced = [
        ScheduledCollective(known[name], time_s, _exposed(exposed_s.get(name, 0.0), time_s))
        for name, time_s in sent_s.items()
    ]
    priced.sort(key=lambda c: -c.exposed_s)
    return ScheduledStep(replaying.now_s, replaying.kernel_s, tuple(priced), replaying.host_s)


def _exposed(exposed_s: float, time_s: float) -> float:
    """What is exposed of `time_s`: all of it where only the rounding of a clock hides."""
    return time_s if exposed_s > (1 - _ROUNDING) * time_s else exposed_s


def collective_s(collective: CompiledCollective, mesh: LogicalMesh) -> float:
    """The time of one run of a compiled collective, by the formulas that price plans."""
    axes = [axis for axis in mesh.axes if axis.name in collective.axes]
    own_bytes = sum(p.array.size_bytes for p in collective.pieces)
    match collective.kind:
        case "all-gather":
            priced = all_gather(axes, own_bytes * collective.num_devices)
        case "reduce-scatter":
            priced = reduce_scatter(axes, own_bytes)
        case "all-reduce":
            priced = all_reduce(axes, own_bytes)
        case "all-to-all" | "ragged-all-to-all":
            priced = all_to_all(axes, own_bytes)
        case _:
            priced = permute(axes, own_bytes)
    return launched(priced, mesh.device_type).time_s


@dataclasses.dataclass(slots=True)
class _Replay:
    """The clocks of the two streams, and what has been counted so far; `weight`: how often what runs now is repeated.

    `on_link`: The collectives that kernels may still have to wait for: name, begin and end, in order.
    `in_fusions`: Those of them that fusions have begun and not ended.
    """

    module: HloModule
    mesh: LogicalMesh
    known: Mapping[str, CompiledCollective]
    clock_ghz: float | None
    now_s: float = 0.0
    link_free_s: float = 0.0
    host_link_free_s: float = 0.0
    host_s: float = 0.0
    kernel_s: float = 0.0
    weight: float = 1.0
    on_link: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)
    sent_s: dict[str, float] = dataclasses.field(default_factory=dict)
    exposed_s: dict[str, float] = dataclasses.field(default_factory=dict)
    in_fusions: set[str] = dataclasses.field(default_factory=set)

    def run(self, computation: Computation) -> None:
        """Replays a computation on top of what is in flight."""
        begun: dict[str, str] = {}  # the collectives that have begun, by the names of their `-start`s
        copies_s: dict[str, float] = {}  # when copies end, by the names of their `copy-start`s
        carried = carried_collectives(self.module, computation, self.known)
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            collective = collective_in(self.module, instruction, self.known)
            if collective is not None:
                self._send(collective)
                begun[instruction.name] = collective
                if not opcode.endswith("-start") or is_synchronous(instruction):
                    self._end(collective)
            elif opcode == "copy-start":
                copies_s[instruction.name] = self._copy(instruction)
            elif opcode == "copy-done":
                self._wait_for_host(copies_s.get(instruction.operands[0], self.now_s))
            elif opcode.endswith("-done"):
                self._end(begun.get(start_of(computation, instruction), ""))
            elif opcode == "while":
                self._loop(instruction)
            elif opcode == "conditional":
                self._branches(instruction)
            elif opcode == "call":
                self.run(self.module.computations[instruction.called[0]])
            else:
                self._fusion(computation, instruction, carried.get(instruction.name, ()))

    def _fusion(self, computation: Computation, instruction: Instruction, carried: Sequence[Carried]) -> None:
        """Runs a kernel, beside the collectives that it carries."""
        for one in carried:
            if one.begins:
                self._send(one.name)
                self.in_fusions.add(one.name)
            if one.begins and one.ends:
                self._end(one.name)
        before_s = self.now_s
        self._kernel(computation, instruction)
        resting = self.in_fusions - {one.name for one in carried}
        if resting:
            self._rest(resting, self.now_s - before_s)
        for one in carried:
            if one.ends and not one.begins:
                self._end(one.name)

    def _end(self, name: str) -> None:
        """Kernels wait for the collective that was sent last under a name, if it is still on the link."""
        self.in_fusions.discard(name)
        self._wait(next((end_s for n, _, end_s in reversed(self.on_link) if n == name), self.now_s))

    def _rest(self, names: Set[str], time_s: float) -> None:
        """Collectives, and those behind them on the link, have stood still for that long."""
        sent = [name if end_s > self.now_s - time_s else "" for name, _, end_s in self.on_link]
        first = next((k for k, name in enumerate(sent) if name in names), None)
        if first is not None:
            later = [(name, begin_s + time_s, end_s + time_s) for name, begin_s, end_s in self.on_link[first:]]
            self.on_link[first:] = later
            self.link_free_s += time_s

    def _send(self, name: str) -> None:
        """Puts a collective on the link."""
        time_s = collective_s(self.known[name], self.mesh)
        self.sent_s[name] = self.sent_s.get(name, 0.0) + self.weight * time_s
        begin_s = max(self.now_s, self.link_free_s)
        self.link_free_s = begin_s + time_s
        self.on_link = [c for c in self.on_link if c[2] > self.now_s]
        self.on_link.append((name, begin_s, self.link_free_s))

    def _wait(self, until_s: float) -> None:
        """Kernels wait until then; what is on the link meanwhile is exposed."""
        for name, begin_s, end_s in self.on_link:
            waited_s = min(end_s, until_s) - max(begin_s, self.now_s)
            if waited_s > 0:
                self.exposed_s[name] = self.exposed_s.get(name, 0.0) + self.weight * waited_s
        self.now_s = max(self.now_s, until_s)

    def _copy(self, start: Instruction) -> float:
        """Puts a copy on the link to the host; when it ends. XLA:TPU's are between the memories of a chip."""
        if self.clock_ghz is not None:
            return self.now_s
        self.host_link_free_s = max(self.now_s, self.host_link_free_s) + copied_s(start, self.mesh)
        return self.host_link_free_s

    def _wait_for_host(self, until_s: float) -> None:
        waited_s = max(until_s - self.now_s, 0.0)
        self.host_s += self.weight * waited_s
        self.now_s += waited_s

    def _kernel(self, computation: Computation, instruction: Instruction) -> None:
        if self.clock_ghz is not None:
            time_s = (cycles_of(instruction) or 0.0) / (self.clock_ghz * 1e9)
        else:
            time_s = kernel_cost.kernel_s(self.mesh.device_type, self.module, computation, instruction)
        self.kernel_s += self.weight * time_s
        self.now_s += time_s

    def _loop(self, loop: Instruction) -> None:
        body = self.module.computations[loop.called_as("body")]
        left, simulated = self.module.trips(loop), 0
        outer, entered_free_s = self.weight, self.link_free_s
        while left > 0:
            # What was in flight before goes on through the first iterations, which are all simulated.
            is_alike = simulated + 1 >= _SIMULATED_ITERATIONS and entered_free_s <= self.now_s
            alike = left if is_alike else 1
            before_s, self.weight = self.now_s, outer * alike
            self.run(body)
            self._skip((alike - 1) * (self.now_s - before_s))
            left, simulated = left - alike, simulated + 1
        self.weight = outer

    def _skip(self, time_s: float) -> None:
        """Moves the clocks past iterations like the one before, each of which leaves in flight what it began."""
        self.now_s += time_s
        self.link_free_s += time_s
        self.host_link_free_s += time_s
        self.on_link = [(name, begin_s + time_s, end_s + time_s) for name, begin_s, end_s in self.on_link]

    def _branches(self, conditional: Instruction) -> None:
        """Each branch counts as often as any other."""
        outer, before_s, ends_s = self.weight, self.now_s, []
        self.weight = outer / len(conditional.called)
        for branch in conditional.called:
            self.now_s = before_s
            self.run(self.module.computations[branch])
            ends_s.append(self.now_s)
        self.now_s, self.weight = math.fsum(ends_s) / len(ends_s), outer


def copied_s(start: Instruction, mesh: LogicalMesh) -> float:
    """The time of a `copy-start`: XLA:GPU has them between a device and its host alone; 0 if the link is not known."""
    return 0.0 if mesh.host_link is None else host_copy_s(mesh.host_link, start.result[0].size_bytes)


def collective_in(module: HloModule, instruction: Instruction, known: Container[str]) -> str | None:
    """The name of the collective, one of those known, that an instruction is or begins; None for all else."""
    if instruction.name in known:
        return instruction.name
    if instruction.opcode != "async-start":
        return None
    return next((name for name in module.computations[instruction.called[0]].instructions if name in known), None)


def is_synchronous(instruction: Instruction) -> bool:
    """Whether XLA:GPU runs a `-start` on the stream of the kernels after all."""
    return '"is_sync":true' in instruction.attributes.replace(" ", "")


def start_of(computation: Computation, done: Instruction) -> str:
    """The name of the `-start` that a `-done` belongs to, through updates on the way."""
    name = done.operands[0]
    while (made := computation.instructions.get(name)) is not None and made.opcode == "async-update":
        name = made.operands[0]
    return name

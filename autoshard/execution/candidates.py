"""One program compiled in several ways, of which the fastest that fits the memory is taken.

The first way needs the least memory. What its instructions cost by the cost model becomes a profile for XLA's scheduler
(`hlo/cost_profile.py`), and each compiled schedule is replayed (`hlo/compiled_schedule.py`): nothing runs.
"""

import contextlib
import dataclasses
import hashlib
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autoshard.cluster import LogicalMesh
from autoshard.compiler.candidates import Candidate, candidate_options, has_room, profile_option
from autoshard.cost.link_queue import Queueing
from autoshard.errors import FileFormatError
from autoshard.execution.compiled_memory import CompiledMemory
from autoshard.files import write_text_atomically
from autoshard.hlo.collectives import compiled_collectives
from autoshard.hlo.compiled_schedule import replay
from autoshard.hlo.cost_profile import InstructionCost, cost_profile, instruction_costs
from autoshard.hlo.instruction_pricing import collectives_s
from autoshard.hlo.module import parse
from autoshard.hlo.queued_collectives import queued_in_flight_s
from autoshard.printing import amount, seconds
from autoshard.user_cache import user_cache

Compile = Callable[[Candidate, dict[str, Any]], Any]
"""Compiles the program of a way under compiler options, as `jax.stages.Lowered.compile` does."""


_HARDLY = 0.005
"""By which share a program needs hardly more memory than another: where none fits, such a slow one is no use. Of an
encoder, 0.2 % above its budget, three ways needed the same within 1e-5, of which one took 1.5 times as long."""

_WAITING = 0.02
"""Of the step: a program that waits no longer than that for collectives is not compiled again to have two in flight.
A wide ResNet on 8 H100 waits for 3.7 %, and for 2.0 with two."""

_ROUNDS = 2
"""How often collectives are queued anew, in each way, for the schedule that XLA makes of it the last time, whose
kernels have another order. A Llama on 64 H100 takes 49.3 ms before, 48.2 after one round and 47.4 after two (a script
that is not kept)."""

_ROOMY = Candidate.BY_TIME, Candidate.PLAN_COSTS
"""The orders in which most may begin early. Six layers of GPT-3 175B on data=128, tensor=8 of 1,024 H100 take 565 ms in
the first ones with two collectives in flight, 497 queued; 564 and 540 in the second ones; 540 in the fastest of all
other ways (a script that is not kept)."""

_MOST_PROFILES = 256
"""Files of profiles that are kept; each has some tens of kilobytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateFigures:
    """What a program comes to if it is scheduled in one way.

    Attributes:
      candidate: Which way.
      step_s: The step of the compiled schedule, replayed. exposed_s: What kernels wait for collectives in it.
      reserved_bytes: What must be there for the program to run, on each device.
    """

    candidate: Candidate
    step_s: float
    exposed_s: float
    reserved_bytes: float

    def __str__(self) -> str:
        return (
            f"{self.candidate.value}: {seconds(self.step_s)} simulated, of which {seconds(self.exposed_s)} wait for "
            f"collectives; {amount(self.reserved_bytes)} reserved"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledCandidate:
    """A compiled program: its figures, what the compiler returned, its text and its memory."""

    figures: CandidateFigures
    compiled: Any
    text: str
    memory: CompiledMemory


@dataclasses.dataclass(frozen=True, slots=True)
class Choosing:
    """By what a way to schedule a program is chosen.

    Attributes:
      others: The ways to try beside that which needs the least memory.
      mesh: The logical mesh whose links and devices price what is compiled.
      budget_bytes: Memory of a device; None for no limit.
    """

    others: tuple[Candidate, ...]
    mesh: LogicalMesh
    budget_bytes: float | None

    def fastest(self, figures: Sequence[CandidateFigures]) -> CandidateFigures:
        """The fastest that fits the memory, the earlier one of equals; if none does, of those that hardly need more
        than the one that needs least."""
        return min(fitting(figures, self.budget_bytes), key=lambda f: f.step_s)


def fitting(figures: Sequence[CandidateFigures], budget_bytes: float | None) -> list[CandidateFigures]:
    """Those that fit the memory of a device, which None does not limit; if none does, those that hardly need more than
    the one that needs least."""
    found = [f for f in figures if budget_bytes is None or f.reserved_bytes <= budget_bytes]
    if found:
        return found
    least_bytes = min(f.reserved_bytes for f in figures)
    return [f for f in figures if f.reserved_bytes <= (1 + _HARDLY) * least_bytes]


def compile_candidates(
    compile_as: Compile,
    platform: str,
    choosing: Choosing,
    options: Mapping[str, Any] | None = None,
) -> tuple[CompiledCandidate, ...]:
    """Compiles a program in each way that makes a difference to it, that which needs the least memory first.

    Of the others, one that XLA does not compile is left out, with a warning.

    Args:
      compile_as: Compiles it, in the orders of a way.
      platform: What JAX calls its devices, which are GPUs.
      choosing: Which ways to try, and what prices them.
      options: Compiler options for all of them.
    """
    making = _Making(compile_as, platform, choosing.mesh, dict(options or {}))
    first = making.priced(Candidate.LEAST_MEMORY)
    found = [first]
    for candidate in choosing.others:
        if candidate is Candidate.LEAST_MEMORY:
            continue
        if candidate is Candidate.PIPELINED_LOOPS and not _sends_in_loops(first.text, choosing.mesh):
            continue
        if candidate.keeps_gathers and not has_room(first.figures.reserved_bytes, choosing.budget_bytes):
            continue
        alike = _alike(candidate, found, choosing)
        if candidate.ordered_as is not candidate and (alike is None or not _waits(alike.figures)):
            continue
        try:
            if candidate.is_queued and alike is not None:
                found.append(making.queued(candidate, alike, choosing))
            elif candidate.by_plan_costs and choosing.mesh.num_devices > 1:  # else nothing is sent that could hide
                found.append(making.by_plan_costs(candidate, None if alike is None else alike.text))
            else:
                found.append(making.priced(candidate))
        except RuntimeError as error:  # JAX's own, and what XLA fails with while it schedules
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"XLA does not compile a program for {candidate.value}: {reason:.300}", stacklevel=2)
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class _Making:
    """How programs are compiled; `own`: the user's compiler options."""

    compile_as: Compile
    platform: str
    mesh: LogicalMesh
    own: Mapping[str, Any]

    def by_plan_costs(self, candidate: Candidate, named: str | None) -> CompiledCandidate:
        """A program that is scheduled by what its instructions take, which the text of one with the same instructions
        tells; None to compile one for that."""
        module = parse(self._compiled(candidate).as_text() if named is None else named)
        in_flight_s = {name: candidate.queueing * s for name, s in collectives_s(module, self.mesh).items()}
        return self._profiled(candidate, instruction_costs(module, self.mesh, in_flight_s))

    def queued(self, candidate: Candidate, scheduled: CompiledCandidate, choosing: Choosing) -> CompiledCandidate:
        """The fastest program that fits of those whose collectives begin when the link is free for them beside the
        kernels of the one before, `scheduled` to begin with; as often as that helps."""
        found: list[CompiledCandidate] = []
        for queueing in Queueing:
            before = scheduled
            for _ in range(_ROUNDS):
                module = parse(before.text)
                costs = instruction_costs(module, self.mesh, queued_in_flight_s(module, self.mesh, queueing))
                made = self._profiled(candidate, costs)
                found.append(made)
                if made.figures.step_s >= before.figures.step_s:
                    break
                before = made
        fastest = choosing.fastest([c.figures for c in found])
        return next(c for c in found if c.figures is fastest)

    def priced(self, candidate: Candidate, profile: Mapping[str, str] | None = None) -> CompiledCandidate:
        """A program with its figures; `profile`: the option that tells what its instructions cost."""
        compiled = self._compiled(candidate, profile)
        text, memory = compiled.as_text(), CompiledMemory.of(compiled, self.platform)
        step = replay(parse(text), self.mesh)
        figures = CandidateFigures(candidate, step.step_s, step.exposed_s, memory.total_bytes)
        return CompiledCandidate(figures, compiled, text, memory)

    def _profiled(self, candidate: Candidate, costs: tuple[InstructionCost, ...]) -> CompiledCandidate:
        with _profile_file(cost_profile(costs)) as path:
            return self.priced(candidate, profile_option(path))

    def _compiled(self, candidate: Candidate, profile: Mapping[str, str] | None = None) -> Any:
        options = {**self.own, **candidate_options(self.platform, candidate), **(profile or {})}
        return self.compile_as(candidate, options)


def _alike(candidate: Candidate, found: Sequence[CompiledCandidate], choosing: Choosing) -> CompiledCandidate | None:
    """The program, of those `found`, that a way schedules once more, or whose instructions have the names of its own:
    one in the same orders. None if there is none.

    What queues collectives schedules the fastest of all once more, and the fastest of the orders that let most begin
    early, of those that fit: there collectives find room on the link between those that are needed at once.
    """
    same = [c for c in found if c.figures.candidate.ordered_as is candidate.ordered_as]
    if candidate.is_queued:
        fastest = choosing.fastest([c.figures for c in found])
        fits = {f.candidate.ordered_as for f in fitting([c.figures for c in found], choosing.budget_bytes)}
        roomy = next((orders for orders in _ROOMY if orders in fits), None)
        own = choosing.fastest([c.figures for c in same]) if same else None
        if own is not fastest and not (candidate.ordered_as is roomy and _waits(fastest)):
            return None
        return next((c for c in same if c.figures is own), None)
    is_first_program = candidate.ordered_as is Candidate.PLAN_COSTS  # others have their own
    return next(iter(same), found[0] if is_first_program else None)


def _sends_in_loops(text: str, mesh: LogicalMesh) -> bool:
    """Whether a compiled program has collectives that a loop repeats."""
    axes = tuple((axis.name, axis.size) for axis in mesh.axes)
    return any(c.times > 1 for c in compiled_collectives(parse(text), axes))


def _waits(figures: CandidateFigures) -> bool:
    """Whether kernels wait long enough for collectives to try another way."""
    return figures.exposed_s > _WAITING * figures.step_s


@contextlib.contextmanager
def _profile_file(profile: str) -> Iterator[str]:
    """A file that holds a profile.

    It is named by its content: XLA keeps what it has read of a path, and JAX's own cache of compiled programs knows a
    program by its compiler options.
    """
    name = f"{hashlib.sha256(profile.encode()).hexdigest()[:32]}.pbtxt"
    with tempfile.TemporaryDirectory() as temporary:
        folder = user_cache("profiles") or pathlib.Path(temporary)
        try:
            _write(folder / name, profile)
        except (OSError, FileFormatError) as error:
            warnings.warn(f"The profile of a program is not kept in {folder}: {error}", stacklevel=2)
            folder = pathlib.Path(temporary)
            _write(folder / name, profile)
        yield str(folder / name)


def _write(path: pathlib.Path, profile: str) -> None:
    """Writes a profile, and removes those that were not used for longest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, profile)
    by_age = sorted(path.parent.glob("*.pbtxt"), key=lambda p: p.stat().st_mtime)
    for old in by_age[:-_MOST_PROFILES]:
        old.unlink(missing_ok=True)

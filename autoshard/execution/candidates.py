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
from autoshard.compiler.candidates import Candidate, candidate_options
from autoshard.errors import FileFormatError
from autoshard.execution.compiled_memory import CompiledMemory
from autoshard.files import write_text_atomically
from autoshard.hlo.compiled_schedule import replay
from autoshard.hlo.cost_profile import cost_profile, instruction_costs
from autoshard.hlo.module import parse
from autoshard.printing import amount, seconds
from autoshard.user_cache import user_cache

Compile = Callable[[dict[str, Any]], Any]
"""Compiles a lowered program under compiler options, as `jax.stages.Lowered.compile` does."""


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
        """The fastest that fits the memory, the earlier one of equals; if none does, the one that needs least."""
        limit_bytes = self.budget_bytes
        fitting = [f for f in figures if limit_bytes is None or f.reserved_bytes <= limit_bytes]
        return min(fitting, key=lambda f: f.step_s) if fitting else min(figures, key=lambda f: f.reserved_bytes)


def compile_candidates(
    compile_with: Compile, platform: str, choosing: Choosing, options: Mapping[str, Any] | None = None
) -> tuple[CompiledCandidate, ...]:
    """Compiles a program in each way, that which needs the least memory first.

    Args:
      compile_with: Compiles it. platform: What JAX calls its devices, which are GPUs.
      choosing: Which ways to try, and what prices them.
      options: Compiler options for all of them.
    """
    own = dict(options or {})
    compiled = compile_with({**own, **candidate_options(platform, Candidate.LEAST_MEMORY)})
    found = [_priced(Candidate.LEAST_MEMORY, compiled, platform, choosing.mesh)]
    with _profile_file(found[0].text, choosing) as profile:
        for candidate in choosing.others:
            if candidate is not Candidate.LEAST_MEMORY:
                compiled = compile_with({**own, **candidate_options(platform, candidate, profile)})
                found.append(_priced(candidate, compiled, platform, choosing.mesh))
    return tuple(found)


def _priced(candidate: Candidate, compiled: Any, platform: str, mesh: LogicalMesh) -> CompiledCandidate:
    text, memory = compiled.as_text(), CompiledMemory.of(compiled, platform)
    step = replay(parse(text), mesh)
    figures = CandidateFigures(candidate, step.step_s, step.exposed_s, memory.total_bytes)
    return CompiledCandidate(figures, compiled, text, memory)


@contextlib.contextmanager
def _profile_file(text: str, choosing: Choosing) -> Iterator[str | None]:
    """A file with what the instructions of a compiled program cost, if a candidate needs it.

    It is named by its content: XLA keeps what it has read of a path, and JAX's own cache of compiled programs knows a
    program by its compiler options.
    """
    if Candidate.PLAN_COSTS not in choosing.others:
        yield None
        return
    profile = cost_profile(instruction_costs(parse(text), choosing.mesh))
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

"""Compiling a planned step ahead of time, for devices that need not be there."""

import contextlib
import dataclasses
import fcntl
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from autoshard.compiler.candidates import Candidate
from autoshard.errors import VerificationError
from autoshard.execution.candidates import CandidateFigures, Choosing, compile_candidates
from autoshard.execution.compiled_memory import CompiledMemory
from autoshard.execution.jit import device_mesh
from autoshard.plans.apply import planned_function
from autoshard.plans.program_plan import ProgramPlan
from autoshard.verify.kept_kernels import kernels_kept


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledStep:
    """The optimised program of one device.

    Attributes:
      text: The program. memory: What it needs. log: What the compiler complained of.
      candidates: The ways in which it was scheduled. chosen: That of this program. Empty and None where the compiler
        was asked for one only.
    """

    text: str
    memory: CompiledMemory
    log: str
    candidates: tuple[CandidateFigures, ...] = ()
    chosen: CandidateFigures | None = None


def compile_step(
    plan: ProgramPlan,
    fn: Callable[..., Any],
    args: Sequence[Any],
    devices: Sequence[Any],
    options: dict[str, Any],
    time_limit_s: float | None = None,
    choosing: Choosing | None = None,
) -> CompiledStep:
    """Compiles `fn(*args)` as planned for `devices`; nothing runs.

    Args:
      plan, fn, args: The plan, its function, and the arguments, by shape.
      devices: In mesh order; they need not be there.
      options: Compiler options.
      time_limit_s: Seconds that the compiler may take; None for no limit.
      choosing: By what the fastest way to schedule the program is chosen; None to schedule it as the plan says.

    Raises:
      PlanMismatchError: `fn` is not what was planned.
      VerificationError: The compiler refuses the program, or takes longer than it may. It cannot be stopped within this
        process, and then goes on in the background.
    """
    run = planned_function(plan, fn, device_mesh(plan.axes, devices, plan.logical_mesh.order, plan.logical_mesh.torus))
    compile_one, platform, started = run.compile_as(args), devices[0].platform, time.perf_counter()

    def compile_as(candidate: Candidate, own: dict[str, Any]) -> Any:
        return _within(time_limit_s, lambda: compile_one(candidate, own), started)

    with _stderr_kept() as log, kernels_kept(platform) as kept:
        try:
            if choosing is None:
                compiled = compile_as(Candidate.LEAST_MEMORY, options)
                return CompiledStep(compiled.as_text(), CompiledMemory.of(compiled, platform), log())
            candidates = compile_candidates(compile_as, platform, choosing, {**options, **kept})
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            raise VerificationError(f"XLA does not compile the planned step: {str(error).strip()[:600]}") from error
    best = choosing.fastest([c.figures for c in candidates])
    one = next(c for c in candidates if c.figures is best)
    return CompiledStep(one.text, one.memory, log(), tuple(c.figures for c in candidates), best)


def _within(time_limit_s: float | None, work: Callable[[], Any], started: float | None = None) -> Any:
    """The result of `work`, done in a thread so that Ctrl-C and the limit are heard meanwhile.

    `started`: From when the limit counts, by `time.perf_counter`; None for now.
    """
    started = time.perf_counter() if started is None else started
    done: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            done.append((work(), None))
        except BaseException as error:
            done.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    until = None if time_limit_s is None else started + time_limit_s
    thread.start()
    while thread.is_alive():
        if until is not None and time.perf_counter() >= until:
            raise VerificationError(
                f"XLA may take {time_limit_s:g} s to compile the planned step, and took longer. Raise the time limit, "
                "or verify the model with fewer layers."
            )
        thread.join(0.05)
    result, error = done[0]
    if error is not None:
        raise error
    return result


@contextlib.contextmanager
def _stderr_kept() -> Iterator[Callable[[], str]]:
    """Reads along what C++ writes to the standard error while the block runs; yields how to get it afterwards.

    Nothing is held back: what a compiler says before it ends the process stays where it belongs.
    """
    sys.stderr.flush()
    if _is_readable_file(2):
        start = os.fstat(2).st_size
        yield lambda: os.pread(2, os.fstat(2).st_size - start, start).decode(errors="replace")
        return
    before, (reading, writing), chunks = os.dup(2), os.pipe(), []

    def forward() -> None:
        while chunk := os.read(reading, 1 << 16):
            os.write(before, chunk)
            chunks.append(chunk)

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    os.dup2(writing, 2)
    os.close(writing)
    try:
        yield lambda: b"".join(chunks).decode(errors="replace")
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)  # closes the last writing end, which ends the thread
        thread.join()
        os.close(reading)
        os.close(before)


def _is_readable_file(descriptor: int) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    return stat.S_ISREG(os.fstat(descriptor).st_mode) and flags & os.O_ACCMODE == os.O_RDWR

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

from autoshard.errors import VerificationError
from autoshard.execution.jit import device_mesh
from autoshard.plans.apply import planned_function
from autoshard.plans.program_plan import ProgramPlan

_NO_PEAK = ("cpu", "tpu")
"""Platforms whose compilers tell no peak: XLA:TPU says 0, XLA:CPU leaves the temporaries out (tried on jax 0.10.2)."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledMemory:
    """What the compiler says of one device's memory, in bytes.

    Attributes:
      argument_bytes, output_bytes: Of the interface. alias_bytes: Of outputs that take the place of arguments.
      temporary_bytes: Everything else that it reserves. peak_bytes: The most in use at once, by its own account.
    """

    argument_bytes: float
    output_bytes: float
    alias_bytes: float
    temporary_bytes: float
    peak_bytes: float

    @property
    def total_bytes(self) -> float:
        """What must be there for the program to run: arguments, outputs of their own, and temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledStep:
    """The optimised program of one device as text, its memory, and what the compiler complained of."""

    text: str
    memory: CompiledMemory
    log: str = ""


def compile_step(
    plan: ProgramPlan,
    fn: Callable[..., Any],
    args: Sequence[Any],
    devices: Sequence[Any],
    options: dict[str, Any],
    time_limit_s: float | None = None,
) -> CompiledStep:
    """Compiles `fn(*args)` as planned for `devices`; nothing runs.

    Args:
      plan, fn, args: The plan, its function, and the arguments, by shape.
      devices: In mesh order; they need not be there.
      options: Compiler options.
      time_limit_s: Seconds that the compiler may take; None for no limit.

    Raises:
      PlanMismatchError: `fn` is not what was planned.
      VerificationError: The compiler refuses the program, or takes longer than it may. It cannot be stopped within this
        process, and then goes on in the background.
    """
    lowered = planned_function(plan, fn, device_mesh(plan.axes, devices)).lower(*args)
    with _stderr_kept() as log:
        try:
            compiled = _within(time_limit_s, lambda: lowered.compile(compiler_options=options))
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            raise VerificationError(f"XLA does not compile the planned step: {str(error).strip()[:600]}") from error
    stats = compiled.memory_analysis()
    memory = CompiledMemory(
        float(stats.argument_size_in_bytes),
        float(stats.output_size_in_bytes),
        float(stats.alias_size_in_bytes),
        float(stats.temp_size_in_bytes),
        float(getattr(stats, "peak_memory_in_bytes", 0)),
    )
    if devices[0].platform in _NO_PEAK:
        memory = dataclasses.replace(memory, peak_bytes=memory.total_bytes)
    return CompiledStep(compiled.as_text(), memory, log())


def _within(time_limit_s: float | None, work: Callable[[], Any]) -> Any:
    """The result of `work`, done in a thread so that Ctrl-C and the limit are heard meanwhile."""
    done: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            done.append((work(), None))
        except BaseException as error:
            done.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    until = None if time_limit_s is None else time.perf_counter() + time_limit_s
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

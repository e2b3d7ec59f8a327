"""`autoshard verify`: a saved plan, and the configuration it was made from, beside what compilers make of it."""

import contextlib
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

import rich.console
import rich.markup

from autoshard.errors import ConfigError, VerificationError
from autoshard.offloading.reading import AnyPlan, load
from autoshard.train.config import load_config
from autoshard.train.verify_process import Request
from autoshard.verify.report import Failure, Report
from autoshard.verify.targets import target_named
from autoshard.verify.tpus import TpuTarget
from autoshard.verify.verification import Verification

_LAST_LINES = 3
"""Of what a compiler wrote before it died."""


def verify_visibly(
    path: pathlib.Path,
    config: pathlib.Path | None,
    targets: Sequence[str],
    time_limit_s: float | None,
    json_file: pathlib.Path | None,
    console: rich.console.Console,
) -> Report:
    """Verifies a saved plan for each target in turn, prints each outcome, and keeps those that are there in JSON.

    Args:
        path: the plan.
        config: the configuration that it was made from; None for the one that the plan carries.
        targets: what to compile for; none for the plan's own device type.
        time_limit_s: seconds for each target; None for no limit.
        json_file: where to write the outcomes, after each.
        console: where to tell progress.

    Raises:
        FileFormatError, ConfigError: plan or configuration cannot be read.
    """
    plan = load(path)
    configuration = _configuration(plan, path, config)
    outcomes: list[Verification | Failure] = []
    for request in _requests(plan, path, configuration, targets):
        if title := plan.program_title(request.program):
            print(title, flush=True)
        outcome = _verified(request, time_limit_s, console)
        outcomes.append(outcome)
        if isinstance(outcome, Failure):
            console.print(f"error: {outcome.target}: {outcome.reason}", style="bold red", markup=False, soft_wrap=True)
        else:
            print(outcome, flush=True)
        if json_file is not None:
            Report(tuple(outcomes)).save(json_file)
    return Report(tuple(outcomes))


def _requests(plan: AnyPlan, path: pathlib.Path, configuration: str, targets: Sequence[str]) -> Iterator[Request]:
    """One for each program and target, by default its own kind of device."""
    for number, program in enumerate(plan.programs):
        for target in targets or [program.device]:
            yield Request(plan=str(path), configuration=configuration, target=target, outcome="", program=number)


def _configuration(plan: AnyPlan, path: pathlib.Path, config: pathlib.Path | None) -> str:
    if config is not None:
        return load_config(config).model_dump_json()
    if plan.configuration is None:
        raise ConfigError(
            f"{path}: verifying needs the program, and this plan does not carry the configuration that it was made "
            "from. Name it with --config; in code, call plan.verify(fn, *args)."
        )
    return plan.configuration


def _verified(request: Request, time_limit_s: float | None, console: rich.console.Console) -> Verification | Failure:
    """The outcome of one target, from a process of its own."""
    target = str(request.target)
    try:
        environment = _environment(target)
    except VerificationError as error:
        return Failure(target, str(error))
    with tempfile.TemporaryDirectory() as folder, open(pathlib.Path(folder) / "log", "w+b") as log:
        outcome = pathlib.Path(folder) / "outcome.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "autoshard.train.verify_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and the log tells why
                assert process.stdin is not None
                process.stdin.write(request.model_copy(update={"outcome": str(outcome)}).model_dump_json())
                process.stdin.close()
            stage, is_late = _watched(process, target, time_limit_s, console)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if outcome.exists():
            return Report.load(outcome).outcomes[0]
        if is_late:
            return Failure(
                target,
                f"Verifying may take {time_limit_s:g} s for each target, and took longer; it was {stage}. Raise "
                "--time-limit, or verify the model with fewer layers.",
            )
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
        told = " / ".join(lines[-_LAST_LINES:])[:600] or "it told nothing"
        is_killed = process.returncode == -signal.SIGKILL
        hint = " The system kills so what takes more memory than there is." if is_killed else ""
        return Failure(
            target, f"The process that compiles ended with status {process.returncode} while {stage}: {told}.{hint}"
        )


def _environment(target: str) -> dict[str, str]:
    """In which a process compiles for a target.

    Raises:
        VerificationError: there is no such target.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}  # no device is used, whatever the machine has
    if isinstance(target_named(target), TpuTarget):
        environment.pop("XLA_FLAGS", None)  # libtpu ends a process over flags of other compilers
    return environment


def _watched(
    process: subprocess.Popen[str], target: str, time_limit_s: float | None, console: rich.console.Console
) -> tuple[str, bool]:
    """Tells what the process does until it has ended or takes too long; the last stage, and whether it is late."""
    started, stage = time.perf_counter(), "starting"
    stages: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_forward, args=(process.stdout, stages), daemon=True).start()
    with console.status("Verifying") as status:
        while process.poll() is None:
            elapsed_s = time.perf_counter() - started
            while not stages.empty():
                stage = stages.get()
            status.update(rich.markup.escape(f"Verifying for {target}, {elapsed_s:.0f} s: {stage}"))
            if time_limit_s is not None and elapsed_s > time_limit_s:
                return stage, True
            time.sleep(0.05)
    return stage, False


def _forward(lines: Iterable[str], into: queue.SimpleQueue[str]) -> None:
    for line in lines:
        into.put(line.strip())

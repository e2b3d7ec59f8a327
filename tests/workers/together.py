"""Runs several processes that belong together, and tells what each printed."""

import socket
import subprocess
from collections.abc import Mapping, Sequence

TIMEOUT_S = 240


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run_together(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]] | None = None
) -> list[str]:
    """What each prints; fails with all their output if one fails or takes too long.

    Args:
      commands: Of each process. environments: Likewise; None for this process's own.
    """
    processes = [
        subprocess.Popen(
            command,
            env=None if environments is None else dict(environments[number]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, command in enumerate(commands)
    ]
    printed = []
    try:
        printed = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
    printed += [process.communicate()[0] for process in processes[len(printed) :]]
    assert [process.returncode for process in processes] == [0] * len(commands), "\n\n".join(printed)
    return printed
